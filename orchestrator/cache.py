"""What lies in the caches and how to get room: checkpoints, compile caches, KL references, plugin builds, boot logs,
measurements that were cut off."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from orchestrator import compile_cache, lease, owner, slot
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.plan import ServePlan
from orchestrator.promoting import promotions

Kind = Literal["model", "compile", "reference", "plugin", "boot log", "unfinished"]
DAY_S = 86400
DEFAULT_OLDER_THAN_DAYS = 30.0
PRUNING = ".pruning-"
READ_BY_LIST = ("state.json", "journal.json")  # looking is no use


@dataclass(frozen=True)
class Entry:
    """One directory that can be removed as a whole. `used_by` says who needs it, or is empty."""

    kind: Kind
    path: Path
    size_bytes: int
    last_used_s: float  # since the epoch: the newest access or change of any of its files
    state: str = ""
    used_by: str = ""

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-2:]) if self.kind in ("model", "reference") else self.path.name


def entries(cache: Path, state: Path) -> list[Entry]:
    """Everything that `prune` knows, the largest first within its kind."""
    prod = _prod_paths(state)
    found = [
        *(_entry("model", path, prod, used_by=_being_prepared(path)) for path in _directories(cache / "models", 2)),
        *(_compile_entry(path, prod) for path in _directories(cache / "serve", 1)),
        *(_entry("reference", path, prod) for path in _directories(cache / "references", 2)),
        *(_entry("plugin", path, prod) for path in _directories(cache / "plugins", 1)),
        *(_boot_entry(path, prod) for path in _directories(state / "boots", 1)),
        *(_entry("boot log", path, prod) for box in _directories(state / "prod", 1) for path in _directories(box, 1)),
        *(_entry("unfinished", path, prod) for path in _directories(state / "unfinished", 1)),
    ]
    order = {kind: n for n, kind in enumerate(get_args(Kind))}
    return sorted(found, key=lambda entry: (order[entry.kind], -entry.size_bytes, entry.name))


def chosen(found: Iterable[Entry], older_than_days: float | None, keep: int | None, now_s: float) -> list[Entry]:
    """Which entries a prune removes: unused ones that are older than the age, beyond the `keep` newest of their kind.

    Without either limit the age is DEFAULT_OLDER_THAN_DAYS; with `keep` alone the age does not matter.
    """
    if older_than_days is None:
        older_than_days = DEFAULT_OLDER_THAN_DAYS if keep is None else 0.0
    ranks: dict[str, int] = {}
    gone = []
    for entry in sorted(found, key=lambda entry: -entry.last_used_s):
        ranks[entry.kind] = ranks.get(entry.kind, 0) + 1
        beyond = ranks[entry.kind] > (keep or 0)
        if not entry.used_by and beyond and now_s - entry.last_used_s >= older_than_days * DAY_S:
            gone.append(entry)
    return gone


def prune(
    cache: Path,
    state: Path,
    boxes: Sequence[str],
    older_than_days: float | None = None,
    keep: int | None = None,
    dry_run: bool = False,
) -> list[Entry]:
    """Remove what nothing uses any more; returns what was, or would be, removed.

    No run can start meanwhile: every box's lease is held. Raises UsageError, with nothing removed, where a run holds
    one, because what it will need next cannot be known.
    """
    if dry_run:
        return chosen(entries(cache, state), older_than_days, keep, time.time())
    with _no_run(boxes, state):
        gone = chosen(entries(cache, state), older_than_days, keep, time.time())
        for entry in gone:
            _remove(entry.path)
        for left in _half_removed(cache, state):
            shutil.rmtree(left, ignore_errors=True)
    return gone


def human(size_bytes: float) -> str:
    """A size for people: `512 B`, `1.5 MiB`, `12 GiB`."""
    power = 0
    while size_bytes >= 1024 and power < 3:
        size_bytes, power = size_bytes / 1024, power + 1
    digits = 1 if power and size_bytes < 10 else 0
    return f"{size_bytes:.{digits}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def show(found: Sequence[Entry]) -> None:
    """Print the entries as a table, with the sum of their sizes."""
    from rich.table import Table

    from orchestrator import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (("kind", "left"), ("name", "left"), ("size", "right"), ("last used", "right"), ("", "left")):
        table.add_column(title, justify=justify, no_wrap=title != "")
    for entry in found:
        days = (time.time() - entry.last_used_s) / DAY_S
        age = "today" if days < 1 else f"{days:.0f} d ago"
        remark = ", ".join(word for word in (entry.state, entry.used_by) if word)
        table.add_row(entry.kind, entry.name, human(entry.size_bytes), age, remark)
    out = console.stdout()
    out.print(table)
    size = human(sum(entry.size_bytes for entry in found))
    out.print(f"{len(found)} {'entry' if len(found) == 1 else 'entries'}, {size}", highlight=False)


def _entry(kind: Kind, path: Path, prod: dict[Path, str], state: str = "", used_by: str = "") -> Entry:
    size, used = _measure(path)
    return Entry(kind, path, size, used, state, used_by or prod.get(path.resolve(), ""))


def _compile_entry(path: Path, prod: dict[Path, str]) -> Entry:
    try:
        record = json.loads((path / "state.json").read_text())
        holder = owner.from_mapping(record["owner"])
        busy = f"warming in process {holder.pid}" if record["state"] == "warming" and holder.alive() else ""
    except (OSError, ValueError, KeyError, TypeError):
        busy = ""
    return _entry("compile", path, prod, "warming" if busy else compile_cache.state(path), busy)


def _boot_entry(path: Path, prod: dict[Path, str]) -> Entry:
    try:
        open_boot = not json.loads((path / "journal.json").read_text())["ended"]
    except FileNotFoundError:
        open_boot = False  # it ended before its journal was written, and that comes before anything starts
    except (OSError, ValueError, KeyError, TypeError):
        open_boot = True  # the next start ends what is left of it and closes it
    return _entry("boot log", path, prod, used_by="an open boot" if open_boot else "")


def _prod_paths(state: Path) -> dict[Path, str]:
    """What a prod slot needs. A slot that cannot be read stops the prune: what it needs is not known."""
    needed: dict[Path, str] = {}
    for box in slot.boxes(state):
        prod = slot.load(state, box)
        if prod is None:
            continue
        needed |= dict.fromkeys([slot.directory(state, prod).resolve(), *_needed(prod.plan)], f"prod of box {box}")
    for box in promotions.boxes(state):
        before = promotions.predecessor(promotions.read(state, box))
        for path in _needed(before.target.plan) if before else ():
            needed.setdefault(path, f"a rollback of prod on box {box}")
    return needed


def _needed(plan: ServePlan) -> list[Path]:
    """The directories that a server of the plan starts from."""
    paths = [plan.cache_dir, plan.checkpoint.path]
    paths += [plan.drafter.path] if plan.drafter else []
    paths += plan.env.get("PYTHONPATH", "").split(":")  # the plugin's build, where it is no mount
    paths += [mount.source for mount in plan.container.mounts] if plan.container else []
    return [Path(path).resolve() for path in paths if path]


def _being_prepared(path: Path) -> str:
    """Whether a preparation holds the checkpoint's lock."""
    try:
        with path.with_suffix(".lock").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return ""
    except BlockingIOError:
        return "being prepared"
    return ""


