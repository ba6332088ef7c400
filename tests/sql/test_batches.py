"""A large claim has one entry for all of its leases, and nothing of it is lost for that."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.calls import Calls, Claim, ids, seconds

MANY = 30


def together(outbox: Calls, number: int = MANY) -> Claim:
    """A large claim, by the short way."""
    outbox.enqueue_many(number)
    claim = outbox.claim_lane(limit=number, p_together=True)
    assert len(claim) == number
    return claim


def part(claim: Claim, *which: int | slice) -> Claim:
    rows = [claim[one] if isinstance(one, slice) else [claim[one]] for one in which]
    return Claim(claim.token, [row for some in rows for row in some])


def batches(outbox: Calls) -> dict[uuid.UUID, int]:
    """By token, how many are open."""
    return {row["token"]: row["open"] for row in outbox.conn.execute("select token, open from pulse.batch")}


def written_in_place(outbox: Calls, what) -> int:
    """How many rows were written without an entry in any index."""

    def number() -> int:
        [row] = outbox.conn.execute(
            "select n_tup_hot_upd as number from pg_stat_xact_user_tables where relname = 'outbox'"
        ).fetchall()
        return int(row["number"])

    before = number()
    what()
    return number() - before


def test_completions_write_no_index(outbox):
    """What all of this is for; and the control, a claim whose leases are entries."""
    outbox.conn.execute("alter table pulse.outbox set (fillfactor = 10)")  # room on every page
    claim = together(outbox)
    outbox.enqueue_many(MANY)
    single = outbox.claim_lane(limit=MANY)

    assert written_in_place(outbox, lambda: outbox.complete(claim)) == MANY
    assert written_in_place(outbox, lambda: outbox.complete(single)) == 0
    assert set(outbox.statuses(*claim.ids, *single.ids)) == {"COMPLETED"}


@pytest.mark.parametrize("way", ["outbox_claim", "outbox_claim_lane"])
@pytest.mark.parametrize("verb", ["complete", "fail", "snooze", "release"])
def test_a_batch_that_is_settled_is_forgotten(outbox, verb, way):
    if way == "outbox_claim":
        outbox.enqueue_many(MANY)
        claim = outbox.claim(limit=MANY, p_together=True)
    else:
        claim = together(outbox)
    assert batches(outbox) == {claim.token: MANY}

    getattr(outbox, verb)(part(claim, slice(0, 20)))
    assert batches(outbox) == {claim.token: 10}
    getattr(outbox, verb)(part(claim, slice(20, MANY)))
    assert batches(outbox) == {}


def test_two_batches_in_one_write(outbox):
    one, two = together(outbox), together(outbox)

    answers = outbox.call(
        "outbox_complete", [*one.ids, *two.ids[:11]], [*one.tokens, *two.tokens[:11]], p_delete=True
    )

    assert answers == []
    assert batches(outbox) == {two.token: MANY - 11}


def test_a_write_that_comes_twice_counts_once(outbox):
    """Its answer was lost. Counted twice, a batch would be forgotten while jobs of it run."""
    claim = together(outbox)
    half = part(claim, slice(0, 15))
    for verb in (outbox.complete, outbox.complete, outbox.fail, outbox.release, outbox.snooze):
        verb(half)

    assert batches(outbox) == {claim.token: 15}
    outbox.keep_sweeping(41)
    assert outbox.statuses(*claim.ids[15:]) == ["RETRYING"] * 15
    assert outbox.statuses(*claim.ids[:15]) == ["COMPLETED"] * 15


def test_leases_of_a_batch_lapse_like_others(outbox):
    claim = together(outbox)
    outbox.complete(part(claim, slice(0, 12), 13))

    reaped = outbox.keep_sweeping(41)

    left = [claim.ids[12], *claim.ids[14:]]
    assert sorted(ids(reaped)) == sorted(left)
    assert {row["answer"] for row in reaped} == {"RETRYING"}
    assert {outbox.row(event_id)["claim_token"] for event_id in left} == {None}
    assert batches(outbox) == {}
    assert outbox.complete(claim) == dict.fromkeys(left, "lost"), "the zombie"


def test_no_sweep_comes_before_the_lease_is_over(outbox):
    outbox.reap()
    claim = together(outbox)
    outbox.forward(10)
    outbox.reap()
    outbox.forward(10)
    outbox.reap()
    outbox.forward(9.9)

    assert outbox.reap() == []
    assert batches(outbox) == {claim.token: MANY}
    outbox.forward(0.2)
    assert len(outbox.reap()) == MANY


def test_a_few_at_a_time_are_not_counted_off(outbox):
    """What is left of their batch is looked at when its lease is over: nothing."""
    claim = together(outbox)
    for event in range(MANY):
        outbox.complete(part(claim, event))
    assert batches(outbox) == {claim.token: MANY}

    assert outbox.keep_sweeping(41) == []
    assert batches(outbox) == {}
    assert set(outbox.statuses(*claim.ids)) == {"COMPLETED"}


def test_a_heartbeat_gives_a_lease_of_its_own(outbox):
    claim = together(outbox)
    long = part(claim, 3, 4)
    outbox.reap()
    for _ in range(10):
        outbox.forward(10)
        assert outbox.heartbeat(long) == {}
        outbox.reap()
    assert outbox.statuses(*long.ids) == ["RUNNING"] * 2, "and the others lapsed"
    assert batches(outbox) == {}

    outbox.keep_sweeping(41)
    assert outbox.statuses(*long.ids) == ["RETRYING"] * 2


def test_no_more_than_the_limit_is_reaped_and_then_the_rest(outbox):
    claims = [together(outbox) for _ in range(3)]
    outbox.keep_sweeping(30)
    outbox.forward(10)

    assert [len(outbox.reap(p_limit=40, p_full=full)) for full in (False, True, True)] == [40, 40, 10]
    assert all(set(outbox.statuses(*claim.ids)) == {"RETRYING"} for claim in claims)
    assert batches(outbox) == {}


def test_a_sweep_waits_for_nobody(outbox, session):
    """FAULTS 15 and 41: a row of the batch is locked, then the batch itself."""
    claim, other = together(outbox), together(outbox)
    stuck = session()
    outbox.keep_sweeping(30)
    outbox.forward(10)
    with stuck.conn.transaction():
        stuck.conn.execute("select from pulse.outbox where event_id = %s for update", (claim.ids[0],))
        stuck.conn.execute("select from pulse.batch where token = %s for update", (other.token,))
        outbox.conn.execute("set lock_timeout = '2s'")
        assert outbox.complete(part(other, slice(0, 20))) == {}, "nor does who settles"
        assert sorted(ids(outbox.reap())) == sorted([*claim.ids[1:], *other.ids[20:]])
    outbox.forward(10)

    assert ids(outbox.reap(p_full=False)) == [claim.ids[0]], "its lease ended before the last sweep"
    assert batches(outbox) == {}


def test_a_repeated_claim_gets_the_same_rows(outbox):
    """Its answer was lost, and some of it was settled by then: they are not given again."""
    outbox.enqueue_many(2 * MANY)
    token = uuid.uuid4()
    first = outbox.claim_lane(limit=MANY, token=token, p_together=True)
    outbox.complete(part(first, slice(0, 10)))

    again = outbox.claim(limit=MANY, token=token, p_together=True)

    assert sorted(again.ids) == sorted(first.ids[10:])
    assert batches(outbox) == {token: 20}


def test_a_token_that_claims_again_after_it_was_reaped(outbox):
    """All that it had is gone, and a batch of its name may still be there, when a retry comes that takes others."""
    outbox.enqueue_many(MANY)
    token = uuid.uuid4()
    first = outbox.claim(limit=10, token=token, p_together=True)
    for event in range(10):
        outbox.complete(part(first, event))

    again = outbox.claim(limit=20, token=token, p_together=True)
    assert len(again) == 20
    assert batches(outbox) == {token: 30}
    assert sorted(ids(outbox.keep_sweeping(41))) == sorted(again.ids)


def test_several_lanes_share_a_batch(outbox):
    outbox.enqueue_many(15)
    outbox.enqueue_many(15, p_priority=3)
    lanes = [{"topic": "mail", "generation": 0, "lapses": 0, "priority": p, "quota": 30} for p in (3, 0)]

    claim = outbox.claim(limit=MANY, p_lanes=Jsonb(lanes), p_together=True)

    assert len(claim) == MANY
    assert batches(outbox) == {claim.token: MANY}
    outbox.keep_sweeping(41)
    assert set(outbox.statuses(*claim.ids)) == {"RETRYING"}


def test_ordering_keys_go_on(outbox):
    """Their rows are in the indexes of keys, batch or not."""
    keyed = [outbox.enqueue(key="k") for _ in range(3)]
    outbox.enqueue_many(12)
    claim = outbox.claim_lane(limit=20, p_together=True)
    assert keyed[0] in claim.ids
    assert not {*keyed[1:]} & {*claim.ids}
    with pytest.raises(psycopg.errors.UniqueViolation), outbox.conn.transaction():
        outbox.conn.execute(
            """update pulse.outbox
                  set status = 'RUNNING', lease_until = now(), locked_by = 'x', claim_token = event_id,
                      max_attempts = 1, parked = false
                where event_id = %s""",
            (keyed[1],),
        )

    assert outbox.complete(claim) == {}
    assert batches(outbox) == {}
    assert outbox.claim().ids == [keyed[1]]


def test_nothing_claimed_is_no_batch(outbox):
    assert outbox.claim_lane(p_together=True) == []
    assert outbox.claim(p_together=True) == []
    assert batches(outbox) == {}


def test_what_runs_is_counted(outbox, t0):
    claim = together(outbox)
    outbox.enqueue()
    single = outbox.claim()
    outbox.complete(part(claim, 0))
    running = sorted([*claim.ids[1:], *single.ids])

    assert sorted(ids(outbox.conn.execute("select event_id from pulse.running()"))) == running
    [row] = outbox.conn.execute("select running from pulse.topic_status where topic = 'mail'").fetchall()
    assert row["running"] == len(running)
    [row] = outbox.conn.execute("select pulse.oldest_unfinished() as since").fetchall()
    assert row["since"] == t0


def test_a_restored_backup_frees_batches_too(outbox):
    claim = together(outbox)
    outbox.conn.execute("update pulse.outbox set max_attempts = 1 where event_id = %s", (claim.ids[0],))

    assert outbox.scalar("outbox_free", "operator") == MANY
    assert outbox.statuses(*claim.ids[:2]) == ["DEAD_LETTERED", "PENDING"]
    assert outbox.scalar("outbox_free", "operator") == 0


def test_the_living_keep_what_is_theirs_when_others_are_freed(outbox):
    claim = together(outbox)
    outbox.seen("worker")
    outbox.enqueue_many(3)
    outbox.claim(worker="dead", p_together=True)

    assert [outbox.scalar("outbox_free", "operator", 2) for _ in range(3)] == [2, 1, 0]
    assert written_in_place(outbox, lambda: outbox.complete(claim)) > 0, "nobody gave it leases of its own"


@pytest.mark.parametrize("how", ["outbox_free", "outbox_prune"])
def test_a_table_that_was_restored_without_its_batches(outbox, how):
    claim = together(outbox)
    outbox.keep_sweeping(30)
    outbox.conn.execute("truncate pulse.batch")
    outbox.forward(10)
    assert outbox.reap() == [], "nothing leads there"

    if how == "outbox_prune":
        outbox.call("outbox_prune", seconds(1))
        outbox.forward(10)
        assert sorted(ids(outbox.reap())) == sorted(claim.ids)
    else:
        assert outbox.scalar("outbox_free", "operator") == MANY


def test_a_token_that_somebody_changed_by_hand(outbox):
    """To keep a zombie out: its lease runs out like all others."""
    claim = together(outbox)
    outbox.conn.execute("update pulse.outbox set claim_token = gen_random_uuid()")

    assert sorted(ids(outbox.conn.execute("select event_id from pulse.running()"))) == sorted(claim.ids)
    assert sorted(ids(outbox.keep_sweeping(41))) == sorted(claim.ids)


def test_together_is_for_who_says_so(outbox):
    outbox.enqueue_many(2)
    claims = outbox.claim(limit=1, p_together=None), outbox.claim_lane(limit=1, p_together=None)

    assert sorted(ids(outbox.keep_sweeping(41))) == sorted(claims[0].ids + claims[1].ids)


def test_a_completion_by_hand_at_the_end_of_the_lease(outbox):
    """The copies look right then, and the row is in the index of leases."""
    outbox.enqueue()
    outbox.claim()
    outbox.conn.execute(
        "update pulse.outbox set status = 'COMPLETED', completed_at = lease_until, lease_until = null, locked_by = null"
    )

    assert outbox.keep_sweeping(41) == []
    assert outbox.scalar("outbox_free", "operator") == 0


def test_a_completion_by_hand_lets_its_key_go_on(outbox):
    """Also at the end of the lease, when the time of the row's index entries stays the same."""
    first, second = outbox.enqueue(key="k"), outbox.enqueue(key="k")
    assert outbox.claim().ids == [first]
    outbox.conn.execute(
        """update pulse.outbox
              set status = 'COMPLETED', completed_at = lease_until, lease_until = null, locked_by = null
            where event_id = %s""",
        (first,),
    )
    outbox.conn.execute("select pulse.outbox_heal(p_now => %s)", (outbox.now,))

    assert outbox.claim().ids == [second]


