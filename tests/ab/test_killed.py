"""SIGKILL at ten random moments of one A/B, each followed by a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.abtest import attempts
from orchestrator.abtest.attempts import VERDICT
from orchestrator.recorded import catalog

SCRIPT = Path(__file__).with_name("kill_often.py")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SCRIPT), str(root), "20260901"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


def entry(root: Path, which: str, run_id: str) -> catalog.Entry:
    return catalog.find(root / which / "tracking", run_id)


def boots(root: Path, which: str, run_id: str) -> list[attempts.Attempt]:
    directory = root / which / "tracking"
    return attempts.read(directory, run_id, attempts.read_design(catalog.find(directory, run_id)))


def test_it_was_killed_ten_times(killed):
    root, said = killed
    assert said["kills"] == 10
    states = Counter(found.state for found in boots(root, "killed", said["killed"][0]))
    assert states["cut off"] >= 2, "kills that hit a boot, not what is between two"


def test_no_boot_is_lost_and_none_is_there_twice(killed):
    root, said = killed
    whole, after = (
        [
            (a.slot, a.result.measurements["decode_ctx"].metrics)
            for a in boots(root, w, said[w][0])
            if a.state == "finished"
        ]
        for w in ("whole", "killed")
    )
    assert sorted(map(repr, after)) == sorted(map(repr, whole))
    assert len({slot for slot, _ in after}) == len(after)


def test_the_verdict_and_the_exit_status_are_those_of_the_ab_that_was_left_alone(killed):
    root, said = killed
    texts = [json.loads((entry(root, w, said[w][0]).artifacts / VERDICT).read_text()) for w in ("whole", "killed")]
    assert texts[0]["state"] == texts[1]["state"] and said["whole"][1] == said["killed"][1]
    assert without_hours(texts[0]) == without_hours(texts[1])


def without_hours(verdict: dict) -> dict:
    """Hours are of this machine at that time, and reasons name runs by their ids."""
    criteria = [
        {k: v for k, v in c.items() if k not in ("more_hours", "sentence", "missing")} for c in verdict["criteria"]
    ]
    return {**verdict, "criteria": criteria, "reasons": len(verdict["reasons"])}


def test_what_was_cut_off_keeps_its_record_and_is_marked(killed):
    root, said = killed
    run_id = said["killed"][0]
    for attempt in boots(root, "killed", run_id):
        if attempt.state == "cut off":
            found = entry(root, "killed", attempt.run_id)
            assert found.status == "KILLED" and found.tags["ab.attempt"] == "cut off"
