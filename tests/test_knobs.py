"""Knobs: what a variant may set, and how a mistake is said."""

from __future__ import annotations

import pytest

from orchestrator import config, knobs, shipped
from orchestrator.errors import UsageError


def resolve(*overrides: str) -> dict[str, str]:
    experiment = config.load([*overrides, "box=cpu"])
    return knobs.resolve(experiment.variant, int(experiment.box.serve["max-num-seqs"]))


@pytest.mark.parametrize(
    ("variant", "i8", "pg", "zpe"),
    [
        ("int4", "0", "0", "0"),
        ("int4_i8_pg_zpe", "1", "1", "1"),
        ("int5", "0", "0", "0"),
        ("int5_i8", "1", "0", "0"),
        ("int5_i8_pg", "1", "1", "0"),
        ("int5_i8_pg_zpe", "1", "1", "1"),
    ],
)
def test_a_variants_activation_mode_is_spelt_out_in_knobs(variant, i8, pg, zpe):
    values = resolve(f"+variant={variant}")
    assert (values["RADIANCE_PQ_I8"], values["RADIANCE_PQ_PG"], values["RADIANCE_PQ_ZPE"]) == (i8, pg, zpe)


def test_every_knob_of_the_registry_is_stated_defaults_included():
    assert resolve("+variant=bf16").keys() == knobs.REGISTRY.keys()


def test_every_default_is_a_value_its_own_knob_accepts():
    for knob in knobs.REGISTRY.values():
        assert knob.render(knob.default, "registry") == knob.default


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+variant.knobs.RADIANCE_PQ_PGG=1", "did you mean RADIANCE_PQ_PG?"),
        ("+variant.knobs.RADIANCE_PQ_PG=off", "one of 0, 1"),
        ("+variant.knobs.RADIANCE_PQ_PG=true", "one of 0, 1"),
        ("+variant.knobs.RADIANCE_PQ_PG=''", "is empty"),
        ("+variant.knobs.RADIANCE_PQ_DECODE_MAX_M=1e3", "no plain value"),
        ("+variant.knobs.RADIANCE_PQ_DECODE_MAX_M='010'", "not a plain integer"),
        ("+variant.knobs.RADIANCE_PQ_DECODE_MAX_M=999", "1 to 128"),
        ("+variant.knobs.VLLM_ANYTHING=1", "there is no knob VLLM_ANYTHING"),
        ("+variant.knobs.RADIANCE_PQ_WPERM=0", "RADIANCE_PQ_WPERM=1"),
        ("+variant.knobs.RADIANCE_PQ_I8=0", "RADIANCE_PQ_PG=1 needs int8 activations"),
        ("+variant.knobs.RADIANCE_PQ_DECODE_MAX_M=4", "must cover max-num-seqs x (SPEC+1) = 8 rows"),
        ("+variant.knobs.RADIANCE_PAROQUANT=0", "set RADIANCE_PAROQUANT=1"),
        ("+variant.knobs.PQ_DECODE_MAX_M=128", "did you mean RADIANCE_PQ_DECODE_MAX_M?"),
        ("+variant.knobs.PQ_I8=1", "did you mean RADIANCE_PQ_I8?"),
        ("+variant.knobs.RADIANCE_R4D_ATTN_FP8=3", "did you mean R4D_ATTN_FP8?"),
        ("+variant.knobs.SPEC=7", "it is set with variant.speculation.tokens"),
        ("+variant.knobs.RADIANCE_PQ_ATILED=0", "set RADIANCE_PQ_ATILED=1"),
        ("+variant.knobs.RADIANCE_NVFP4_MXFP4=1", "does nothing for these weights"),
        ("weights@variant.weights=mxfp4_paro", "fp8 activations only"),
        ("activation@variant.activation=none", "choose activation@variant.activation=e4m3"),
    ],
)
def test_a_wrong_knob_is_refused_with_what_to_write(override, said):
    with pytest.raises(UsageError) as caught:
        resolve("+variant=int5_i8_pg_zpe", override)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_zero_point_epilogue_needs_a_tiled_band():
    off = ("+variant.knobs.RADIANCE_PQ_PG=0", "+variant.knobs.RADIANCE_PQ_PTOK=0")
    with pytest.raises(UsageError, match="needs a tiled band"):
        resolve("+variant=int5_i8_pg_zpe", *off)


@pytest.mark.parametrize(
    ("tokens", "seqs", "said"),
    [
        (7, 8, None),  # 64 rows: the default
        (8, 8, "RADIANCE_PQ_DECODE_MAX_M=64 must cover max-num-seqs x .SPEC.1. = 72 rows"),
        (7, 17, "= 136 rows are more than the 128 of the decode band"),
    ],
)
def test_the_decode_band_covers_every_row_of_a_speculative_step(tokens, seqs, said):
    variant = config.load(
        [
            "+variant=int5",
            "box=r9700x2",
            "speculation@variant.speculation=dflash7",
            f"variant.speculation.tokens={tokens}",
        ]
    ).variant
    if said is None:
        assert knobs.resolve(variant, seqs)
        return
    with pytest.raises(UsageError, match=said):
        knobs.resolve(variant, seqs)


def test_nvfp4_is_never_left_on_the_path_that_hangs_the_gpu():
    variant = config.load(["+variant=nvfp4_mxfp4", "box=r9700x2", "variant.knobs.RADIANCE_NVFP4_MXFP4=0"]).variant
    with pytest.raises(UsageError, match="set RADIANCE_NVFP4_MXFP4=1"):
        knobs.resolve(variant, 8)


def test_no_name_of_a_knob_is_free_for_a_box():
    from orchestrator.plan import KNOB_FAMILIES

    in_env = {name for box in shipped.names("box") for name in config.load(["+variant=int4", f"box={box}"]).box.env}
    assert not in_env & knobs.REGISTRY.keys() and not [name for name in in_env if name.startswith(KNOB_FAMILIES)]


def test_a_variants_own_knob_reaches_the_values():
    assert resolve("+variant=int5", "+variant.knobs.RADIANCE_PQ_CHECKALL=1")["RADIANCE_PQ_CHECKALL"] == "1"