def test_a_batch_that_grows_while_it_is_swept_is_kept(outbox):
    """A late try of its claim took more. Without their batch, nothing would lead to them when their worker dies."""
    early = together(outbox)
    outbox.enqueue_many(9)
    token = uuid.uuid4()
    first = outbox.claim(limit=9, token=token, p_together=True, p_lease=seconds(31))
    for event in range(9):
        outbox.complete(part(first, event))
    late = outbox.enqueue_many(20)
    outbox.keep_sweeping(30)
    outbox.forward(10)
    # The sweep has read both batches when it comes to the first one, and this happens before it comes to the second.
    outbox.conn.execute(
        f"""create function pulse.try_late() returns trigger language plpgsql as $$
            begin
              perform pulse.outbox_claim(
                '{token}', 'late', '{{mail}}', 20, p_together => true, p_now => '{outbox.now}');
              return null;
            end $$"""
    )
    outbox.conn.execute(
        f"""create trigger late after delete on pulse.batch for each row when (old.token = '{early.token}')
            execute function pulse.try_late()"""
    )

    outbox.reap()

    assert batches(outbox) == {token: 29}
    assert outbox.statuses(*late) == ["RUNNING"] * 20
    outbox.keep_sweeping(41)
    assert outbox.statuses(*late) == ["RETRYING"] * 20


