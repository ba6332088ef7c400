"""Rules about claims and runs: not before they are due, not by the wrong generation, not past the timeout."""

from __future__ import annotations

from chaos.evidence import Fault
from tests.chaos.story import Story


def test_nothing_is_claimed_before_it_is_due():
    story = Story()
    story.enqueue("e", next_run_at=story.now + 1)
    story.now += 2
    assert story.work("e").rules() == set()

    story.enqueue("f", next_run_at=story.now + 9).work("f")

    assert story.rules() == {"early"}


def test_a_dispatcher_claims_its_own_generations():
    """Generation 0 is for everybody; a dispatcher without generations takes all."""
    story = Story().enqueue("e", generation=2).work("e").enqueue("f").work("f")

    for generations, rules in (((2,), set()), ((1, 2), set()), ((), set()), ((1,), {"generation"})):
        started = [Fault(0.0, "dispatcher", {"who": "worker", "generations": generations})]
        assert story.rules(faults=started) == rules


def test_a_handler_that_hangs_does_not_end_well():
    story = Story().enqueue("first").work("first")
    story.enqueue("e", "hangs", budget=1).claim("e").run("e", "transient").fail("e", dead=True).alert("e")
    assert story.rules() == set()

    story.enqueue("f", "hangs", budget=1).work("f")

    assert story.rules() == {"timeout"}


def test_a_failure_waits_as_its_policy_says():
    story = Story()
    for number in range(30):
        event = f"e{number}"
        story.enqueue(event, "raises").claim(event).run(event, "transient")
        story.fail(event, next_run_at=story.now + 0.1 + 0.5 * (number == 7))
        story.now += 1
        story.work(event)
    assert story.rules() == set()

    at_once = [
        step._replace(next_run_at=step.at) if step.next_run_at else step for step in story.evidence.steps
    ]
    assert story.rules(steps=at_once) == {"backoff"}

    story.enqueue("slow", "raises").claim("slow").run("slow", "transient")
    story.fail("slow", next_run_at=story.now + 30)
    story.now += 31
    assert story.work("slow").rules() == {"backoff"}


def test_nobody_holds_a_job_for_longer_than_a_lease():
    story = Story().enqueue("e")
    story.claim("e", lease_until=story.now + 60).run("e").complete("e")

    assert story.rules(lease=3.0) == {"lease"}


def test_a_suspect_does_not_run_among_others():
    """The first of them does no harm; should it be a killer, all of its process lapse with it."""
    story = Story().enqueue("e").claim("e").run("e", None).reap("e")
    assert story.work("e").rules() == set()

    story.enqueue("innocent").claim("innocent").run("innocent", pid=2).complete("innocent")

    assert story.rules() == {"company"}


def test_what_lapsed_twice_runs_alone():
    story = Story().enqueue("e")
    for _ in range(2):
        story.claim("e").run("e", None).reap("e")
    story.claim("e", alone=False).run("e").complete("e")

    assert story.rules() == {"state machine"}


def test_nothing_runs_beside_what_runs_alone():
    story = Story()
    for event in ("e", "f"):
        story.enqueue(event)
        for _ in range(2):
            story.claim(event).run(event, None).reap(event)
    assert story.work("e").work("f").rules() == set()

    *earlier, e, f = story.evidence.runs
    assert story.rules(runs=[*earlier, e._replace(ended=f.ended), f]) == {"company", "result"}


def test_rows_of_a_topic_that_deletes_are_deleted():
    assert Story().enqueue("e", "deleted").work("e").rules() == {"state machine"}
