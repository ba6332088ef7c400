"""The checker of the fault rig: silent about a good history, and never about a bad one.

Each test of a rule stands beside a story that is nearly the same and breaks nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaos.evidence import Pause
from chaos.topics import RETENTION
from tests.chaos.story import LEASE, Story


@pytest.fixture
def story() -> Story:
    """One event has gone well already: a run in which nobody did anything proves nothing."""
    return Story().enqueue("first").work("first")


def test_a_good_life(story: Story):
    story.enqueue("e", "raises").claim("e").run("e", "transient").fail("e").work("e")

    assert story.violations() == []


def test_nobody_did_anything():
    assert Story().enqueue("e").discard("e").rules() == {"idle"}


# Producers


def test_acknowledged_and_lost(story: Story):
    story.wish("e").ack("e")

    assert story.rules() == {"lost"}


def test_acknowledged_and_never_finished(story: Story):
    story.enqueue("e").claim("e").run("e", None).reap("e")

    assert story.rules() == {"lost"}


@pytest.mark.parametrize("there", [True, False])
def test_an_unknown_outcome_is_none_or_one(story: Story, there: bool):
    story.wish("e")
    if there:
        story.appear("e").work("e")

    assert story.violations() == []


def test_an_enqueue_that_was_repeated_is_one_event(story: Story):
    story.enqueue("e").work("e").appear("again", mark="mark e").work("again")

    assert story.rules() == {"twice"}


def test_a_key_may_come_again_after_its_row_was_pruned(story: Story):
    story.enqueue("e").work("e")
    story.now += RETENTION
    story.step("e", None).appear("again", mark="mark e").work("again")

    assert story.violations() == []


def test_pruned_too_soon(story: Story):
    story.enqueue("e").work("e").step("e", None)

    assert story.rules() == {"state machine"}


def test_rolled_back_and_there(story: Story):
    story.wish("e").never("e").appear("e").work("e")

    assert story.rules() == {"rolled back"}


def test_run_and_never_enqueued(story: Story):
    story.run("e", lease=1)

    assert story.rules() == {"claim"}


def test_the_applications_data_without_the_event(story: Story):
    assert story.rules(business=frozenset({"first"})) == set()
    assert story.rules(business=frozenset({"first", "e"})) == {"business"}


# The state machine


@pytest.mark.parametrize("status", ["RUNNING", "PENDING", "DEAD_LETTERED"])
def test_completed_is_the_end(story: Story, status: str):
    """Never claimed after COMPLETED, nor anything else."""
    story.enqueue("e").work("e").step("e", status)

    assert "state machine" in story.rules()


def test_a_step_that_nobody_logged(story: Story):
    story.enqueue("e").claim("e").run("e")
    story.evidence.steps.pop()
    story.complete("e")

    assert "state machine" in story.rules()


def test_attempts_never_fall_without_a_reason(story: Story):
    story.enqueue("e", "raises").claim("e").run("e", "transient").fail("e").work("e")
    assert story.violations() == []

    story.enqueue("f").claim("f").run("f").complete("f", attempts=0)
    assert story.rules() == {"state machine"}


def test_a_claim_counts_one_attempt_and_one_lease(story: Story):
    story.enqueue("e").claim("e", lease_seq=0)

    assert "state machine" in story.rules()


def test_deleted_while_it_waited(story: Story):
    story.enqueue("e").step("e", None)

    assert story.rules() == {"state machine"}


def test_deleted_where_its_topic_says_so(story: Story):
    story.enqueue("e", "deleted").claim("e").run("e").step("e", None)
    assert story.violations() == []

    story.enqueue("f", "fast").claim("f").run("f").step("f", None)
    assert story.rules() == {"state machine"}


def test_the_table_is_what_the_steps_lead_to(story: Story):
    assert story.rules(rows={"first": "COMPLETED"}) == set()
    assert story.rules(rows={"first": "PENDING"}) == {"rows"}
    assert story.rules(rows={"first": "COMPLETED", "e": "PENDING"}) == {"rows"}


# The fence


def test_a_result_of_a_worker_that_has_lost_its_lease(story: Story):
    """The run under the old lease ended well; the row is somebody else's by now."""
    story.enqueue("e").claim("e", "old").run("e", "ok").reap("e").claim("e", "new").complete("e", "old")

    assert story.rules() == {"fence", "result"}


def test_a_result_of_the_same_worker_under_an_older_lease(story: Story):
    """The process is the same, the claim is not."""
    story.enqueue("e").claim("e").run("e", "ok").reap("e").claim("e").complete("e")

    assert story.rules() == {"result"}


