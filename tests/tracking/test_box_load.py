"""What the box did beside a measured boot, as MLflow's system metrics."""

from __future__ import annotations

import time

import psutil
import pytest

from orchestrator import box_load
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.mlflow_store import TrackingError
from orchestrator.recorded.tracking import Tracker


def a_card(
    sys_root, number: int = 0, busy: str = "87", power: tuple[str, str] | None = ("power1_average", "251000000")
):
    device = sys_root / "class" / "drm" / f"card{number}" / "device"
    hwmon = device / "hwmon" / "hwmon3"
    hwmon.mkdir(parents=True)
    for name, text in {
        "vendor": "0x1002",
        "device": "0x7551",
        "mem_info_vram_used": "16000000000",
        "mem_info_vram_total": "32000000000",
        "gpu_busy_percent": busy,
    }.items():
        (device / name).write_text(f"{text}\n")
    (hwmon / "temp1_input").write_text("61000\n")
    if power:
        (hwmon / power[0]).write_text(f"{power[1]}\n")


def test_a_card_is_read_with_its_units(tmp_path):
    a_card(tmp_path)
    found = box_load.read(tmp_path)
    assert {name: value for name, value in found.items() if "gpu" in name} == pytest.approx(
        {
            "system/gpu_0_memory_usage_megabytes": 16000.0,
            "system/gpu_0_memory_usage_percentage": 50.0,
            "system/gpu_0_utilization_percentage": 87.0,
            "system/gpu_0_power_usage_watts": 251.0,
            "system/gpu_0_temperature_celsius": 61.0,
        }
    )


def test_a_card_that_does_not_say_is_left_out_and_not_made_up(tmp_path):
    a_card(tmp_path, busy="", power=("power1_input", "40000000"))
    a_card(tmp_path, number=1, power=None)
    found = box_load.read(tmp_path)
    assert "system/gpu_0_utilization_percentage" not in found and "system/gpu_1_power_usage_watts" not in found
    assert found["system/gpu_0_power_usage_watts"] == 40.0 and found["system/gpu_1_utilization_percentage"] == 87.0


def test_processors_that_work_show(tmp_path):
    box_load.read(tmp_path)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass
    found = box_load.read(tmp_path)
    assert found["system/cpu_utilization_percentage"] >= 60 / psutil.cpu_count()
    assert 0 < found["system/system_memory_usage_megabytes"] < psutil.virtual_memory().total / 1e6


def test_looks_are_steps_of_the_run_in_their_order_and_no_metrics_of_ours(tmp_path):
    run = Tracker(tmp_path, "cpu").start("int5", {}, {})
    run.log_metrics({"decode.ms_per_step.ctx0": 20.0})
    seen = []

    def look():
        seen.append(len(seen))
        return {"system/a": seen[-1], "system/b": -seen[-1]}

    with box_load.sampled(run.log_box_load, 0.001, look):
        while len(seen) < 1500:  # more than MLflow takes at once
            time.sleep(0.01)
    client = mlflow_store.connect(tmp_path)
    points = client.get_metric_history(run.run_id, "system/a")
    assert [point.value for point in points] == seen[1:], "the first look only starts the clock of the processors"
    assert [point.step for point in points] == list(range(len(points)))
    assert [point.value for point in client.get_metric_history(run.run_id, "system/b")] == [-n for n in seen[1:]]
    assert list(points) == sorted(points, key=lambda point: point.timestamp)
    (entry,) = catalog.entries(tmp_path)
    assert entry.metrics == {"decode.ms_per_step.ctx0": 20.0}


def test_what_ended_the_boot_is_raised_although_the_store_refuses_the_looks():
    def refuse(samples):
        raise TrackingError("the disk is full")

    with pytest.raises(KeyboardInterrupt), box_load.sampled(refuse, look=dict):
        raise KeyboardInterrupt
    with pytest.raises(TrackingError, match="disk is full"), box_load.sampled(refuse, look=dict):
        pass
