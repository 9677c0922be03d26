"""Which job starts, where and when; all of it without a clock, a box or a file."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from orchestrator.schedule.decide import Drop, Node, Start, Wait, decide
from orchestrator.schedule.job import Job
from orchestrator.schedule.policy import Policy

POLICY = Policy("01:00-06:00", "UTC", return_min=30, margin=1.0)  # 4.5 hours of boots
NODE = Node("box1", ("cpu",), "stack1")
OPEN = datetime(2026, 6, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def job(number=1, hours=1.0, **changes):
    return replace(Job(("x",), "cpu", id=number, boot_s=900.0, boots_left=round(4 * hours)), **changes)


def decided(*jobs, now=OPEN, nodes=(NODE,), busy=(), ended=(), policy=POLICY):
    policies = {found.id: policy for found in jobs}
    return decide(now, jobs, policies, {found.id: found for found in ended}, nodes, busy)


def test_a_job_starts_in_its_window_and_stops_early_enough_for_prod_to_be_back():
    (start,) = decided(job())
    assert isinstance(start, Start) and start.node == NODE
    assert start.stop_by == OPEN + 4.5 * HOUR and start.night.closes == OPEN + 5 * HOUR


def test_outside_of_its_window_it_waits_for_the_next():
    (wait,) = decided(job(), now=OPEN - HOUR)
    assert wait.opens == OPEN
    (wait,) = decided(job(), now=OPEN + 5 * HOUR)
    assert wait.opens == OPEN + timedelta(days=1)


@pytest.mark.parametrize(("left_h", "starts"), [(1.0, True), (0.99, False)])
def test_one_that_has_not_begun_starts_only_where_it_can_end(left_h, starts):
    (found,) = decided(job(hours=1), now=OPEN + (4.5 - left_h) * HOUR)
    assert isinstance(found, Start) is starts
    assert starts or "it fits into a whole one" in found.reason


def test_the_margin_of_the_policy_counts():
    late = OPEN + 3.4 * HOUR  # 1.1 hours are left
    assert isinstance(decided(job(), now=late)[0], Start)
    assert isinstance(decided(job(), now=late, policy=replace(POLICY, margin=1.25))[0], Wait)


def test_one_that_has_begun_or_is_too_long_for_any_window_needs_room_for_its_next_boot_only():
    for found in (job(hours=3, state="paused", records="box1"), job(hours=30)):
        assert isinstance(decided(found, now=OPEN + 4.2 * HOUR)[0], Start)
        (wait,) = decided(found, now=OPEN + 4.3 * HOUR)
        assert "its next boot takes about 15 min" in wait.reason


def test_a_later_job_that_fits_passes_one_that_does_not():
    first, second = decided(job(1, hours=4), job(2, hours=1), now=OPEN + 2 * HOUR)
    assert isinstance(first, Wait) and isinstance(second, Start)


def test_a_node_gets_one_job_and_a_busy_one_none():
    first, second, third = decided(job(1), job(2), job(3), nodes=(NODE, Node("box2", ("cpu",))))
    assert (first.node.name, second.node.name) == ("box1", "box2") and third.reason == "box cpu is taken"
    assert decided(job(), busy=("box1",))[0].reason == "box cpu is taken"


def test_a_job_is_never_put_on_another_kind_of_box():
    assert decided(job(box="r9700x2"))[0].reason == "there is no box r9700x2"
    assert isinstance(decided(job(box="r9700x2"), nodes=(Node("any"),))[0], Start)


def test_one_that_has_begun_goes_on_where_its_records_are():
    begun = job(state="paused", records="box2", stack="stack1")
    (start,) = decided(begun, nodes=(NODE, Node("box2", ("cpu",), "stack1")))
    assert start.node.name == "box2"
    assert decided(begun, nodes=(NODE, Node("box2", ("cpu",), "stack1")), busy=("box2",))[0].reason.endswith("taken")


def test_where_its_machine_is_gone_another_of_the_same_stack_goes_on_and_none_of_another():
    begun = job(state="paused", records="gone", stack="stack1")
    assert decided(begun)[0].node == NODE
    (wait,) = decided(replace(begun, stack="stack2"))
    assert "machine gone is gone, and no other box cpu has its stack stack2" in wait.reason
    assert isinstance(decided(replace(begun, stack=""))[0], Wait), "what is not known is not the same"


def test_a_job_waits_for_what_it_depends_on_and_is_dropped_where_that_went_otherwise():
    needs = job(2, depends_on=("1:PASS",))
    assert decided(needs, ended=[job(1, state="running")])[0] == Wait(needs, "waits for job 1")
    assert isinstance(decided(needs, ended=[job(1, state="done", verdict="PASS")])[0], Start)
    for other in (job(1, state="done", verdict="FAIL"), job(1, state="cancelled")):
        assert isinstance(decided(needs, ended=[other])[0], Drop)
    assert isinstance(decided(job(2, depends_on=("1",)), ended=[job(1, state="done", verdict="FAIL")])[0], Start)


def test_after_a_fault_it_is_not_tried_again_at_once():
    later = job(not_before_utc=(OPEN + HOUR).isoformat(), reason="hung")
    assert isinstance(decided(later)[0], Wait) and isinstance(decided(later, now=OPEN + HOUR)[0], Start)
