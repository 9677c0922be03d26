"""Environment to mode, and which band a forward falls into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.modes import Band, Mode

I8 = {"RADIANCE_PQ_I8": "1"}
PG = {**I8, "RADIANCE_PQ_PG": "1"}
ZPE = {**PG, "RADIANCE_PQ_ZPE": "1"}


@pytest.mark.parametrize(
    ("environment", "prefill"),
    [
        ({}, Band("e4m3", "token", "loop", "tiles")),
        ({"RADIANCE_PQ_ATILED": "0"}, Band("e4m3", "token", "loop")),
        ({"RADIANCE_PQ_PTOK": "0"}, Band("e4m3", "group", "loop")),
        (I8, Band("int8", "token", "loop", "tiles")),
        ({**I8, "RADIANCE_PQ_PTOK": "0"}, Band("int8", "group", "loop")),
        (PG, Band("int8", "group", "loop", "tiles")),
        ({**PG, "RADIANCE_PQ_ATILED": "0"}, Band("int8", "group", "loop")),
        (ZPE, Band("int8", "group", "epilogue", "tiles")),
        ({"RADIANCE_PQ_ZPE": "1"}, Band("e4m3", "token", "epilogue", "tiles")),
    ],
)
def test_the_prefill_band_is_what_the_knobs_say(environment: dict, prefill: Band) -> None:
    mode = Mode.from_environment(environment)
    assert mode.band(65) == mode.band(8192) == prefill


@given(
    environment=st.sampled_from([{}, I8, PG, ZPE, {"RADIANCE_PQ_ZPE": "1"}]),
    limit=st.integers(1, 4096),
    tokens=st.integers(1, 8192),
)
def test_the_decode_band_is_per_group_in_loop_up_to_its_limit(environment: dict, limit: int, tokens: int) -> None:
    mode = Mode.from_environment({**environment, "RADIANCE_PQ_DECODE_MAX_M": str(limit)})
    if tokens <= limit:
        assert mode.band(tokens) == Band(mode.element, "group", "loop")
    else:
        assert mode.band(tokens) == mode.band(10**6)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RADIANCE_PQ_PG": "1"}, "RADIANCE_PQ_PG=1 needs RADIANCE_PQ_I8=1"),
        ({**ZPE, "RADIANCE_PQ_ATILED": "0"}, "needs RADIANCE_PQ_ATILED=1"),
        (
            {"RADIANCE_PQ_ZPE": "1", "RADIANCE_PQ_PTOK": "0"},
            "needs RADIANCE_PQ_PG=1 or RADIANCE_PQ_PTOK=1",
        ),
        ({"RADIANCE_PQ_I8": "yes"}, "RADIANCE_PQ_I8='yes'"),
        ({"RADIANCE_PQ_I8": ""}, "RADIANCE_PQ_I8 is set but empty"),
        ({"RADIANCE_PQ_DECODE_MAX_M": "64.0"}, "RADIANCE_PQ_DECODE_MAX_M='64.0'"),
        ({"RADIANCE_PQ_DECODE_MAX_M": "0"}, "RADIANCE_PQ_DECODE_MAX_M='0'"),
        ({"RADIANCE_UNRELATED": " "}, "RADIANCE_UNRELATED is set but empty"),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(environment: dict, named: str) -> None:
    with pytest.raises(PluginError, match=named):
        Mode.from_environment(environment)


def test_int5_needs_fragment_order() -> None:
    mode = Mode.from_environment({"RADIANCE_PQ_WPERM": "0"})
    mode.check_format(4, "awq")
    with pytest.raises(PluginError, match="RADIANCE_PQ_WPERM=1"):
        mode.check_format(5, "int5-bitplane")
