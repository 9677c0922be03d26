"""What the serving box did while a boot was measured: processors, memory and AMD cards, sampled by a thread.

The names are MLflow's own for system metrics, so that its UI shows them under that tab. Nothing is written before the
boot has ended. A card's are from amdgpu's sysfs: `gpu_busy_percent` and `mem_info_vram_used` of its device, and
`power1_average` (microwatts) or `power1_input`, and `temp1_input` (thousandths of a degree) of its hwmon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator import devices
from orchestrator.errors import OrchestratorError
from orchestrator.recorded.catalog import SYSTEM

INTERVAL_S = 10.0  # MLflow's own
STOP_S = 5.0
MB = 1e6
ON_A_CARD = (  # words of a metric's name, files below the card's device, what to multiply by
    ("utilization_percentage", ("gpu_busy_percent",), 1.0),
    ("power_usage_watts", ("hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input"), 1e-6),
    ("temperature_celsius", ("hwmon/hwmon*/temp1_input",), 1e-3),
)


@dataclass(frozen=True)
class Sample:
    """`values` by metric, taken `at_ms` after the epoch."""

    at_ms: int
    values: Mapping[str, float]


def read(sys_root: Path = devices.SYS) -> dict[str, float]:
    """The box now; processors in percent of all of them since the last call."""
    memory = psutil.virtual_memory()
    found = {
        f"{SYSTEM}cpu_utilization_percentage": psutil.cpu_percent(),
        f"{SYSTEM}system_memory_usage_megabytes": (memory.total - memory.available) / MB,
        f"{SYSTEM}system_memory_usage_percentage": memory.percent,
    }
    for number, card in enumerate(devices.cards(sys_root)):
        name = f"{SYSTEM}gpu_{number}_"
        found[f"{name}memory_usage_megabytes"] = card.used_mib * devices.MIB / MB
        if card.total_mib:
            found[f"{name}memory_usage_percentage"] = 100 * card.used_mib / card.total_mib
        for what, files, scale in ON_A_CARD:
            if (value := _first(sys_root / "class" / "drm" / card.name / "device", files)) is not None:
                found[name + what] = value * scale
    return found


@contextmanager
def sampled(
    keep: Callable[[list[Sample]], None],
    interval_s: float = INTERVAL_S,
    look: Callable[[], Mapping[str, float]] = read,
) -> Iterator[None]:
    """Look at the box every `interval_s` during the block, and hand what was seen to `keep` when it has ended."""
    samples: list[Sample] = []
    over = threading.Event()

    def watch() -> None:
        look()  # the processors' share is one since the last look
        while not over.wait(interval_s):
            samples.append(Sample(int(time.time() * 1000), look()))

    watcher = threading.Thread(target=watch, name="box load", daemon=True)
    watcher.start()

    def end() -> None:
        over.set()
        watcher.join(STOP_S)
        keep(list(samples))

    try:
        yield
    except BaseException:
        with suppress(OrchestratorError):  # a store that refuses must not hide what ended the boot
            end()
        raise
    end()


def _first(device: Path, patterns: tuple[str, ...]) -> float | None:
    """The number in the first file there is that matches."""
    for pattern in patterns:
        for path in sorted(device.glob(pattern)):
            try:
                return float(path.read_text())
            except (OSError, ValueError):  # a card that sleeps refuses to say
                continue
    return None