@contextmanager
def _no_run(boxes: Sequence[str], state: Path) -> Iterator[None]:
    with ExitStack() as held:
        for box in boxes:
            try:
                held.enter_context(lease.hold(box, "cache prune", state))
            except lease.Busy as busy:
                raise UsageError(f"{busy}; nothing is pruned while a run may need it") from None
        yield


def _directories(root: Path, depth: int) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.glob("/".join("*" * depth)) if path.is_dir() and not path.name.startswith(".")]


def _measure(root: Path) -> tuple[int, float]:
    """Bytes on disk and the newest access or change, of the directory and all below it."""
    size, used = 0, root.stat().st_mtime
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(f"{directory}/{name}")
            except FileNotFoundError:
                continue
            size += status.st_blocks * 512
            used = max(used, status.st_mtime, 0.0 if name in READ_BY_LIST else status.st_atime)
    return size, used


def _half_removed(cache: Path, state: Path) -> Iterator[Path]:
    """What a prune that was killed left."""
    for place in ("models/*", "serve", "references/*", "plugins"):
        yield from cache.glob(f"{place}/{PRUNING}*")
    for place in ("boots", "prod/*", "unfinished"):
        yield from state.glob(f"{place}/{PRUNING}*")


def _remove(path: Path) -> None:
    """Renamed first: a directory that is half removed is never taken for a whole one."""
    going = path.with_name(f"{PRUNING}{path.name}")
    try:
        path.rename(going)
        if going.is_symlink():  # to another disk: what it leads to is not ours to judge
            going.unlink()
        else:
            shutil.rmtree(going)
    except OSError as error:
        raise OrchestratorError(f"{path} cannot be removed ({error.strerror}); remove it by hand") from None
