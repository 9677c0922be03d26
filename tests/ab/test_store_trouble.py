"""A store that fails in the middle of an A/B: one line, and once it is mended no boot is lost and none is doubled."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from orchestrator.abtest import ab_run, attempts
from orchestrator.recorded import catalog
from orchestrator.recorded.mlflow_store import TrackingError
from tests.ab.simulated import World
from tests.boot.test_boot import free_port
from tests.tracking.test_tracking import read_only, small_disk

AT = 5  # the boot, from 1, in which the store begins to fail


def locked(directory: Path) -> None:
    """By a connection of the process itself, which MLflow waits for in vain."""
    import sqlalchemy

    def wait_less(_connection, _cursor, statement, parameters, _context, _many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 100"), parameters

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", wait_less, retval=True)
    holder = sqlite3.connect(directory / "mlflow.db", isolation_level=None)
    stack.callback(holder.close)  # keeps it while the process lives
    holder.execute("BEGIN EXCLUSIVE")


def full(directory: Path) -> None:
    with suppress(OSError), (directory / "ballast").open("wb") as ballast:
        while True:
            ballast.write(b"\0" * 4096)
            ballast.flush()


def made_read_only(directory: Path) -> None:
    stack.enter_context(read_only(directory))


stack = ExitStack()  # never left: what it holds ends with the process that entered it


def in_a_process(work: Callable[[], int]) -> tuple[int, str]:
    """(its exit status, what it says of a TrackingError): its locks and open files end with it."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = work()
        except TrackingError as error:
            os.write(write, str(error).encode())
            code = error.exit_code
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, os.read(read, 10_000).decode()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(locked, "locked by another process"), (full, "disk"), (made_read_only, "cannot be written")],
)
def test_an_ab_whose_store_fails_goes_on_where_it_was(tmp_path, monkeypatch, empty_store, trouble, said):
    if trouble is full and os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    seen = []

    def fault(slot, attempt) -> str:
        seen.append(slot)
        if len(seen) == AT:
            trouble(world.root / "tracking")
        return ""

    with ExitStack() as disk:
        tracking = tmp_path / "tracking"
        disk.enter_context(small_disk(tracking, "12m")) if trouble is full else tracking.mkdir()
        (tracking / "mlflow.db").write_bytes(empty_store.read_bytes())
        world = World(tmp_path, b_better=0.004, sd=0.004, fault=fault).install(monkeypatch.setattr)
        test = world.test(port=free_port())
        code, line = in_a_process(lambda: ab_run.start(test, ["box=cpu"], quiet=True))
        if trouble is made_read_only:
            mended(tracking)
        assert code == 2 and said in line and len(line.splitlines()) == 1, (code, line)
        (tracking / "ballast").unlink(missing_ok=True)
        (entry,) = [found for found in catalog.entries(tracking) if found.is_ab]
        before = finished(tracking, entry)
        assert len(before) == AT - 1, "what was logged before is all there"
        assert ab_run.resume(entry, test.paths, ["box=cpu"], quiet=True) in (0, 1, 4)
        after = finished(tracking, entry)
        assert before.items() <= after.items(), "no boot is made again"
        slots = list(after.values())
        assert len(set(slots)) == len(slots) >= 8 and len(slots) % 4 == 0, "and none is there twice"
        assert attempts.recomputed(tracking, entry).look == len(slots) // 4


def finished(tracking: Path, entry: catalog.Entry) -> dict[str, attempts.Slot]:
    found = attempts.read(tracking, entry.run_id, attempts.read_design(entry))
    return {attempt.run_id: attempt.slot for attempt in found if attempt.state == "finished"}


def mended(directory: Path) -> None:
    """What the process that made it read-only would have undone, had it lived."""
    if os.geteuid() == 0:
        subprocess.run(["umount", "-l", directory], check=True)
    else:
        for path in (directory, directory / "mlflow.db"):
            path.chmod(path.stat().st_mode | 0o200)