def test_keys_that_were_written_by_hand_hold_up_nobody(outbox):
    """Two of one key run then, and only one can have an entry: the sweep gets to the other one later."""
    claim = together(outbox)
    outbox.conn.execute(
        "update pulse.outbox set ordering_key = 'k' where event_id = any (%s)", (claim.ids[:2],)
    )

    reaped = outbox.keep_sweeping(41)

    assert sorted(ids(reaped)) == sorted(claim.ids)
    assert batches(outbox) == {}


def test_a_completed_event_that_is_run_again_by_hand_takes_its_turn(outbox):
    """Else two events of its key would run at once."""
    first, second = outbox.enqueue(key="k"), outbox.enqueue(key="k")
    outbox.complete(outbox.claim())
    assert outbox.claim().ids == [second]
    again = """update pulse.outbox
                  set status = 'RUNNING', completed_at = null, lease_until = %s, locked_by = 'x', max_attempts = 5
                where event_id = %s"""
    with pytest.raises(psycopg.errors.UniqueViolation):
        outbox.conn.execute(again, (outbox.now, first))

    outbox.call("outbox_prune", seconds(0))
    assert outbox.statuses(second) == ["RUNNING"]


def test_what_is_freed_is_looked_for_everywhere_when_nothing_else_is_left(outbox):
    """A look at the whole table takes long: not before each part of what the indexes know."""
    known = together(outbox)
    lost = together(outbox)
    outbox.conn.execute("delete from pulse.batch where token = %s", (lost.token,))

    assert outbox.scalar("outbox_free", "operator") == MANY
    assert outbox.statuses(*known.ids, *lost.ids) == ["PENDING"] * MANY + ["RUNNING"] * MANY
    assert [outbox.scalar("outbox_free", "operator") for _ in range(2)] == [MANY, 0]