def test_a_heartbeat_of_somebody_else(story: Story):
    story.enqueue("e").claim("e").step("e", "RUNNING", lease_until=story.now + 5).run("e").complete("e")
    assert story.violations() == []

    story.enqueue("f").claim("f").step("f", "RUNNING", "other", lease_until=story.now + 5).run("f").complete(
        "f"
    )
    assert story.rules() == {"fence"}


def test_reaped_before_the_lease_has_run_out(story: Story):
    story.enqueue("e").claim("e").run("e", None).reap("e").work("e")
    assert story.violations() == []

    story.enqueue("f").claim("f", lease_until=story.now + 100 * LEASE).run("f", None)
    story.step(
        "f", "RETRYING", "watchdog", token=None, lapses=1, attempts=0, lease_until=None, locked_by=None
    )
    story.work("f")
    assert story.rules() == {"fence"}


def test_completed_before_the_handler_had_ended(story: Story):
    story.enqueue("e").claim("e").complete("e").run("e")

    assert story.rules() == {"result"}


@pytest.mark.parametrize("outcome", ["transient", "terminal", "later", None])
def test_completed_though_the_handler_failed(story: Story, outcome: str | None):
    story.enqueue("e").claim("e").run("e", outcome).complete("e")

    assert story.rules() == {"result"}


def test_failed_though_the_handler_succeeded(story: Story):
    story.enqueue("e").claim("e").run("e").fail("e").work("e")

    assert story.rules() == {"result"}


def test_released_after_it_had_run(story: Story):
    story.enqueue("e").claim("e").release("e").work("e")
    assert story.violations() == []

    story.enqueue("f").claim("f").run("f").release("f").work("f")
    assert story.rules() == {"result"}


def test_snoozed_and_not_asked_for(story: Story):
    later: dict[str, Any] = {"snoozes": 1, "attempts": 0, "lease_until": None, "locked_by": None}
    story.enqueue("e", "later").claim("e").run("e", "later").step("e", "RETRYING", **later).work("e")
    assert story.violations() == []

    story.enqueue("f", "later").claim("f").run("f", "transient").step("f", "RETRYING", **later).work("f")
    assert story.rules() == {"result"}


# Claims


def test_a_repeated_claim_takes_no_more(story: Story):
    """The answer was lost; the second call with the same token must bring what the first took."""
    story.enqueue("e").enqueue("f").claim("e", token="t", transaction=7).claim("f", token="t", transaction=7)
    story.run("e").run("f").complete("e").complete("f")
    assert story.violations() == []

    story.enqueue("g").enqueue("h").claim("g", token="u").claim("h", token="u")
    story.run("g").run("h").complete("g").complete("h")
    assert story.rules() == {"claim"}


def test_a_token_whose_rows_were_all_reaped_may_take_others(story: Story):
    story.enqueue("e").enqueue("f").claim("e", token="t").reap("e").claim("f", token="t").run("f").complete(
        "f"
    )
    story.work("e")

    assert story.violations() == []


def test_one_claim_run_twice(story: Story):
    story.enqueue("e").claim("e").run("e").run("e").complete("e")

    assert story.rules() == {"claim"}


def test_run_under_a_lease_that_nobody_had(story: Story):
    story.enqueue("e").work("e").run("e", lease=9)

    assert story.rules() == {"claim"}


def test_run_before_it_was_claimed(story: Story):
    story.enqueue("e").run("e", lease=1).claim("e").complete("e")

    assert "claim" in story.rules()


def test_claimed_in_spite_of_a_pause(story: Story):
    """What counts is when the claim began: one that was under way may still take something."""
    since = story.now + 1
    story.enqueue("e")
    story.now = since + 0.5
    story.claim("e", began=since - 0.5).run("e").complete("e")
    assert story.rules(pauses=[Pause("fast", since, since + 100)]) == set()

    story.now = since + 10
    story.enqueue("f").claim("f").run("f").complete("f")
    assert story.rules(pauses=[Pause("slow", since, since + 100)]) == set()
    assert story.rules(pauses=[Pause("fast", since, since + 5)]) == set()
    assert story.rules(pauses=[Pause("fast", since, since + 100)]) == {"pause"}


# Budgets


def test_dead_when_the_budget_is_spent(story: Story):
    story.enqueue("e", "raises")
    for last in (False, False, True):
        story.claim("e").run("e", "transient").fail("e", dead=last)
    story.alert("e")

    assert story.violations() == []


def test_dead_below_budget(story: Story):
    story.enqueue("e", "raises").claim("e").run("e", "transient").fail("e", dead=True).alert("e")

    assert story.rules() == {"budget"}


def test_dead_with_attempts_that_nobody_made(story: Story):
    """The counter says three; only one run is remembered outside the database."""
    story.enqueue("e", "raises").claim("e", attempts=3).run("e", "transient").fail("e", dead=True).alert("e")

    assert "budget" in story.rules()


