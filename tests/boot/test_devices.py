"""Device memory against a made-up sysfs."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import config, devices
from orchestrator.errors import UsageError
from orchestrator.schema import Detect

MIB = 2**20


@pytest.fixture
def box():
    """A box with R9700 cards that has to be clear at once."""
    cpu = config.load_machine(["box=cpu"]).box
    return replace(cpu, vram_clear_mib=1024.0, clear_timeout_s=0.0, detect=Detect(1, pci="1002:7551", count=2))


@pytest.fixture
def card(tmp_path: Path):
    """Adds a card to the tree, held by a process."""

    def add(number: int, used_mib: int, vendor: str = "0x1002", device: str = "0x7551", pid: int | None = None) -> Path:
        at = tmp_path / "class" / "drm" / f"card{number}" / "device"
        (at / "drm" / f"renderD{128 + number}").mkdir(parents=True)
        (tmp_path / "class" / "drm" / f"card{number}-DP-1").mkdir()
        (at / "vendor").write_text(f"{vendor}\n")
        (at / "device").write_text(f"{device}\n")
        (at / "mem_info_vram_used").write_text(f"{used_mib * MIB}\n")
        (at / "mem_info_vram_total").write_text(f"{32624 * MIB}\n")
        kfd = tmp_path / "class" / "kfd" / "kfd"
        node = kfd / "topology" / "nodes" / str(number + 1)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{5000 + number}\n")
        (node / "properties").write_text(f"cpu_cores_count 0\ndrm_render_minor {128 + number}\n")
        if pid:
            (kfd / "proc" / str(pid)).mkdir(parents=True, exist_ok=True)
            (kfd / "proc" / str(pid) / f"vram_{5000 + number}").write_text(f"{used_mib * MIB}\n")
        return at / "mem_info_vram_used"

    return add


def test_a_held_card_is_named_with_its_memory_and_the_process_that_holds_it(box, card, tmp_path):
    card(0, 300)
    card(1, 28500, pid=4711)
    said = "device memory is not clear: card1 has 28,500 of 32,624 MiB in use by pid 4711 (28,500 MiB)"
    with pytest.raises(UsageError, match=re.escape(said)):
        devices.require_clear(box, tmp_path)


def test_a_holder_that_the_driver_does_not_name_is_left_out(box, card, tmp_path):
    card(0, 28500)
    with pytest.raises(UsageError, match=r"card0 has 28,500 of 32,624 MiB in use; box cpu wants at most 1,024 MiB"):
        devices.require_clear(box, tmp_path)


def test_cards_of_another_vendor_or_model_are_not_looked_at(box, card, tmp_path):
    card(0, 9000, vendor="0x10de")
    card(1, 9000, device="0x164e")
    devices.require_clear(box, tmp_path)


def test_a_box_without_a_limit_and_a_machine_without_cards_are_clear(box, card, tmp_path):
    devices.require_clear(box, tmp_path)
    card(0, 28500)
    devices.require_clear(replace(box, vram_clear_mib=None), tmp_path)


def test_memory_that_the_driver_gives_back_a_little_later_is_waited_for(box, card, tmp_path):
    used = card(0, 28500)
    threading.Timer(0.6, lambda: used.write_text("0\n")).start()
    started = time.monotonic()
    with devices.clear(replace(box, clear_timeout_s=20), tmp_path):
        assert 0.5 < time.monotonic() - started < 10


def test_memory_that_a_stopped_server_leaves_behind_is_a_failure(box, card, tmp_path):
    used = card(0, 10)
    with pytest.raises(UsageError, match="card0 has 28,500"), devices.clear(box, tmp_path):
        used.write_text(f"{28500 * MIB}\n")


def test_a_failure_in_the_block_is_what_is_told(box, card, tmp_path):
    used = card(0, 10)
    with pytest.raises(RuntimeError, match="bench"), devices.clear(box, tmp_path):
        used.write_text(f"{28500 * MIB}\n")
        raise RuntimeError("bench")


def test_a_device_id_in_capitals_is_the_same_device(box, card, tmp_path):
    card(0, 20_000, device="0x744c")
    capitals = replace(box, detect=Detect(1, pci="1002:744C"))
    assert len(devices.held(capitals, tmp_path)) == 1