HELD = {"locked_by": "w", "claim_token": uuid.UUID(int=7), "max_attempts": 5}
NOT_HELD = {"locked_by": None, "lease_until": None}
TIMES = {"lease_until", "completed_at"}


@pytest.mark.parametrize("of_a_batch", [False, True])
@pytest.mark.parametrize("before", ["PENDING", "RUNNING", "COMPLETED", "DEAD_LETTERED"])
@pytest.mark.parametrize(
    "after", ["PENDING", "RETRYING", "RUNNING", "COMPLETED", "DEAD_LETTERED", "DISCARDED"]
)
def test_indexes_follow_who_writes_by_hand(outbox, t0, before, after, of_a_batch):
    """People repair rows, and tests make them: each is found where its status says."""
    if after == before == "RUNNING" and of_a_batch:
        before = "PENDING"  # a lease that is moved while a batch stands for it: see follow_status
    event_id = outbox.enqueue()
    if before != "PENDING":
        claim = outbox.claim(p_together=of_a_batch)
    if before == "COMPLETED":
        outbox.complete(claim)
    if before == "DEAD_LETTERED":
        outbox.fail(claim, terminal=True)
    changes = {"status": after, "completed_at": None, **NOT_HELD}
    if after == "RUNNING":
        changes |= {**HELD, "lease_until": t0 - seconds(60)}
    elif after in ("COMPLETED", "DEAD_LETTERED", "DISCARDED"):
        changes["completed_at"] = t0 - seconds(7)
    outbox.conn.execute(
        f"update pulse.outbox set {', '.join(f'{name} = %({name})s' for name in changes)} where event_id = %(id)s",
        changes | {"id": event_id},
    )

    found_where = where_it_is_found(outbox)

    assert found_where == {
        "PENDING": ["claimed"],
        "RETRYING": ["claimed"],
        "RUNNING": ["reaped"],
        "DEAD_LETTERED": ["dead"],
    }.get(after, [])


