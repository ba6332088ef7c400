"""Which lanes a claim asks, for how many, and from where: the plan alone, without a database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from pulse_outbox.claims import Claimed, Lane
from pulse_outbox.dispatcher.lanes import ASKED_TOPICS, KNOWN_LANES, ClaimPlan, Lanes, Turn
from pulse_outbox.store import Listing

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def claim(
    topic: str,
    due: datetime = NOON,
    priority: int = 0,
    max_attempts: int = 5,
    ordering_key: str | None = None,
) -> Any:
    return SimpleNamespace(
        topic=topic,
        generation=0,
        lapses=0,
        priority=priority,
        next_run_at=due,
        seq=1,
        event_id=UUID(int=0),
        max_attempts=max_attempts,
        ordering_key=ordering_key,
    )


def note(lanes: Lanes, plan: ClaimPlan, *claims: Any, left_behind: Sequence[Lane] = ()) -> None:
    lanes.note(plan, Claimed(claims, left_behind))


def some(plan: ClaimPlan | None) -> ClaimPlan:
    assert plan is not None
    return plan


def test_a_guess_asks_the_lanes_that_are_known_in_turn():
    lanes = Lanes()
    plan = some(lanes.guess(10, 0.0))
    for topic in ("a", "b", "c"):
        note(lanes, plan, claim(topic))
    note(lanes, plan, claim("a", NOON + timedelta(minutes=1), priority=5))

    again = lanes.guess_again(10, {"a": 100, "b": 1, "c": 0}.__getitem__, 0.0)

    assert again is not None
    assert again.quotas == {"a": 4, "b": 1}, "the same share for each, no more than it has room for"
    assert [(lane["topic"], lane["priority"], lane["quota"]) for lane in again.lanes or []] == [
        ("b", 0, 1),
        ("a", 5, 4),
        ("a", 0, 4),
    ]
    assert (again.lanes or [])[1]["next_run_at"] == "2030-01-01T12:00:59+00:00"


def test_a_listing_shows_up_to_when_all_is_known():
    """A guess must not walk again over what died since the last claim. But transactions may have been open then."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"), claim("b"))
    waiting = Lane("b", 0, 0, 0, NOON, 7, due_in=-60)

    lanes.refresh(Listing([waiting], NOON + timedelta(minutes=1), 0.0), now=1.0)

    again = some(lanes.guess_again(10, lambda topic: 10, 0.0))
    assert {lane["next_run_at"] for lane in again.lanes or []} == {"2030-01-01T12:00:59+00:00"}
    plan = some(lanes.plan(10, lambda topic: 10, 2.0))
    assert [(lane["topic"], lane["next_run_at"], lane["seq"]) for lane in plan.lanes or []] == [
        ("b", "2030-01-01T12:00:00+00:00", 7)
    ]
    note(lanes, some(lanes.guess_again(10, lambda topic: 10, 1.5)))
    both = some(lanes.plan(10, lambda topic: 10, 2.0, also_known=True))
    assert [(lane["topic"], lane["next_run_at"], lane["quota"]) for lane in both.lanes or []] == [
        ("a", "2030-01-01T12:00:59+00:00", 5),
        ("b", "2030-01-01T12:00:00+00:00", 10),
    ]


def test_what_longer_transactions_committed_is_looked_for_once_a_second():
    """It lies behind all that was claimed and listed since they began, and behind all that has died since then."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"))
    looks = []
    for now in (5.0, 5.5, 5.9, 6.1, 6.5):
        guess = some(lanes.guess_again(10, lambda topic: 10, now))
        [lane] = guess.lanes or []
        looks.append(lane["next_run_at"][11:19])
        note(lanes, guess)

    assert looks == ["11:59:50", "11:59:59", "11:59:59", "11:59:50", "11:59:59"]


def test_a_long_look_that_was_never_asked_for_is_still_due():
    """A claim is made before every sleep, and not sent where nobody wakes the dispatcher."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"))
    for now in (5.0, 5.1):
        [lane] = some(lanes.guess(10, now)).lanes or []
        assert lane["next_run_at"][11:19] == "11:59:50"