def test_a_lapse_in_company_gives_the_attempt_back(story: Story):
    story.enqueue("e").claim("e").run("e", None).reap("e").work("e")
    assert story.violations() == []

    story.enqueue("f").claim("f").run("f", None).reap("f", attempts=1).work("f")
    assert story.rules() == {"state machine"}


def test_a_lapse_alone_spends_the_attempt(story: Story):
    story.enqueue("e", "kills").claim("e").run("e", None).reap("e").claim("e").run("e", None).reap("e")
    story.claim("e").run("e", None).reap("e").claim("e").run("e", None).reap("e", dead=True).alert("e")
    assert story.violations() == []

    story.enqueue("f", "kills").claim("f", alone=True).run("f", None).reap("f", attempts=0).work("f")
    assert story.rules() == {"state machine"}


def test_a_lapse_that_died_in_company(story: Story):
    story.enqueue("e").claim("e").run("e", None).reap("e", dead=True).alert("e")

    assert story.rules() == {"budget"}


def test_terminal_and_the_handler_never_said_so(story: Story):
    story.enqueue("e").die("e").alert("e")
    assert story.violations() == []

    story.enqueue("f").claim("f").run("f", "transient").fail("f", dead=True, verdict="terminal").alert(
        "f", "a2"
    )
    assert story.rules() == {"result"}


def test_terminal_because_of_its_payload(story: Story):
    story.enqueue("e", "model", bad=True).claim("e").fail("e", dead=True, verdict="terminal").alert("e")
    assert story.violations() == []

    story.enqueue("f", "model").claim("f").fail("f", dead=True, verdict="terminal").alert("f", "a2")
    assert story.rules() == {"result"}


def test_a_budget_of_one_is_never_started_twice(story: Story):
    story.enqueue("e", "once").claim("e").run("e", None).reap("e", dead=True).alert("e")
    assert story.violations() == []

    story.enqueue("f", "once").claim("f").run("f", None).reap("f", attempts=0).work("f")
    assert story.rules() == {"state machine", "budget"}


def test_goes_on_after_the_budget_was_spent(story: Story):
    story.enqueue("e", "raises", budget=1).claim("e").run("e", "transient").fail("e").discard("e")

    assert story.rules() == {"budget"}


def test_claimed_with_another_budget(story: Story):
    story.enqueue("e", "raises").claim("e", max_attempts=9).run("e").complete("e")

    assert story.rules() == {"budget"}


# Ordering keys


def test_in_order_of_one_key(story: Story):
    story.enqueue("a", "ordered", ordering_key="k").enqueue("b", "ordered", ordering_key="k").work("a").work(
        "b"
    )
    assert story.violations() == []

    story.enqueue("c", "ordered", ordering_key="k").enqueue("d", "ordered", ordering_key="k").work("d").work(
        "c"
    )
    assert story.rules() == {"order"}


def test_transactions_that_overlap_may_come_in_any_order(story: Story):
    story.wish("a", "ordered").wish("b", "ordered")
    story.appear("a", "ordered", ordering_key="k").appear("b", "ordered", ordering_key="k").ack("a").ack("b")
    story.work("b").work("a")

    assert story.violations() == []


def test_two_of_one_key_at_once(story: Story):
    story.wish("a", "ordered").wish("b", "ordered")
    story.appear("a", "ordered", ordering_key="k").appear("b", "ordered", ordering_key="k").ack("a").ack("b")
    story.claim("a").claim("b").run("a").run("b").complete("a").complete("b")

    assert story.rules() == {"order"}


def test_a_dead_letter_holds_its_key_or_lets_it_go(story: Story):
    story.enqueue("a", "ordered", ordering_key="k", holds_key=False).enqueue("b", "ordered", ordering_key="k")
    story.die("a").work("b").alert("a")
    assert story.violations() == []

    story.enqueue("c", "ordered", ordering_key="l").enqueue("d", "ordered", ordering_key="l")
    story.die("c").work("d").alert("c", "a2")
    assert story.rules() == {"order"}


def test_a_replayed_event_goes_first_again(story: Story):
    """From the operator's answer on: a claim that had begun before could not know of it."""
    for key, late in (("k", False), ("l", True)):
        a, b = f"a {key}", f"b {key}"
        story.enqueue(a, "ordered", ordering_key=key, holds_key=False).enqueue(b, "ordered", ordering_key=key)
        story.die(a).claim(b).run(b, "transient").fail(b)
        begun = story.now
        story.replay(a, f"request {key}")
        story.claim(b, began=story.now + 0.1 if late else begun).run(b).complete(b).work(a)

        assert story.rules() == ({"order"} if late else set())


