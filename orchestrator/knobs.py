"""The registry of environment variables that a served variant is allowed to set.

A plan states every knob here, defaults included, so that a knob which never reached the server shows.
`graph` says that the value can change a compiled graph, and therefore belongs to the compile cache's key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.schema import Variant


@dataclass(frozen=True)
class Knob:
    """One declared environment variable. `low`..`high` bound an integer; `choices` a word."""

    name: str
    default: str
    doc: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    graph: bool = True

    def render(self, value: Any, where: str) -> str:
        """`value` as the string that the server gets. Raises UsageError where it has the wrong type or range.

        Booleans and floats are refused: YAML reads `off`, `010` and `1e3` as something other than was typed.
        """
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or text == "":
            raise UsageError(f"{where}: {self.name}={value!r} is empty or no plain value; write {self.wanted()}")
        if self.choices:
            if text not in self.choices:
                raise UsageError(f"{where}: {self.name}={text} is not allowed; write {self.wanted()}")
            return text
        if not text.isdecimal() or (len(text) > 1 and text[0] == "0"):
            raise UsageError(f"{where}: {self.name}={text} is not a plain integer; write {self.wanted()}")
        if not self.low <= int(text) <= self.high:
            raise UsageError(f"{where}: {self.name}={text} is out of range; write {self.wanted()}")
        return text

    def wanted(self) -> str:
        return "one of " + ", ".join(self.choices) if self.choices else f"an integer from {self.low} to {self.high}"


def _flag(name: str, default: int, doc: str, graph: bool = True) -> Knob:
    return Knob(name, str(default), doc, choices=("0", "1"), graph=graph)


def _integer(name: str, default: int, low: int, high: int, doc: str, graph: bool = True) -> Knob:
    return Knob(name, str(default), doc, low, high, graph=graph)


PATHS = ("auto", "cpu_reference", "cpu_int8", "triton", "hip_gfx1201")
REGISTRY: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        _flag("RADIANCE_PAROQUANT", 1, "route ParoQuant checkpoints to this plugin"),
        _integer("RADIANCE_PQ_DECODE_MAX_M", 64, 1, 128, "rows up to which the decode band is used; above it, prefill"),
        Knob("RADIANCE_PQ_PATH", "auto", "which code multiplies a layer; auto: the best that can", choices=PATHS),
        _flag("RADIANCE_PQ_WPERM", 1, "weights in fragment order; the int5 bit plane exists in this order only"),
        _flag("RADIANCE_PQ_DECODE_NT", 1, "streaming (non-temporal) weight loads in the decode band"),
        _flag("RADIANCE_PQ_ATILED", 1, "prefill GEMM on fragment-tiled activations"),
        Knob("RADIANCE_PQ_AT_LBK", "128", "k-slab of the tiled prefill GEMM", choices=("64", "128")),
        _flag("RADIANCE_PQ_AT_HOIST", 1, "hoist the weight fragments of the tiled prefill GEMM"),
        _flag("RADIANCE_PQ_PTOK", 1, "one activation scale per token above the decode band"),
        _flag("RADIANCE_PQ_FUSED_TOKQ", 1, "rotate and quantize per token in one launch"),
        _flag("RADIANCE_PQ_ROT_V2", 1, "rotation records in registers"),
        _flag("RADIANCE_PQ_ROT_STREAM", 1, "rotation fused into the norm producers"),
        _flag("RADIANCE_PQ_ROT_STREAM2", 1, "rotation fused into silu-mul, gated norm and attention gate"),
        _flag("RADIANCE_PQ_ROT_STREAM3", 0, "rotation fused into the all-reduce (measured slower)"),
        _flag("RADIANCE_PQ_I8", 0, "int8 activations; 0: e4m3"),
        _flag("RADIANCE_PQ_PG", 0, "one activation scale per group above the decode band, for int8"),
        _flag("RADIANCE_PQ_ZPE", 0, "zero point corrected in the epilogue, in fp16"),
        Knob("RADIANCE_PQ_PG_PRODUCER", "3", "which per-group producer kernel", choices=("1", "2", "3")),
        _flag("RADIANCE_PQ_CHECKALL", 0, "compare each layer with float64 while serving; slow"),
        _flag("RADIANCE_PQM_FUSED_TOKQ", 1, "MXFP4-PARO: rotate and quantize per token in one launch"),
        _flag("RADIANCE_PQM_SINGLE_LAUNCH", 1, "MXFP4-PARO: one GEMM launch for merged projections"),
        Knob("RADIANCE_SKINNY_GEMM", "1", "bf16 kernel for narrow projections", choices=("0", "1", "all")),
        _flag("RADIANCE_GDN_FUSED_UPDATE", 1, "fused GatedDeltaNet state update"),
        _integer("R4D_ATTN_FP8", 3, 0, 15, "which legs of the R4D prefill attention are 8-bit, as a bit mask"),
        _flag("RADIANCE_MXFP4_W4A8", 1, "MXFP4: fp8 activations on the fp8 matrix units"),
        _flag("RADIANCE_MXFP4_WPERM", 1, "MXFP4: weights in fragment order"),
        _flag("RADIANCE_MXFP4_DECODE_NT", 1, "MXFP4: streaming weight loads in the decode band"),
        _integer("RADIANCE_MXFP4_DECODE_MAX_M", 64, 1, 128, "MXFP4: rows up to which the decode band is used"),
        _flag("RADIANCE_NVFP4_MXFP4", 0, "requantize NVFP4 checkpoints to MXFP4 at load"),
        Knob("RADIANCE_NVFP4_EXP", "mse", "block exponent rule of that requantization", choices=("mse", "ocp")),
        Knob("RADIANCE_NVFP4_FP8_LAYERS", "mxfp4", "what its fp8 layers become", choices=("mxfp4", "keep")),
        Knob("RADIANCE_NVFP4_LMHEAD", "bf16", "what its lm_head becomes", choices=("bf16", "keep")),
        Knob("RADIANCE_NVFP4_BF16_LAYERS", "in_proj_ba", "bf16 layers requantized too", choices=("in_proj_ba", "none")),
    )
}


# Where the settings live that launch scripts take as variables of their own.
ELSEWHERE: Mapping[str, str] = {
    "SPEC": "variant.speculation.tokens",
    "DRAFTER": "variant.speculation.drafter",
    "MODEL_DIR": "box.model.checkpoints",
    "GPU_UTIL": "variant.serve.gpu-memory-utilization",
    "KV_DTYPE": "variant.serve.kv-cache-dtype",
    "MAXLEN": "variant.serve.max-model-len",
    "MAXSEQS": "variant.serve.max-num-seqs",
    "CHUNK": "variant.serve.max-num-batched-tokens",
    "MAX_LOGPROBS": "variant.serve.max-logprobs",
    "PREFIX_CACHE": "variant.serve.enable-prefix-caching",
    "ASYNC": "variant.serve.async-scheduling",
    "TP": "variant.serve.tensor-parallel-size",
    "CACHE": "paths.cache",
    "IMAGE": "box.container.image",
}
MXFP4 = ("mxfp4-paro", "nvfp4")
DECODE_ROWS_LIMIT = 128  # of the decode kernels


def from_activation(variant: Variant) -> dict[str, str]:
    """The knobs that the activation mode stands for."""
    activation = variant.activation
    return {
        "RADIANCE_PQ_I8": str(int(activation.element == "int8")),
        "RADIANCE_PQ_PG": str(int(activation.element == "int8" and activation.prefill_scale == "group")),
        "RADIANCE_PQ_PTOK": str(int(activation.prefill_scale == "token" or activation.element == "int8")),
        "RADIANCE_PQ_ZPE": str(int(activation.zero_point == "epilogue")),
    }


def activation_title(variant: Variant) -> str:
    """The activation mode's name, and with it each knob of the variant that contradicts what the mode stands for."""
    stands_for = from_activation(variant)
    other = {n: str(v) for n, v in sorted(variant.knobs.items()) if n in stands_for and str(v) != stands_for[n]}
    return " ".join([variant.activation.name, *(f"{name}={value}" for name, value in other.items())])


