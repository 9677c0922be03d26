"""The kernel's log as a cause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.kernel_log import KMSG, Watch

RESET = "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"
TIMEOUT = "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3"
KILLED = "Out of memory: Killed process 4711 (VLLM::EngineCor) total-vm:1kB"


def say(path: Path, *texts: str) -> Path:
    with path.open("a") as log:
        log.writelines(f"6,7,8000000,-;{text}\n SUBSYSTEM=x\n" for text in texts)
    return path


@pytest.mark.parametrize("text", [RESET, TIMEOUT, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus"])
def test_a_card_in_trouble_since_the_boot_is_found_and_an_earlier_one_is_not(tmp_path, text):
    with Watch(say(tmp_path / "kmsg", RESET)) as watch:
        assert watch.gpu_faults() == []
        say(tmp_path / "kmsg", "usb 1-1: new device", text)
        assert watch.gpu_faults() == [text] == watch.gpu_faults()


def test_the_hint_names_the_card_before_memory(tmp_path):
    with Watch(say(tmp_path / "kmsg")) as watch:
        say(tmp_path / "kmsg", "usb 1-1: reset high-speed USB device")
        assert watch.hint() == ""
        say(tmp_path / "kmsg", KILLED)
        assert watch.hint().startswith("this machine ran out of memory: Out of memory: Killed process 4711")
        say(tmp_path / "kmsg", TIMEOUT)
        assert watch.hint().startswith("the kernel log has a GPU fault: [drm:amdgpu_job_timedout")


def test_a_limit_that_was_reached_is_not_taken_for_a_full_machine(tmp_path):
    with Watch(say(tmp_path / "kmsg")) as watch:
        say(tmp_path / "kmsg", "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/docker/74")
        assert watch.hint().startswith("the memory limit of a container or slice was reached: oom-kill:")


def test_a_log_that_may_not_be_read_gives_nothing(tmp_path):
    with Watch(tmp_path / "no-such-file") as watch:
        assert watch.lines() == []


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="/dev/kmsg may not be written here")
def test_the_kernels_own_log_is_followed_from_now_on():
    said = f"test process {os.getpid()} says this once"
    with Watch() as watch:
        KMSG.write_text(f"<6>{said}\n")
        assert said in watch.lines()
    with Watch() as watch:
        assert said not in watch.lines()
