"""What the arms of an A/B are called, in titles and in what runs are searched by."""

from __future__ import annotations

import pytest

from orchestrator import config, knobs
from orchestrator.abtest import arm_titles


def titles(*words: str) -> dict[str, str]:
    return arm_titles.of(config.load_ab([*words, "gate=kernel", "box=cpu"]))


def test_two_variants_are_called_by_their_names():
    assert titles("+variant@a=int4", "+variant@b=int5") == {"a": "int4", "b": "int5"}


def test_arms_of_one_variant_are_told_apart_by_what_only_one_of_them_says():
    found = titles("+variant@a=int5", "+variant@b=int5", "+b.knobs.RADIANCE_PQ_PTOK=0")
    assert found == {"a": "int5", "b": "int5 RADIANCE_PQ_PTOK=0"}
    found = titles("+variant@a=int5", "+variant@b=int5", "b.activation.prefill_scale=group")
    assert found == {"a": "int5 activation.prefill_scale=token", "b": "int5 activation.prefill_scale=group"}


def test_many_differences_are_counted_and_equal_arms_have_none():
    more = ["+b.knobs.RADIANCE_PQ_PTOK=0", "+b.serve.a=1", "+b.serve.b=2", "+b.serve.c=3", "+b.serve.d=4"]
    assert titles("+variant@a=int5", "+variant@b=int5", *more)["b"].endswith(" and 2 more")
    assert titles("+variant@a=int5", "+variant@b=int5", "kind=floor") == {"a": "int5", "b": "int5"}


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["+variant=int5_i8_pg_zpe"], "i8_pg_zpe"),
        (["+variant=int5_i8_pg_zpe", "+variant.knobs.RADIANCE_PQ_ZPE=1"], "i8_pg_zpe"),
        (["+variant=int5_i8_pg_zpe", "+variant.knobs.RADIANCE_PQ_ZPE=0"], "i8_pg_zpe RADIANCE_PQ_ZPE=0"),
        (["+variant=int5", "+variant.knobs.RADIANCE_PQ_DECODE_MAX_M=32"], "e4m3"),
    ],
)
def test_a_run_is_found_by_the_activation_that_it_had_and_not_by_the_one_it_began_from(words, title):
    assert knobs.activation_title(config.load([*words, "box=cpu"]).variant) == title