def resolve(variant: Variant, max_num_seqs: int) -> dict[str, str]:
    """Every knob of the registry with the value this variant serves with, sorted by name.

    A knob written in the variant wins over what its activation mode stands for.
    Raises UsageError for an unknown knob, a wrong value, or a combination that the rules exclude.
    """
    where = f"variant.knobs (variant {variant.name})"
    values = {name: knob.default for name, knob in REGISTRY.items()} | from_activation(variant)
    for name, value in variant.knobs.items():
        if name not in REGISTRY:
            raise UsageError(f"{where}: there is no knob {name}; {meant(name)}")
        values[name] = REGISTRY[name].render(value, where)
    for broken, message in RULES:
        if broken(values, variant, max_num_seqs):
            raise UsageError(f"{where}: {message.format(**values, rows=_decode_rows(variant, max_num_seqs))}")
    return dict(sorted(values.items()))


def matching(words: Sequence[str]) -> list[Knob]:
    """The knobs that have every word in their name or text; without words all of them."""
    return [
        knob
        for knob in REGISTRY.values()
        if all(word.lower() in f"{knob.name} {knob.doc} {' '.join(knob.choices)}".lower() for word in words)
    ]


def meant(name: str) -> str:
    """What to write in place of a name that the registry does not have."""
    if f"RADIANCE_{name}" in REGISTRY:  # what a launch script calls it; the server never reads that name
        return f"did you mean RADIANCE_{name}?"
    if name in ELSEWHERE:
        return f"it is set with {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "`python -m orchestrator knobs` lists them"


