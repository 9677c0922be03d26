"""Knobs: what a variant may set, and how a mistake is said."""

from __future__ import annotations

import pytest

from orchestrator import config, knobs
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
        ("variant/activation@variant.activation=none", "activation"),
    ],
)
def test_a_wrong_knob_is_refused_with_what_to_write(override, said):
    with pytest.raises(UsageError) as caught:
        resolve("+variant=int5_i8_pg_zpe", override)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_variants_own_knob_reaches_the_values():
    assert resolve("+variant=int5", "+variant.knobs.RADIANCE_PQ_CHECKALL=1")["RADIANCE_PQ_CHECKALL"] == "1"