def test_known_lanes_are_asked_beside_a_backlog_whatever_was_listed():
    """One that had an event for later, and one that had no more than was claimed, may have got new ones since."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("later"), claim("short"))
    listed = [
        Lane("backlog", 0, 0, 0, NOON, 1, due_in=-60),
        Lane("later", 0, 0, 0, NOON + timedelta(hours=1), 2, due_in=3600),
        Lane("short", 0, 0, 0, NOON, 3, due_in=-60),
    ]
    lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
    note(lanes, some(lanes.plan(30, lambda topic: 10, 2.0)), *[claim("backlog")] * 10)

    plan = some(lanes.plan(30, lambda topic: 10, 2.0, also_known=True))

    assert {lane["topic"] for lane in plan.lanes or []} == {"backlog", "later", "short"}


def test_lanes_of_a_handler_at_its_limit_are_not_guessed_from():
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"), claim("b"))

    assert not lanes.at_limit({"a": 1, "b": 1}.__getitem__)
    assert lanes.at_limit({"a": 1, "b": 0}.__getitem__)
    assert lanes.guess_again(10, {"a": 0, "b": 0}.__getitem__, 0.0) is None


def test_a_guess_that_got_all_it_asked_for_goes_on_from_there():
    lanes = Lanes()
    note(lanes, some(lanes.guess(2, 0.0)), claim("a"), claim("b"))
    assert lanes.plan(10, lambda topic: 10, 1.0) is not None

    few, enough = Lanes(), Lanes()
    for known in (few, enough):
        note(known, some(known.guess(10, 0.0)), claim("a"))
        assert known.plan(10, lambda topic: 10, 1.0) is None
    guess = enough.guess_again(10, {"a": 1}.__getitem__, 0.0)
    assert guess is not None
    note(enough, guess, claim("a", NOON + timedelta(minutes=1)))
    note(few, some(few.guess_again(10, {"a": 2}.__getitem__, 0.0)), claim("a"))

    more = enough.plan(10, lambda topic: 10, 1.0)
    assert more is not None
    assert [(lane["next_run_at"], lane["seq"]) for lane in more.lanes or []] == [
        ("2030-01-01T12:01:00+00:00", 2)
    ]
    assert few.plan(10, lambda topic: 10, 1.0) is None


def test_a_guess_knows_no_more_lanes_than_it_can_ask():
    lanes = Lanes()
    assert lanes.guess_again(10, lambda topic: 10, 0.0) is None
    plan = some(lanes.guess(10, 0.0))
    for number in range(KNOWN_LANES + 5):
        note(lanes, plan, claim(f"topic-{number}"))

    again = lanes.guess_again(100, lambda topic: 10, 0.0)

    assert again is not None
    assert len(again.lanes or []) == KNOWN_LANES
    assert (again.lanes or [])[0]["topic"] == "topic-5"


def test_a_budget_of_one_that_was_left_behind_is_waited_for_and_asked_for_first():
    """Its lane goes on where it stands, as soon as a slot is free."""
    lanes = Lanes()
    listed = [Lane("mail", 0, 0, 0, NOON, 1, due_in=-60)]
    lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
    behind = Lane("mail", 0, 0, 0, NOON + timedelta(seconds=3), 7, due_in=0.0)
    note(
        lanes,
        some(lanes.plan(10, lambda topic: 10, 2.0)),
        claim("mail", NOON + timedelta(seconds=9)),
        left_behind=[behind],
    )

    assert lanes.wait_for_slot(lambda topic: 1)
    assert not lanes.wait_for_slot(lambda topic: 0), "its handler is at its limit: a slot would not help"
    [lane] = some(lanes.plan(10, lambda topic: 10, 2.0)).lanes or []
    assert (lane["next_run_at"], lane["seq"]) == ("2030-01-01T12:00:03+00:00", 7)


def test_budgets_of_one_are_waited_for_until_their_lane_has_none():
    behind = Lane("mail", 0, 0, 0, NOON, 7, due_in=0.0)

    def waiting() -> Lanes:
        lanes = Lanes()
        note(lanes, some(lanes.guess(1, 0.0)), left_behind=[behind])
        return lanes

    def asked(lanes: Lanes, *claims: Any, limit: int = 1) -> bool:
        note(lanes, some(lanes.plan(limit, lambda topic: 10, 2.0)), *claims)
        return lanes.wait_for_slot(lambda topic: 1)

    assert asked(waiting(), claim("mail", max_attempts=1)), "there may be more"
    lanes = waiting()
    lanes.refresh(Listing([behind, behind._replace(topic="other")], NOON, 0.0), now=1.0)
    assert asked(lanes, claim("other")), "another topic had the slot"
    assert not asked(waiting(), claim("mail")), "they are over, others of the lane come"
    assert not asked(waiting(), limit=5), "it is empty"
    lanes = waiting()
    lanes.refresh(Listing([behind], NOON, 0.0), now=1.0)
    assert lanes.wait_for_slot(lambda topic: 1)
    lanes.refresh(Listing([], NOON, 0.0), now=1.0)
    assert not lanes.wait_for_slot(lambda topic: 1), "somebody else has taken it"
    lanes = waiting()
    lanes.refresh(Listing([behind._replace(due_in=3600)], NOON, 0.0), now=1.0)
    assert not lanes.wait_for_slot(lambda topic: 1), "and the lane has something for later"


def test_a_topic_that_was_left_out_for_a_while_gets_its_turn():
    """Whoever was first most recently is last."""
    lanes = Lanes()
    lanes.refresh(
        Listing([Lane(topic, 0, 0, 0, NOON, 1, due_in=-60) for topic in ("a", "b", "c")], NOON, 0.0), now=1.0
    )
    firsts = []
    for room in ({"a": 0, "b": 9, "c": 0}, {"a": 9, "b": 9, "c": 0}) * 3:
        plan = some(lanes.plan(1, room.__getitem__, 2.0))
        firsts.append(plan.keys[0].topic)
        note(lanes, plan, claim(firsts[-1]))

    assert firsts == ["b", "a"] * 3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, ["a", "b", "c", "a", "b", "c"]),
        (2, ["ab", "ca", "bc", "ab", "ca", "bc"]),
        (4, ["aabb", "ccaa", "bbcc", "aabb", "ccaa", "bbcc"]),
        (5, ["aabbc", "ccaab", "bbcca", "aabbc", "ccaab", "bbcca"]),
        (6, ["aabbcc"] * 6),
    ],
)
def test_the_turn_goes_on_behind_those_that_were_served(limit: int, expected: list[str]):
    """By one for each claim, most of 300 topics would wait while the same few are served again and again."""
    turn = Turn()
    shares = []
    for _ in expected:
        order = turn.order("cab")
        quotas = dict.fromkeys(order, -(-limit // 3))
        taken = "".join(topic * quotas[topic] for topic in order)[:limit]
        turn.took(quotas, Counter(taken))
        shares.append(taken)

    assert shares == expected


def test_a_turn_is_moved_by_claims_and_not_by_plans():
    """Some are thrown away: with two of them for each claim, one of two topics would never be first."""
    lanes = Lanes()
    listed = [Lane(topic, 0, 0, 0, NOON, 1, due_in=-60) for topic in "ab"]
    lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
    first = []
    for _ in range(4):
        lanes.plan(1, lambda topic: 10, 2.0)
        plan = some(lanes.plan(1, lambda topic: 10, 2.0))
        first.append(plan.keys[0].topic)
        note(lanes, plan, claim(plan.keys[0].topic))

    assert first == ["a", "b", "a", "b"]


def test_a_turn_that_others_used_up_is_not_over():
    """Those that are known are asked first. Where they fill every second claim, one of two topics never had a turn."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(1, 0.0)), claim("known"))
    listed = [Lane(topic, 0, 0, 0, NOON, 1, due_in=-60) for topic in "ab"]
    served = []
    for step in range(8):
        lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
        plan = some(lanes.plan(1, lambda topic: 10, 2.0, also_known=True))
        assert plan.keys[0].topic == "known"
        served.append(plan.keys[step % 2].topic)
        note(lanes, plan, claim(served[-1]))

    assert served == ["known", "a", "known", "b"] * 2


