"""What `schedule add` takes, and what it refuses, in one line each."""

from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.errors import UsageError
from orchestrator.schedule import asked, daemon, policy
from orchestrator.schedule.queue import Queue


def test_the_queues_own_words_are_its_own_and_the_rest_is_the_ab():
    job = asked.job(["+experiment=zpe", "box=cpu", "window=22:00-05:00", "zone=Asia/Kolkata", "priority=-2", "key=k"])
    assert job.overrides[:2] == ("+experiment=zpe", "box=cpu") and job.box == "cpu"
    assert (job.window, job.zone, job.priority, job.idempotency_key) == ("22:00-05:00", "Asia/Kolkata", -2, "k")


def test_a_box_that_was_left_open_is_settled_when_it_is_queued():
    assert any(word.startswith("box=") for word in asked.job(["+experiment=zpe"]).overrides)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+experiment=zpee"], "there is no experiment 'zpee'"),
        (["+experiment=zpe", "window=1-2"], "is no window"),
        (["+experiment=zpe", "zone=Nowhere/City"], "no time zone"),
        (["+experiment=zpe", "schedule=weekly"], "there is no schedule 'weekly'"),
        (["+experiment=zpe", "priority=high"], "write a whole number"),
        (["+experiment=zpe", "after=x"], "write the id of a job"),
        (["+variant=int4"], "+variant=NAME is one variant"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_queued_and_not_at_night(words, said):
    with pytest.raises(UsageError, match=said.replace("+", r"\+")):
        asked.job(["box=cpu", *words])


def test_every_shipped_schedule_is_one():
    names = policy.shipped.names("schedule")
    assert "nightly" in names and [policy.load(name).hours() for name in names]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"margin": 0.5}, "margin: 0.5 is out of range"),
        ({"tries": 0}, "tries"),
        ({"return_min": float("nan")}, "return_min"),
        ({"webhook": "ftp://x"}, "is no address"),
        ({"days": ("someday",)}, "someday"),
    ],
)
def test_a_schedule_out_of_range_is_refused_with_its_key(change, said):
    with pytest.raises(UsageError, match=said):
        policy.checked(policy.Policy(**{"window": "01:00-02:00", "zone": "UTC"} | change), "conf/schedule/x.yaml")


def test_the_verbs_add_list_and_remove_jobs(tmp_path, capsys):
    places = [f"paths.state={tmp_path}", f"paths.tracking={tmp_path / 'runs'}"]
    asked_for = ["schedule", "add", "+experiment=zpe", "box=cpu", "zone=Europe/Berlin", "key=one", *places]
    assert cli.main(asked_for) == 0 and cli.main(asked_for) == 0
    out = capsys.readouterr().out
    assert "job 1: at most 24 boots" in out and "01:00-06:30 Europe/Berlin" in out
    assert "job 1 is there already, queued" in out
    same = ["schedule", "add", "+variant@a=int4", "+variant@b=int4", "gate=kernel", "box=cpu", *places]
    assert cli.main(same) == 3 and "int4 and int4 cannot be compared" in capsys.readouterr().err
    assert cli.main(["schedule", "list", *places]) == 0 and "+experiment=zpe" in capsys.readouterr().out
    assert cli.main(["schedule", "remove", "1", *places]) == 0
    assert Queue(tmp_path).get(1).state == "cancelled"
    assert cli.main(["schedule", "remove", "9", *places]) == 2
    assert "there is no job 9" in capsys.readouterr().err
    assert cli.main(["schedule", "summary", *places]) == 2
    assert "no window has closed yet" in capsys.readouterr().err
    assert cli.main(["schedule", "run", "fleet=cloud", *places]) == 2
    assert "fleet=cloud: choose from local, ray" in capsys.readouterr().err


def test_a_window_that_no_boot_fits_into_is_refused(tmp_path, capsys):
    places = ["box=cpu", f"paths.state={tmp_path}", f"paths.tracking={tmp_path / 'runs'}"]
    assert cli.main(["schedule", "add", "+experiment=zpe", "window=01:00-01:20", *places]) == 2
    said = capsys.readouterr().err
    assert "has 5 min 00 s for boots" in said and "choose a longer window" in said
    assert Queue(tmp_path).list() == []


def test_a_queue_that_nothing_works_on_is_said(tmp_path, capsys):
    places = ["box=cpu", f"paths.state={tmp_path}", f"paths.tracking={tmp_path / 'runs'}"]
    assert cli.main(["schedule", "add", "+experiment=zpe", *places]) == 0
    said = capsys.readouterr()
    assert "the zone of this machine" in said.out and "nothing on this machine works on the queue" in said.err
    with daemon.alone(tmp_path):
        assert cli.main(["schedule", "add", "+experiment=zpe", "zone=Asia/Kolkata", *places]) == 0
        assert cli.main(["schedule", *places[1:]]) == 0
    said = capsys.readouterr()
    assert "the zone of this machine" not in said.out and said.err == ""
    assert not daemon.runs(tmp_path)


def test_a_relative_tracking_directory_is_queued_as_the_place_it_is_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = asked.job(["+experiment=zpe", "box=cpu"])
    assert f"paths.tracking={Path('mlruns').resolve()}" in job.overrides
