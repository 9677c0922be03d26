"""vLLM's side of the plugin: registration, quantization config, linear method, custom op."""

import os
import sys

from paroquant_gfx1201 import __version__, attest
from paroquant_gfx1201.modes import Mode

LOG_PREFIX = "[paroquant_gfx1201]"


def log(message: str) -> None:
    """One line on stderr, whatever the logging set-up of the process is."""
    print(f"{LOG_PREFIX} {message}", file=sys.stderr, flush=True)


def register() -> None:
    """Register quantization method ``paroquant`` and attest this process's knobs.

    Idempotent. With RADIANCE_PAROQUANT=0 it attests and registers nothing.
    Raises PluginError for knobs without a meaning.
    """
    mode = Mode.from_environment(os.environ)
    attest.process.mode = mode.to_json()
    attest.process.write(os.environ)
    if not mode.enabled:
        log("not registered (RADIANCE_PAROQUANT=0)")
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from paroquant_gfx1201.vllm_glue import config

    if not config.registered():
        # Registering twice is allowed, but vLLM warns about it in every process.
        register_quantization_config(config.METHOD)(config.ParoQuantConfig)
    log(
        f"registered ({__version__}, element {mode.element}, decode band up to M="
        f"{mode.decode_max_m} per group, prefill per {mode.prefill_granularity} with zero point in "
        f"the {mode.prefill_zero_point})"
    )
