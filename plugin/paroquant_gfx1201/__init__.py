"""ParoQuant int4, int5 and MXFP4 for vLLM, with the numerics of the gfx1201 kernels.

Importing this package imports neither torch nor vLLM; ``register`` does, when vLLM calls it.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; runs in every vLLM process, any number of times.

    Raises ``PluginError`` (one line) when a RADIANCE_* variable cannot be understood.
    """
    from paroquant_gfx1201.vllm_glue import register as register_with_vllm

    register_with_vllm()