def test_nobody_asks_thousands_of_topics_for_a_few_events():
    lanes = Lanes()
    topics = [f"t{number:04}" for number in range(3000)]
    lanes.refresh(
        Listing([Lane(topic, 0, 0, 0, NOON, 1, due_in=-60) for topic in topics], NOON, 0.0), now=1.0
    )
    served: list[str] = []
    for _ in range(300):
        plan = some(lanes.plan(10, lambda topic: 10, 2.0))
        assert len(plan.keys) == 10 * ASKED_TOPICS
        note(lanes, plan, *(claim(key.topic) for key in plan.keys[:10]))
        served += [key.topic for key in plan.keys[:10]]

    assert served == topics, "and everybody has had a turn"


def test_a_claim_behind_another_goes_on_where_the_turn_will_be():
    """Before the first one is answered: the same topics would be asked twice."""
    lanes = Lanes()
    lanes.refresh(Listing([Lane(topic, 0, 0, 0, NOON, 1, -1.0) for topic in "abcd"], NOON, 0.0), 0.0)
    first = some(lanes.plan(2, lambda topic: 10, 0.0))

    assert list(first.turns) == list("abcd")
    assert list(some(lanes.plan(2, lambda topic: 10, 0.0, behind=first)).turns) == list("cdab")


def test_a_claim_behind_a_guess_keeps_to_the_turn():
    """A guess asks for nobody's turn. A lane may become due in the moment between the two."""
    lanes = Lanes()
    guess = some(lanes.guess(2, 0.0))
    lanes.refresh(Listing([Lane("a", 0, 0, 0, NOON, 1, -1.0)], NOON, 0.0), 0.0)

    assert list(some(lanes.plan(2, lambda topic: 10, 0.0, behind=guess)).turns) == ["a"]


