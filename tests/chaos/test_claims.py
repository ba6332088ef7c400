"""Rules about claims and runs: not before they are due, not by the wrong generation, not past the timeout."""

from __future__ import annotations

from chaos.evidence import Fault
from tests.chaos.story import TICK, Story


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


def test_a_dispatcher_claims_the_topics_that_it_was_told_to_serve():
    story = Story().enqueue("e", "slow").work("e")

    for patterns, rules in (((), set()), (("f*", "s*"), set()), (("slow",), set()), (("f*",), {"topic"})):
        started = [Fault(0.0, "dispatcher", {"who": "worker", "topics": patterns})]
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
        story.fail(event, next_run_at=story.now + TICK + 0.09)
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


def test_a_given_key_is_kept_with_its_row():
    """Deleted, it would not be unique any more."""
    kept = Story().enqueue("e", "deleted", idempotency_key="k").work("e")
    deleted = Story().enqueue("e", "deleted", idempotency_key="k").claim("e").run("e").step("e", None)

    assert kept.enqueue("first").work("first").rules() == set()
    assert deleted.enqueue("first").work("first").rules() == {"state machine"}


def test_a_release_changes_nothing():
    story = Story().enqueue("e").claim("e").release("e").work("e")
    assert story.rules() == set()

    story.enqueue("f", "raises").claim("f").run("f", "transient").fail("f").claim("f").release("f").work("f")

    assert story.rules() == {"state machine"}


def test_what_goes_back_is_due_at_once():
    story = Story().enqueue("e").claim("e")
    story.release("e", next_run_at=story.now + 5)
    story.now += 6

    assert story.work("e").rules() == {"backoff"}


def test_a_claim_takes_no_more_than_a_batch():
    story = Story()
    for number in range(51):
        story.enqueue(f"e{number}").claim(f"e{number}", token="t", transaction=7)
    for number in range(51):
        story.run(f"e{number}").complete(f"e{number}")

    assert story.rules() == {"claim"}


def test_no_process_runs_more_than_it_was_told_to():
    story = Story().enqueue("e").work("e")
    [run] = story.evidence.runs

    assert story.rules(runs=[run._replace(event=f"{number}") for number in range(21)]) >= {"concurrency"}
    assert "concurrency" not in story.rules(runs=[run._replace(event=f"{number}") for number in range(20)])


def test_a_handler_is_given_what_is_its_own():
    story = Story().enqueue("e").work("e")
    [run] = story.evidence.runs

    assert story.rules(runs=[run._replace(attempt=1, max_attempts=5, mark="mark e")]) == set()
    assert story.rules(runs=[run._replace(attempt=2, max_attempts=5)]) == {"handed"}
    assert story.rules(runs=[run._replace(mark="mark f")]) == {"handed"}


def test_a_row_says_what_its_producer_said():
    story = Story().enqueue("e").work("e")
    [wish] = story.evidence.wishes

    assert story.rules(wishes=[wish._replace(options={})]) == set()
    assert story.rules(wishes=[wish._replace(options={"max_attempts": 3})]) == {"enqueue"}
    assert story.rules(wishes=[wish._replace(options={}, key="k")]) == {"enqueue"}
    assert (
        Story().enqueue("e", priority=3).work("e").rules(wishes=[wish._replace(options={"priority": 3})])
        == set()
    )
    assert Story().enqueue("e", priority=0).work("e").rules(
        wishes=[wish._replace(options={"priority": 3})]
    ) == {"enqueue"}
    assert story.rules(wishes=[wish._replace(options={"delay": 9})]) == {"early"}


def test_an_act_changes_what_was_meant():
    story = Story().enqueue("e").die("e").alert("e").replay("e").work("e")
    [act] = story.evidence.acts

    assert story.rules() == set()
    assert story.rules(acts=[act._replace(events=("f",))]) == {"replay"}


def test_an_alert_names_the_dead():
    story = Story().enqueue("first").work("first").enqueue("e").die("e").alert("e")
    [alert] = story.evidence.alerts

    assert story.rules() == set()
    assert story.rules(alerts=[alert._replace(event="first")]) == {"alert"}
    assert story.rules(strays=1) == {"alert"}


def test_who_is_told_to_end_ends():
    story = Story().enqueue("e").work("e")

    assert story.rules(faults=[Fault(0.0, "stuck", {"who": "worker"})]) == {"stuck"}
