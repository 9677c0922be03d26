"""What other programs used of the processors: from /proc made up here, and from a real burner of this machine."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from orchestrator import foreign_load
from orchestrator.foreign_load import Ticks, Watch
from orchestrator.recorded.table import summary_table
from tests.report import madeup


def a_proc(root: Path, stat: str, processes: Mapping[int, tuple[int, str]]) -> Path:
    """/proc with these processes: pid -> (parent, its four times)."""
    root.mkdir(exist_ok=True)
    (root / "stat").write_text(f"{stat}\ncpu0 1 1 1 1\n")
    for pid, (parent, times) in processes.items():
        (root / str(pid)).mkdir(exist_ok=True)
        (root / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0 -1 0 0 0 0 0 {times} 20 0 1 0 99 0 0")
    return root


def test_own_are_the_trees_below_the_roots_with_what_their_ended_children_left(tmp_path):
    proc = a_proc(
        tmp_path / "proc",
        "cpu  100 10 20 800 5 3 2 60 7 0",
        {1: (0, "5 5 0 0"), 10: (1, "1 2 3 4"), 11: (10, "10 0 0 0"), 12: (11, "20 0 0 0"), 20: (1, "50 0 0 0")},
    )
    assert foreign_load.read([10], proc) == Ticks(all=1000, used=190, own=40)
    assert foreign_load.read([10, 20, 999], proc).own == 90
    (proc / "stat").write_text("cpu 1 2\n")
    assert foreign_load.read([10], proc) is None and foreign_load.read([10], tmp_path / "no") is None


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (Ticks(200, 80, 20), 0.6),  # 80 used, of them 20 own, of 100
        (Ticks(200, 20, 20), 0.0),
        (Ticks(200, 20, 30), 0.0),  # the two were not read at one moment
        (Ticks(100, 0, 0), None),  # no time went by, as in a sandbox that counts none
        (None, None),
    ],
)
def test_what_is_neither_idle_nor_own_is_of_others(after, share):
    assert foreign_load.share(Ticks(100, 0, 0), after) == (None if share is None else pytest.approx(share))


def test_a_long_bench_counts_for_more_and_the_worst_one_is_named():
    looks = iter([Ticks(0, 0, 0), Ticks(100, 50, 0), Ticks(100, 50, 0), Ticks(400, 110, 30)])
    watch = Watch((1,), lambda _roots: next(looks))
    for bench in ("decode_ctx", "prefill"):
        with watch.during(bench):
            pass
    assert watch.shares == {"decode_ctx": 0.5, "prefill": pytest.approx(0.1)} and watch.share == pytest.approx(0.2)
    assert "20% of the processors while int4 was measured, 50% during decode_ctx" in watch.note("int4")


def test_a_server_whose_processes_are_not_known_gives_no_share_rather_than_a_wrong_one():
    watch = Watch(())
    with watch.during("decode_ctx"):
        pass
    assert watch.share is None and watch.note("int4") is None


@pytest.mark.skipif(foreign_load.read([os.getpid()]) is None, reason="this kernel does not count processors")
def test_a_child_that_burns_is_own_and_the_same_program_of_somebody_else_is_not():
    burn = "import time\nend = time.time() + 1.5\nwhile time.time() < end: pass"
    burner = subprocess.Popen([sys.executable, "-c", burn])
    try:
        before = {roots: foreign_load.read(roots) for roots in ((os.getpid(),), (burner.pid,), (2**22 + 1,))}
        time.sleep(1.0)
        shares = {roots: foreign_load.share(was, foreign_load.read(roots)) for roots, was in before.items()}
    finally:
        burner.wait()
    mine, its_own, nobodys = shares.values()
    assert nobodys > mine and nobodys > its_own, "the burner is taken off where it is below a root"
    assert nobodys - mine > 0.3 / os.cpu_count()


def test_the_table_and_the_page_of_a_run_say_it():
    from orchestrator.pages import report

    *ready, measured = madeup.boots()
    boot = replace(measured, other_cpu_share=0.314)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(summary_table([madeup.decode()], [boot]))
    (line,) = [line for line in console.export_text().splitlines() if "processors, others" in line]
    assert "31.4" in line and "may be longer" in line
    html = report.render(madeup.run(boots=[*ready, boot]))
    assert "Processors, others (%)" in html and "31.4" in html and "not known" in html
    told = f"other programs used 31% of the processors while boot {boot.nonce} was measured"
    assert html.count(told) == 1 and html.index(told) < html.index("What was served")
    quiet = replace(boot, other_cpu_share=0.09)
    assert "other programs used" not in report.render(madeup.run(boots=[*ready, quiet]))


@pytest.mark.parametrize(("in_group", "known"), [(True, True), (False, False)])
def test_a_containers_process_is_known_only_where_the_daemon_numbers_as_this_machine_does(in_group, known):
    from orchestrator.engines.container import ContainerServer

    group = Path("/proc/self/cgroup").read_text()
    server = ContainerServer.__new__(ContainerServer)
    server._patiently = lambda call: call()
    server._state = lambda: {"Pid": os.getpid()}
    server._container = SimpleNamespace(id=group if in_group else "0123456789abcdef")
    assert server.host_pid() == (os.getpid() if known else None)
    server._state = lambda: {"Pid": 2**22 + 1}
    assert server.host_pid() is None, "there is no such process here"
