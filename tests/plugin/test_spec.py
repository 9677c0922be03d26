"""quantization_config: what is accepted, and which key a refusal names."""

import pytest

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.spec import FormatSpec

INT4 = {"quant_method": "paroquant", "bits": 4, "group_size": 64, "krot": 8}
INT5 = {**INT4, "bits": 5, "format": "int5-bitplane"}
LLOYD = {**INT4, "format": "int4-lloyd"}


@pytest.mark.parametrize("config", [INT4, INT5, LLOYD, {**INT4, "group_size": 128, "krot": 1}])
def test_a_config_survives_the_round_trip(config: dict) -> None:
    assert FormatSpec.from_config(config).to_config() == config


def test_a_zero_point_flag_is_ignored_because_qzeros_decide() -> None:
    assert FormatSpec.from_config({**INT4, "zero_point": False}) == FormatSpec(4, 64, 8)


def test_gptqmodels_config_means_the_same_tensors_whatever_its_symmetry_flag_says() -> None:
    config = FormatSpec(4, 128, 8).to_gptqmodel_config()
    assert config["quant_method"] == "paro"
    for sym in (True, False):
        assert FormatSpec.from_config({**config, "sym": sym, "zero_point": not sym}) == FormatSpec(4, 128, 8)
    with pytest.raises(PluginError, match="no int5-bitplane format"):
        FormatSpec(5, 128, 8).to_gptqmodel_config()
    with pytest.raises(PluginError, match="format='gptq'"):
        FormatSpec.from_config({**config, "format": "gptq"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"bits": 6}, "bits"),
        ({"bits": "4"}, "bits"),
        ({"bits": None}, "bits"),
        ({"group_size": 32}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"krot": 2}, "krot"),
        ({"bits": 5}, "format"),
        ({"format": "mxfp4"}, "format"),
        ({"format": "int4-lloyd", "bits": 5}, "bits"),
    ],
)
def test_a_wrong_value_is_refused_by_key(change: dict, named: str) -> None:
    with pytest.raises(PluginError, match=named):
        FormatSpec.from_config({**INT4, **change})


def test_shapes_are_those_of_the_format_document() -> None:
    shapes = FormatSpec(5, 128, 8).shapes(256, 96)
    assert shapes == {
        "qweight": ((256, 12), "int32"),
        "qzeros": ((2, 12), "int32"),
        "scales": ((2, 96), "float16"),
        "theta": ((8, 128), "float16"),
        "pairs": ((8, 256), "int16"),
        "channel_scales": ((1, 256), "float16"),
        "qweight_hi": ((256, 3), "int32"),
        "qzeros_hi": ((2, 3), "int32"),
    }


@pytest.mark.parametrize(
    ("spec", "inputs", "outputs", "named"),
    [
        (FormatSpec(4, 128, 8), 576, 64, "K=576"),
        (FormatSpec(4, 64, 8), 576, 12, "N=12"),
        (FormatSpec(5, 64, 8), 576, 40, "N=40"),
    ],
)
def test_a_shape_the_format_cannot_hold_is_refused(spec: FormatSpec, inputs: int, outputs: int, named: str) -> None:
    with pytest.raises(PluginError, match=named):
        spec.shapes(inputs, outputs)
