"""vLLM's side of the plugin: registration, quantization config, linear method, custom op."""

import os
import sys

from paroquant_gfx1201 import __version__, attest, knobs
from paroquant_gfx1201.modes import Mode

LOG_PREFIX = "[paroquant_gfx1201]"


def log(message: str) -> None:
    """One line on stderr, whatever the logging set-up of the process is."""
    print(f"{LOG_PREFIX} {message}", file=sys.stderr, flush=True)


def register() -> None:
    """Register the quantization methods and attest this process's knobs.

    Idempotent. With RADIANCE_PAROQUANT=0 it attests and registers nothing.
    Raises PluginError for knobs without a meaning.
    """
    mode = Mode.from_environment(os.environ)
    attest.process.mode = mode.to_json()
    attest.process.write(os.environ)
    if not mode.enabled:
        log("not registered (RADIANCE_PAROQUANT=0)")
        return
    from vllm.model_executor.layers import quantization

    from paroquant_gfx1201.vllm_glue import config

    methods = [config.ParoQuantConfig, config.GptqModelParoConfig, config.ParoMxfp4Config]
    if knobs.switch(os.environ, "RADIANCE_NVFP4_MXFP4"):
        from paroquant_gfx1201.vllm_glue import nvfp4

        methods.append(nvfp4.Nvfp4Config)
    for method in methods:
        # Registering twice is allowed, but vLLM warns about it in every process.
        if quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(method.method) is not method:
            quantization.register_quantization_config(method.method)(method)
    log(
        f"registered ({__version__}, element {mode.element}, decode band up to M="
        f"{mode.decode_max_m} per group, prefill per {mode.prefill_granularity} with zero point in "
        f"the {mode.prefill_zero_point})"
    )
