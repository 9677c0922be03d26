"""Environment variables the plugin reads, and the rules for reading them."""

from collections.abc import Mapping

from paroquant_gfx1201.errors import PluginError

PREFIX = "RADIANCE_"

SWITCHES: dict[str, bool] = {
    "RADIANCE_PAROQUANT": True,
    "RADIANCE_PQ_WPERM": True,
    "RADIANCE_PQ_PTOK": True,
    "RADIANCE_PQ_ATILED": True,
    "RADIANCE_PQ_I8": False,
    "RADIANCE_PQ_PG": False,
    "RADIANCE_PQ_ZPE": False,
    "RADIANCE_PQ_CHECKALL": False,
    "RADIANCE_NVFP4_MXFP4": False,
}
"""On/off knobs and their defaults. Only ``0`` and ``1`` are accepted."""

INTEGERS: dict[str, int] = {"RADIANCE_PQ_DECODE_MAX_M": 64}
"""Integer knobs and their defaults; values are tokens and must be at least 1."""

CHOICES: dict[str, tuple[str, ...]] = {
    "RADIANCE_PQ_PATH": ("auto", "cpu_reference", "cpu_int8", "triton", "hip_gfx1201"),
    "RADIANCE_SKINNY_GEMM": ("1", "0", "all"),
    "RADIANCE_NVFP4_EXP": ("mse", "ocp"),
    "RADIANCE_NVFP4_FP8_LAYERS": ("mxfp4", "keep"),
    "RADIANCE_NVFP4_LMHEAD": ("bf16", "keep"),
    "RADIANCE_NVFP4_BF16_LAYERS": ("in_proj_ba", "none"),
}
"""Knobs with named values; the first is the default."""


_ALWAYS = "this plugin's kernels always do"
_NO_CALLER = (
    "vLLM's models hand linear layers bf16 rows: norms, activations and gates run before them, and the fused producers "
    "of kernels/hip have no caller"
)
WITHOUT_EFFECT: dict[str, str] = {
    "RADIANCE_PQ_ROT_STREAM": _NO_CALLER,
    "RADIANCE_PQ_ROT_STREAM2": _NO_CALLER,
    "RADIANCE_PQ_ROT_STREAM3": "no kernel here is fused with an all-reduce",
    "RADIANCE_PQ_AT_LBK": "the prefill GEMM's slab is the group of the weight's scales",
    "RADIANCE_PQ_AT_HOIST": _ALWAYS,
    "RADIANCE_PQ_DECODE_NT": _ALWAYS,
    "RADIANCE_PQ_FUSED_TOKQ": _ALWAYS,
    "RADIANCE_PQ_ROT_V2": _ALWAYS,
    "RADIANCE_PQ_PG_PRODUCER": "there is one producer per group, in the layout without LDS conflicts",
    "RADIANCE_PQM_FUSED_TOKQ": _ALWAYS,
    "RADIANCE_PQM_SINGLE_LAUNCH": _ALWAYS,
}
"""Knobs of other kernels for this format that a plan may state, and why they change nothing here."""


def seen(environment: Mapping[str, str]) -> dict[str, str]:
    """Every RADIANCE_* variable, exactly as the process has it, sorted by name.

    A set-but-empty variable is refused: C code that tests ``getenv`` takes it for "on" and Python
    that tests truth takes it for "off", so the same boot would mean two things.
    """
    found = {name: environment[name] for name in sorted(environment) if name.startswith(PREFIX)}
    for name, value in found.items():
        if not value.strip():
            raise PluginError(f"{name} is set but empty: give it a value or unset it")
    return found


def switch(environment: Mapping[str, str], name: str) -> bool:
    """The value of an on/off knob. Raises PluginError for anything but 0 and 1."""
    text = seen(environment).get(name)
    if text is None:
        return SWITCHES[name]
    if text not in ("0", "1"):
        raise PluginError(f"{name}={text!r} is not understood: use 0 or 1")
    return text == "1"


def integer(environment: Mapping[str, str], name: str) -> int:
    """The value of an integer knob. Raises PluginError unless it is a decimal integer >= 1."""
    text = seen(environment).get(name)
    if text is None:
        return INTEGERS[name]
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise PluginError(f"{name}={text!r} is not understood: use an integer of at least 1")
    return int(text)


def choice(environment: Mapping[str, str], name: str) -> str:
    """The value of a knob of CHOICES. Raises PluginError for a value that it does not have."""
    text = seen(environment).get(name, CHOICES[name][0])
    if text not in CHOICES[name]:
        raise PluginError(f"{name}={text!r} is not understood: use {' or '.join(CHOICES[name])}")
    return text