def _decode_rows(variant: Variant, max_num_seqs: int) -> int:
    return max_num_seqs * (variant.speculation.tokens + 1)


Rule = Callable[[Mapping[str, str], Variant, int], bool]
RULES: tuple[tuple[Rule, str], ...] = (
    (
        lambda k, v, n: v.weights.format == "int5-bitplane" and k["RADIANCE_PQ_WPERM"] != "1",
        "int5 weights exist in fragment order only; set RADIANCE_PQ_WPERM=1 (it is {RADIANCE_PQ_WPERM})",
    ),
    (
        lambda k, v, n: k["RADIANCE_PQ_PG"] == "1" and k["RADIANCE_PQ_I8"] != "1",
        "RADIANCE_PQ_PG=1 needs int8 activations; set RADIANCE_PQ_I8=1 or drop PG",
    ),
    (
        lambda k, v, n: k["RADIANCE_PQ_ZPE"] == "1" and k["RADIANCE_PQ_ATILED"] != "1",
        "RADIANCE_PQ_ZPE=1 exists in the tiled prefill band only; set RADIANCE_PQ_ATILED=1",
    ),
    (
        lambda k, v, n: k["RADIANCE_PQ_ZPE"] == "1" and "1" not in (k["RADIANCE_PQ_PG"], k["RADIANCE_PQ_PTOK"]),
        "RADIANCE_PQ_ZPE=1 needs a tiled band: RADIANCE_PQ_PTOK=1, or int8 activations with RADIANCE_PQ_PG=1",
    ),
    (
        lambda k, v, n: v.weights.quantized and _decode_rows(v, n) > DECODE_ROWS_LIMIT,
        "max-num-seqs x (SPEC+1) = {rows} rows are more than the 128 of the decode band; lower max-num-seqs or SPEC",
    ),
    (
        lambda k, v, n: v.weights.quantized and int(k["RADIANCE_PQ_DECODE_MAX_M"]) < _decode_rows(v, n),
        "RADIANCE_PQ_DECODE_MAX_M={RADIANCE_PQ_DECODE_MAX_M} must cover max-num-seqs x (SPEC+1) = {rows} rows",
    ),
    (
        lambda k, v, n: v.weights.format in MXFP4 and int(k["RADIANCE_MXFP4_DECODE_MAX_M"]) < _decode_rows(v, n),
        "RADIANCE_MXFP4_DECODE_MAX_M={RADIANCE_MXFP4_DECODE_MAX_M} must cover max-num-seqs x (SPEC+1) = {rows} rows",
    ),
    (
        lambda k, v, n: v.weights.format in MXFP4 and k["RADIANCE_PQ_I8"] == "1",
        "MXFP4 weights run on fp8 activations only; choose activation@variant.activation=e4m3 and drop RADIANCE_PQ_I8",
    ),
    (
        lambda k, v, n: v.weights.format == "nvfp4" and k["RADIANCE_NVFP4_MXFP4"] != "1",
        "NVFP4 weights are served requantized to MXFP4; set RADIANCE_NVFP4_MXFP4=1 (it is {RADIANCE_NVFP4_MXFP4})",
    ),
    (
        lambda k, v, n: v.weights.format != "nvfp4" and k["RADIANCE_NVFP4_MXFP4"] == "1",
        "RADIANCE_NVFP4_MXFP4=1 does nothing for these weights; drop it, or choose weights@variant.weights=nvfp4",
    ),
    (
        lambda k, v, n: v.weights.quantized and v.activation.element == "bf16",
        "quantized weights need a quantized activation mode; choose activation@variant.activation=e4m3",
    ),
    (
        lambda k, v, n: v.weights.quantized and k["RADIANCE_PAROQUANT"] != "1",
        "quantized weights are loaded by the plugin; set RADIANCE_PAROQUANT=1",
    ),
)
