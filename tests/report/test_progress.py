"""What is seen while a run works, on a terminal and in a log file."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from orchestrator.progress import Progress, span


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_at_the_start_and_a_line_at_the_end_with_seconds():
    clock, log = Clock(), io.StringIO()
    progress = Progress(stream=log, clock=clock)
    with progress.stage("warm boot of int5", 30) as stage:
        clock.now = 12.0
        stage.advance(1, 2, "nothing is written in between")
        stage.advance(2, 2)
        clock.now = 31.4
    assert log.getvalue().splitlines() == ["warm boot of int5: started (about 30 s)", "warm boot of int5: done in 31 s"]


def test_stages_within_stages_are_indented():
    log = io.StringIO()
    progress = Progress(stream=log, clock=Clock())
    with progress.stage("measure"), progress.stage("decode"):
        progress.note("a note")
    assert log.getvalue().splitlines() == [
        "measure: started",
        "  decode: started",
        "a note",
        "  decode: done in 0.0 s",
        "measure: done in 0.0 s",
    ]


def test_a_stage_that_raises_says_stopped_and_how_far_it_came():
    log = io.StringIO()
    progress = Progress(stream=log, clock=Clock())
    with pytest.raises(KeyboardInterrupt), progress.stage("gsm8k") as stage:
        stage.advance(7, 60)
        raise KeyboardInterrupt
    assert log.getvalue().splitlines()[-1] == "gsm8k: stopped in 0.0 s, 7 of 60"


def test_time_remaining_comes_from_the_steps_once_there_are_any_and_before_from_what_was_expected():
    clock = Clock()
    with Progress(quiet=True, clock=clock).stage("prefill", expected_s=100) as stage:
        clock.now = 10.0
        assert stage.remaining_s == 90
        stage.advance(0, 4)
        assert stage.remaining_s == 90
        stage.advance(1, 4)
        assert stage.remaining_s == 30
        stage.advance(4, 4)
        assert stage.remaining_s == 0


def test_a_stage_of_unknown_length_shows_no_time_remaining():
    with Progress(quiet=True, clock=Clock()).stage("prepare") as stage:
        assert stage.remaining_s is None and stage.fraction is None


def test_an_overdue_stage_says_by_how_much():
    clock = Clock()
    with Progress(quiet=True, clock=clock).stage("boot", expected_s=30) as stage:
        clock.now = 50.0
        assert stage.remaining_s == -20 and stage.fraction == 1.0


def test_a_terminal_shows_the_stage_its_steps_and_the_time_left():
    clock, terminal = Clock(), Terminal()
    progress = Progress(stream=terminal, clock=clock)
    with progress.stage("decode on int5", expected_s=60) as stage:
        clock.now = 15.0
        stage.advance(1, 4, "at 512 tokens")
        progress._live.refresh()
        progress.note("/a/very/long/path" * 12 + " [not markup]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"decode on int5  1/4  at 512 tok.*15 s, 45 s left", text)
    assert "/a/very/long/path" * 12 + " [not markup]" in text, "a path stays on one line, to be copied"
    assert "decode on int5: done in 15 s, 1 of 4" in text.splitlines()
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


def test_the_terminal_is_restored_when_a_stage_raises():
    terminal = Terminal()
    with pytest.raises(RuntimeError), Progress(stream=terminal).stage("boot"):
        raise RuntimeError
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_shows_nothing(stream):
    out = stream()
    progress = Progress(quiet=True, stream=out)
    with progress.stage("boot", 3) as stage:
        stage.advance(1, 2)
        progress.note("a note")
    assert out.getvalue() == ""


def test_progress_goes_to_stderr_and_rich_is_not_imported_for_a_log_file():
    script = """if True:
        import sys
        from orchestrator.progress import Progress
        with Progress().stage("boot"):
            print("a result")
        assert "rich" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "a result\n"
    assert done.stderr.splitlines()[0] == "boot: started"


def test_durations():
    assert [span(s) for s in (0.04, 9.94, 42.4, 185, 3720, 86_400)] == [
        "0.0 s",
        "9.9 s",
        "42 s",
        "3 min 05 s",
        "1 h 02 min",
        "24 h 00 min",
    ]
