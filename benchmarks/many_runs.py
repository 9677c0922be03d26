"""How long `list`, `compare` and the search of MLflow's UI take on 200 runs of 500 metrics, and what logging costs.

usage: python -m benchmarks.many_runs DIRECTORY [RUNS METRICS]. The runs are simulated: ten A/Bs and single runs, made
through the tracker. Times are wall-clock seconds, median (least to most) of five, of whole processes for the verbs;
CPU time is beside them, for a machine that others use.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from orchestrator import ui
from orchestrator.recorded import catalog
from orchestrator.recorded.tracking import Tracker
from orchestrator.records import Measurement

REPEATS, LIMIT_S = 5, 2.0
PLACES = (0, 512, 8192, 32768)


def measurement(run: int, metrics: int) -> Measurement:
    """A bench of that many metrics: some at places, so that they are curves too, and 200 samples."""
    values = {f"decode.m{n // len(PLACES)}.ctx{PLACES[n % len(PLACES)]}": 20.0 + n + run / 1000 for n in range(metrics)}
    samples = tuple({"n": n, "update_ms": [50.0 + 20.1 * at for at in range(40)]} for n in range(200))
    return Measurement("decode_ctx", "ok", "", values, samples, {"simulated": True}, {"prose": "00ff"}, (), "", 1.0)


def fill(directory: Path, runs: int, metrics: int) -> float:
    """Make the store; returns the seconds that logging one run took, as median."""
    tracker, taken_s = Tracker(directory, "cpu"), []
    tags = {"box": "cpu", "stack": "s", "source": "simulated", "verdict": "OK", "suite": "quick"}
    parent = None
    for number in range(runs):
        if number % 20 == 0:
            parent = tracker.start(
                f"A/B {number // 20}", {}, tags | {"kind": "ab", "verdict": "PASS", "gate": "kernel"}
            )
            parent.finish("FINISHED")
        nested = {"kind": "boot", "ab.arm": "ab"[number % 2]} if number % 20 < 16 else {}
        began = time.perf_counter()
        run = tracker.start(
            f"int{4 + number % 2}", {f"p{n}": "1" for n in range(80)}, tags | nested, parent.run_id if nested else None
        )
        run.log_measurement(measurement(number, metrics))
        run.finish("FINISHED")
        taken_s.append(time.perf_counter() - began)
    return statistics.median(taken_s)


def times(job: Callable[[], object], used_s: Callable[[], float]) -> tuple[list[float], float]:
    """(wall-clock seconds of each of the repeats, mean seconds of CPU time that `used_s` has grown by)."""
    job()  # the first one finds a cold file cache
    taken, before_s = [], used_s()
    for _ in range(REPEATS):
        began = time.perf_counter()
        job()
        taken.append(time.perf_counter() - began)
    return taken, (used_s() - before_s) / REPEATS


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_tree(process: psutil.Process) -> Callable[[], float]:
    def used() -> float:
        every = [process, *process.children(recursive=True)]
        return sum(sum(found.cpu_times()[:2]) for found in every)

    return used


def verb(directory: Path, *words: str) -> Callable[[], object]:
    command = [sys.executable, "-m", "orchestrator", *words, f"paths.tracking={directory}", "box=cpu"]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)


def search(url: str, experiment: str, wanted: str) -> Callable[[], object]:
    """The request that the UI's table of runs makes."""
    body = {
        "experiment_ids": [experiment],
        "filter": wanted,
        "max_results": 100,
        "order_by": ["attributes.start_time DESC"],
    }

    def ask() -> None:
        request = urllib.request.Request(
            f"{url}/ajax-api/2.0/mlflow/runs/search", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["runs"]

    return ask


def main(directory: Path, runs: int, metrics: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    known = [entry for entry in catalog.entries(directory) if entry.metrics]
    log_s = fill(directory, runs, metrics) if len(known) < runs else None
    entries = catalog.entries(directory)
    single = [entry for entry in entries if not entry.parent and entry.metrics]
    database = directory / "mlflow.db"
    print(f"{runs} runs of {metrics} metrics; {platform.machine()}, Python {platform.python_version()}")
    files = [path.stat().st_size for path in single[0].artifacts.rglob("*") if path.is_file()]
    took = "was made before" if log_s is None else f"took {log_s:.2f} s to log (median)"
    print(f"a run {took}; it has {database.stat().st_size / 2**10 / len(entries):.0f} KiB in the database,")
    print(f"and {sum(files) / 2**10:.0f} KiB of artifacts in {len(files)} files")
    found = {
        "list": times(verb(directory, "list"), of_children),
        "list --all": times(verb(directory, "list", "--all"), of_children),
        "compare of two runs": times(verb(directory, "compare", single[0].run_id, single[1].run_id), of_children),
    }
    with ui.running(directory, ui.free_port()) as (process, url):
        used_s = of_tree(psutil.Process(process.pid))
        for wanted in ("", "tags.verdict = 'PASS'", "metrics.`decode.m3.ctx512` < 34"):
            asked = search(url, entries[0].experiment_id, wanted)
            found[f"UI search {wanted or '(all)'}"] = times(asked, used_s)
    for what, (taken, cpu_s) in found.items():
        middle = statistics.median(taken)
        mark = "" if middle < LIMIT_S else f"  over {LIMIT_S:g} s"
        print(f"{what:<42} {middle:6.2f} s  ({min(taken):.2f} to {max(taken):.2f}), CPU {cpu_s:.2f} s{mark}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4] or ("200", "500")))