@pytest.mark.parametrize("status", ["RUNNING", "COMPLETED", "DEAD_LETTERED", "RETRYING"])
def test_indexes_follow_what_is_inserted_by_hand(outbox, t0, status):
    columns = {"status": status}
    if status == "RUNNING":
        columns |= {**HELD, "lease_until": t0 - seconds(60)}
    elif status != "RETRYING":
        columns["completed_at"] = t0
    outbox.insert(**columns)

    expected = {"RUNNING": ["reaped"], "DEAD_LETTERED": ["dead"], "RETRYING": ["claimed"], "COMPLETED": []}
    assert where_it_is_found(outbox) == expected[status]


def test_a_lease_that_is_moved_by_hand_lapses_then(outbox):
    outbox.keep_sweeping(41)
    outbox.enqueue()
    claim = outbox.claim_lane()
    outbox.conn.execute("update pulse.outbox set lease_until = %s", (outbox.now - seconds(5),))

    assert ids(outbox.reap()) == claim.ids


def where_it_is_found(outbox: Calls) -> list[str]:
    """By a claim, a sweep, and who asks for the dead."""
    found = []
    dead = outbox.conn.execute("select from pulse.dead_letter").fetchall()
    with outbox.conn.transaction(force_rollback=True):
        if outbox.claim():
            found.append("claimed")
    with outbox.conn.transaction(force_rollback=True):
        outbox.conn.execute("insert into pulse.sweep values (%s, %s)", (outbox.now, outbox.now))
        if outbox.reap():
            found.append("reaped")
    if dead:
        found.append("dead")
        assert outbox.call("outbox_next_alert"), "and its alert is owed"
    return found