def test_a_key_waits_for_the_retry_of_its_head(story: Story):
    story.enqueue("a", "ordered", ordering_key="k").enqueue("b", "ordered", ordering_key="k")
    story.claim("a").run("a", "transient").fail("a").work("b").work("a")

    assert story.rules() == {"order"}


# Effects


def test_effects_happen_once(story: Story):
    story.enqueue("e", "transactional").work("e").enqueue("f", "effect").work("f")
    good = [("e", "transactional"), ("f", "first time")]

    assert story.rules(effects=good) == set()
    assert story.rules(effects=[*good, ("e", "transactional")]) == {"effect"}
    assert story.rules(effects=[*good, ("f", "first time")]) == {"effect"}
    assert story.rules(effects=good[:1]) == {"effect"}
    assert story.rules(effects=good[1:]) == {"effect"}
    assert story.rules(effects=[*good, ("x", "first time")]) == {"effect"}


def test_the_effect_of_a_transaction_that_failed(story: Story):
    story.enqueue("e", "transactional").claim("e").run("e", "terminal").fail(
        "e", dead=True, verdict="terminal"
    )
    story.alert("e")

    assert story.rules() == set()
    assert story.rules(effects=[("e", "transactional")]) == {"effect"}


# Alerts


def test_dead_and_nobody_was_told(story: Story):
    story.enqueue("e").die("e")

    assert story.rules() == {"alert"}


def test_an_alert_that_sentry_refused_comes_again(story: Story):
    story.enqueue("e").die("e").alert("e", status=503).alert("e")
    assert story.violations() == []

    story.enqueue("f").die("f").alert("f", "a2", status=503)
    assert story.rules() == {"alert"}


def test_paid_and_never_sent(story: Story):
    story.enqueue("e").die("e").step("e", "DEAD_LETTERED", alert_id="a1").step(
        "e", "DEAD_LETTERED", alerted=True
    )

    assert story.rules() == {"alert"}


def test_an_alert_has_one_id(story: Story):
    story.enqueue("e").die("e").alert("e", status=503).alert("e", "a2")

    assert story.rules() == {"alert"}


def test_an_alert_that_no_row_knows(story: Story):
    """Sent before its id was on the row: a crash would have sent another."""
    story.enqueue("e").die("e").alert("e")
    story.evidence.alerts.append(story.evidence.alerts[0]._replace(alert="a9"))

    assert story.rules() == {"alert"}


def test_each_death_has_an_alert_of_its_own(story: Story):
    story.enqueue("e").die("e").alert("e").replay("e").die("e").alert("e", "a2")
    assert story.violations() == []

    story.enqueue("f").die("f").alert("f", "a3").replay("f", "r9").die("f")
    assert story.rules() == {"alert"}


def test_who_replays_or_discards_cancels_the_debt(story: Story):
    story.enqueue("e").die("e").replay("e").work("e").enqueue("f").die("f").discard("f")

    assert story.violations() == []


# Operators


def test_history_counts_replays_and_discards(story: Story):
    story.enqueue("e").die("e").replay("e").die("e").replay("e", "r2").work("e")
    assert story.violations() == []

    story.enqueue("f").die("f").replay("f", "r3", history=0).work("f")
    assert "replay" in story.rules()


def test_acknowledged_and_not_replayed(story: Story):
    story.enqueue("e").die("e").replay("e").work("e")
    story.evidence.acts.append(story.evidence.acts[0]._replace(request="r9"))

    assert story.rules() == {"replay"}


def test_refused_and_replayed(story: Story):
    story.enqueue("e").die("e").replay("e", result="refused").work("e")

    assert story.rules() == {"replay"}


def test_one_request_replays_once(story: Story):
    story.enqueue("e").die("e").replay("e", "r1").die("e").replay("e", "r1").work("e")

    assert story.rules() == {"replay"}


def test_a_lost_answer_leaves_it_open(story: Story):
    story.enqueue("e").die("e").replay("e", result="unknown").work("e")

    assert story.violations() == []


def test_many_at_once_say_how_many(story: Story):
    story.enqueue("e").die("e").replay("e", result="1 done").work("e")
    assert story.violations() == []

    story.enqueue("f").die("f").replay("f", "r9", result="2 done").work("f")
    assert story.rules() == {"replay"}


def test_replayed_and_not_dead(story: Story):
    story.enqueue("e").work("e").replay("e").work("e")

    assert "state machine" in story.rules()


# All the rest


def test_a_secret_where_none_should_be(story: Story):
    assert story.rules(canaries=["a log"]) == {"canary"}


def test_an_error_that_nobody_caught(story: Story):
    assert story.rules(tracebacks=["a log"]) == {"traceback"}


def test_a_backlog_that_does_not_drain(story: Story):
    assert story.rules(drained_in=None) == {"drain"}
