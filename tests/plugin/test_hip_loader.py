"""The loader packs arguments and grids for libamdhip64's functions: here those of a library that runs on the CPU."""

from pathlib import Path

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import layout, producer
from paroquant_gfx1201.kernels.hip.launch import Launch
from paroquant_gfx1201.kernels.hip.loader import Loader
from tests.plugin.hip_cases import needs_clang, needs_emulation, only, random_rotations
from tests.plugin.test_hip_decode import launch_for

pytestmark = [needs_emulation, needs_clang(19)]

PRODUCER = only("producer.hip", '#include "producer.h"\nPRODUCERS(128, 8, e4m3, E4M3)\n')
DECODE = only("decode.hip", '#include "decode.h"\nDECODE(INT5, int5, INT8, int8, 64, 32)\n')


def producer_launch(granularity: str) -> Launch:
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = torch.stack([layout.build(random_rotations(384, 128, seed)) for seed in range(2)])
    return producer.quantize_rows(x, table, "e4m3", granularity, 128, 8)


@pytest.mark.parametrize("granularity", ["group", "token"])
def test_a_producer_through_the_driver_is_the_producer_emulated(granularity: str, objects: Path) -> None:
    loader = Loader(str(simt.driver("producer.hip", (PRODUCER,))), objects)
    launch = producer_launch(granularity)
    through = loader.run(launch)
    for actual, written in zip(through, simt.run(launch, (PRODUCER,)), strict=True):
        assert torch.equal(actual, written.complete())


def test_split_k_through_the_driver_leaves_its_counters_ready_for_the_next_launch(objects: Path) -> None:
    loader = Loader(str(simt.driver("decode.hip", (DECODE,))), objects)
    launch, _ = launch_for("int5", "int8", 576, 64, (32, 64), 17, 2)
    expected = simt.run(launch, (DECODE,))[0].complete()
    for _ in range(2):
        y, _, arrived = loader.run(launch)
        assert torch.equal(y, expected)
        assert not arrived.any()


def test_what_cannot_be_launched_is_named(objects: Path, tmp_path: Path) -> None:
    library = str(simt.driver("producer.hip", (PRODUCER,)))
    launch = producer_launch("group")
    with pytest.raises(PluginError, match=r"producer\.co is missing: this installation carries no gfx1201 code"):
        Loader(library, tmp_path).run(launch)
    (tmp_path / "producer.co").write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(PluginError, match=r"loading .* failed with HIP error 200"):
        Loader(library, tmp_path).run(launch)
    absent = Launch("producer.hip", "absent", (1,), 32, launch.arguments)
    with pytest.raises(PluginError, match="finding absent failed with HIP error 500: named symbol not found"):
        Loader(library, objects).run(absent)
    strided = (launch.arguments[0].T, *launch.arguments[1:])
    with pytest.raises(PluginError, match="argument 0 must be contiguous"):
        Loader(library, objects).run(Launch("producer.hip", launch.kernel, launch.grid, launch.threads, strided))
    with pytest.raises(PluginError, match=r"cannot load libabsent\.so"):
        Loader("libabsent.so")