def guess(lanes: Lanes) -> ClaimPlan:
    return some(lanes.guess(10, 0.0))


def test_a_claim_is_plain_while_one_lane_has_neither_keys_nor_budgets_of_one():
    """Only then the short way is worth a try."""
    lanes = Lanes()
    assert not guess(lanes).plain, "the lanes are not even known"
    note(lanes, guess(lanes), claim("a"))
    assert guess(lanes).plain

    for special in (claim("a", ordering_key="k"), claim("a", max_attempts=1)):
        note(lanes, guess(lanes), special, claim("a"))
        assert not guess(lanes).plain
        note(lanes, guess(lanes), claim("a"))
        assert guess(lanes).plain

    note(lanes, guess(lanes), claim("a"), claim("b"))
    assert not guess(lanes).plain, "two lanes"


def test_a_plan_is_plain_as_a_guess_is():
    lanes = Lanes()
    lanes.refresh(Listing([Lane("a", 0, 0, 0, NOON, 1, -1.0)], NOON, 0.0), 0.0)
    plan = some(lanes.plan(10, lambda topic: 10, 0.0))
    assert plan.plain, "nothing else is known of it"

    note(lanes, plan, left_behind=[Lane("a", 0, 0, 0, NOON, 1, 0.0)])

    assert not some(lanes.plan(10, lambda topic: 10, 0.0)).plain
