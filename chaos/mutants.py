"""Mutants: faults put into the product on purpose. The checker must find each of them.

A mutant is any number of replacements in the SQL functions of the migrated database (`changes`, applied by the rig
after `migrate`) and of patches in Python (`patch`, applied in dispatchers, their children and producers). The course
is the run in which it shows: `python3 dev.py chaos --mutants` runs every course without a mutant, which must pass, and
then with each of its mutants, which must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos import broken

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One run of the rig, short enough to be repeated for every mutant."""

    mix: str
    topics: str = ""
    seconds: float = 20
    lease: float = 3
    drain_within: float = 180
    rate: float = 15


COURSES = {
    "calm": Course(mix="none"),
    "poison": Course(mix="none", topics="fast=60,kills=1", rate=5, lease=1.5, seconds=60),
    "keys": Course(mix="none", topics="ordered=1"),
    "generations": Course(mix="none", topics="fast=1,generations=2"),
    "hangs": Course(mix="none", topics="fast=20,hangs=1", seconds=40),
    "blocks": Course(mix="none", topics="fast=20,slow=60,blocks=1", lease=1.5, seconds=40),
    "outages": Course(mix="freeze,kill-dispatcher", lease=2, seconds=40),
    "stops": Course(mix="stop-dispatcher,kill-dispatcher", lease=2, seconds=30),
    "deploys": Course(mix="deploy", lease=2, seconds=30),
    "lost answers": Course(mix="lose,reset", seconds=30),
    "sentry": Course(mix="sentry,kill-dispatcher", lease=2, seconds=30),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault, and which rules of the checker are expected to notice it."""

    why: str
    """What a user would see of it."""
    noticed_by: tuple[str, ...]
    """Names of rules; one of them must be among the violations."""
    course: str
    changes: tuple[tuple[str, str, str], ...] = ()
    """Function, what it says, what it says now."""
    before: str = ""
    """SQL that is executed before the changes."""
    patch: Callable[[], None] | None = None
    """Called in every process that runs the product, before anything else."""


# Remembers the attempts that each claim began with, for a fence that compares those.
ATTEMPTS_OF_A_CLAIM = """
create table pulse.claimed_attempts (event_id uuid, token uuid, attempts integer, primary key (event_id, token));
create function pulse.remember_attempts() returns trigger language plpgsql security definer as $$
begin
  insert into pulse.claimed_attempts values (new.event_id, new.claim_token, new.attempts)
    on conflict (event_id, token) do update set attempts = excluded.attempts;
  return null;
end
$$;
create trigger remember after update on pulse.outbox for each row
  when (new.status = 'RUNNING' and old.status <> 'RUNNING') execute function pulse.remember_attempts();
"""
ATTEMPTS = (
    "(select m.attempts from pulse.claimed_attempts m where m.event_id = c.event_id and m.token = c.token)"
)


def fence(of_the_row: str, of_the_claim: str) -> tuple[tuple[str, str, str], ...]:
    """What a write after a claim compares instead of the tokens."""
    return tuple(
        (function, *change)
        for function in ("lock_claimed", "outbox_complete")
        for change in (
            ("o.claim_token) in (", f"{of_the_row}) in ("),
            ("c.token from unnest", f"{of_the_claim} from unnest"),
        )
    )


HEAD_OF_THE_DEAD = "(h.indexed_as = 'RUNNING' or h.holds_key)"
RUNNING_HEAD = "h.indexed_as = 'RUNNING'"

MUTANTS: dict[str, Mutant] = {
    "no fence": Mutant(
        why="a worker whose lease was reaped stores its result over that of its successor",
        noticed_by=("fence", "result"),
        course="stops",
        changes=(
            *fence("o.event_id", "c.event_id"),
            ("answers", "when (o.claim_token = c.token) is not true then 'lost'", ""),
        ),
    ),
    "attempts as the fence": Mutant(
        why="attempts repeat themselves after a refund or a replay, and with them the right to write",
        noticed_by=("fence", "result"),
        course="stops",
        before=ATTEMPTS_OF_A_CLAIM,
        changes=(
            *fence("o.attempts", ATTEMPTS),
            ("answers", "(o.claim_token = c.token) is not true", f"(o.attempts = {ATTEMPTS}) is not true"),
        ),
    ),
    "claim is not idempotent": Mutant(
        why="a claim whose answer was lost takes other jobs, and forgets the first ones until they lapse",
        noticed_by=("claim",),
        course="lost answers",
        changes=(("outbox_claim", "if not p_fresh then", "if false then"),),
    ),
    "no read-back": Mutant(
        why="a completion whose answer was lost counts as a lost lease, and the job is run again",
        noticed_by=("claim",),
        course="lost answers",
        changes=(("outbox_complete", "'{COMPLETED}'", "'{}'"),),
        patch=broken.run_again_what_was_lost,
    ),
    "release gives back two attempts": Mutant(
        why="every deployment makes budgets larger",
        noticed_by=("state machine",),
        course="deploys",
        changes=(("release_locked", "o.attempts - 1", "greatest(0, o.attempts - 2)"),),
    ),
    "a lapse alone is given back": Mutant(
        why="a job that kills its worker does so for ever",
        noticed_by=("state machine",),
        course="poison",
        changes=(("record_failure", "not o.alone and o.max_attempts > 1", "o.max_attempts > 1"),),
    ),
    "a lapse in company is not given back": Mutant(
        why="innocents die with the worker that somebody else has killed",
        noticed_by=("state machine",),
        course="stops",
        changes=(("record_failure", "not o.alone and o.max_attempts > 1", "false"),),
    ),
    "plain subquery claim": Mutant(
        why="two dispatchers run the same job at once",
        noticed_by=("state machine", "fence"),
        course="calm",
        changes=(
            ("take", "for update skip locked", ""),
            (
                "outbox_claim",
                "where o.ctid = any (v_taken.rows)",
                "where o.event_id in (select p.event_id from pulse.outbox p where p.ctid = any (v_taken.rows))",
            ),
            ("outbox_claim_lane", "for update skip locked", ""),
            (
                "outbox_claim_lane",
                "where o.ctid = any ((",
                "where o.event_id in (select p.event_id from pulse.outbox p where p.ctid = any ((",
            ),
            ("outbox_claim_lane", "::tid[])", "::tid[]))"),
        ),
    ),
    "alert only in memory": Mutant(
        why="nobody hears of a death when Sentry is away or the dispatcher is killed",
        noticed_by=("alert",),
        course="sentry",
        patch=broken.pay_alerts_first,
    ),
    "heartbeat in the event loop": Mutant(
        why="a handler that blocks the loop costs its process all leases",
        noticed_by=("lease",),
        course="blocks",
        patch=broken.beat_in_the_event_loop,
    ),
    "terminal is transient": Mutant(
        why="a job that can never succeed is tried until its budget is spent",
        noticed_by=("result",),
        course="calm",
        changes=(("record_failure", "when f.terminal then 'DEAD_LETTERED'", "when false then 'DEAD_LETTERED'"),),
    ),
    "the budget is off by one": Mutant(
        why="one attempt more than was allowed",
        noticed_by=("budget",),
        course="calm",
        changes=(("record_failure", "o.attempts < o.max_attempts", "o.attempts <= o.max_attempts"),),
    ),
    "replay writes no history": Mutant(
        why="the evidence of the first death is gone",
        noticed_by=("replay", "state machine"),
        course="calm",
        changes=(
            ("replay_held", "'replayed_at', p_now)),", "'replayed_at', p_now)) - 0,"),  # all but its only entry
        ),
    ),
    "replay keeps the old generation": Mutant(
        why="what was replayed for the new code dies again of the bug of the old",
        noticed_by=("asked",),
        course="generations",
        changes=(("replay_held", "coalesce(p_new_generation, o.generation)", "o.generation"),),
    ),
    "the history forgets why": Mutant(
        why="whoever looks at what died twice is not told what it died of the first time",
        noticed_by=("history",),
        course="calm",
        changes=(("failure_cycle", "'last_error', o.last_error", "'last_error', null"),),
    ),
    "a repeated request is another one": Mutant(
        why="an operator whose answer was lost replays twice, or is told that he may not",
        noticed_by=("replay",),
        course="calm",
        changes=(("hold_event", "if v_done and p_request is not null then", "if false then"),),
    ),
    "a kind is all of its topic": Mutant(
        why="with the dead letters of one bug all others of the topic are replayed",
        noticed_by=("asked",),
        course="calm",
        changes=(
            ("hold_dead", "coalesce(o.last_failure ->> 'error_class', '') = p_error_class", "true"),
        ),
    ),
    "the first error hides the last": Mutant(
        why="the alert and the dead letter tell of a failure that is over",
        noticed_by=("failure",),
        course="calm",
        changes=(("record_failure", "then d.error else", "then coalesce(o.last_error, d.error) else"),),
    ),
    "patterns of topics are ignored": Mutant(
        why="a dispatcher that was to do one thing does everything",
        noticed_by=("topic",),
        course="calm",
        patch=broken.serve_every_topic,
    ),
    "a completion gives no turn": Mutant(
        why="every event of a key waits for the healing pass",
        noticed_by=("turn",),
        course="keys",
        changes=(("outbox_complete", "perform pulse.unpark(v_keys, v_now);", "null;"),),
    ),
    "unpark is lost": Mutant(
        why="a key stands still for ever behind a job that has ended",
        noticed_by=("lost", "drain"),
        course="keys",
        changes=(("unpark", "if cardinality(v_rows) = 0 then", "if true then"),),
    ),
    "keys run in any order": Mutant(
        why="the second event of an order is handled before the first",
        noticed_by=("order",),
        course="keys",
        changes=(("take", "v_rows := pulse.whose_turn(v_rows, p_now)", "v_rows := v_rows"),),
    ),
    "the dead hold no key": Mutant(
        why="events go on behind a dead letter that should hold them",
        noticed_by=("order",),
        course="keys",
        changes=(("unpark", HEAD_OF_THE_DEAD, RUNNING_HEAD), ("whose_turn", HEAD_OF_THE_DEAD, RUNNING_HEAD)),
    ),
    "enqueue outside the transaction": Mutant(
        why="what was rolled back runs all the same",
        noticed_by=("rolled back",),
        course="calm",
        patch=broken.enqueue_in_another_transaction,
    ),
    "the watchdog does not look at leases": Mutant(
        why="jobs are taken from workers that live",
        noticed_by=("fence",),
        course="calm",
        changes=(("outbox_reap", "and o.indexed_at < v_now", ""),),
    ),
    "the watchdog does not hold off": Mutant(
        why="after an outage jobs are taken from workers that live",
        noticed_by=("hold", "lease"),
        course="outages",
        changes=(("outbox_reap", "if v_hold > v_now then", "if false then"),),
    ),
    "generations are ignored": Mutant(
        why="old code runs events that were meant for the new",
        noticed_by=("generation",),
        course="generations",
        changes=(("outbox_lanes", "v_generation = any (p_generations)", "true"),),
    ),
    "due times are ignored": Mutant(
        why="what was scheduled or backs off runs with the next claim of its lane",
        noticed_by=("early",),
        course="calm",
        changes=(
            ("take", "and o.next_run_at <= p_now", ""),
            ("outbox_claim", "where l.next_run_at <= v_now", "where true"),
            ("outbox_claim_lane", "and i.next_run_at <= v_now", ""),
        ),
    ),
    "no backoff": Mutant(
        why="what fails is tried again at once, and again, against a service that is down",
        noticed_by=("backoff",),
        course="calm",
        changes=(("record_failure", "p_now + d.delay", "p_now"),),
    ),
    "leases are far too long": Mutant(
        why="the jobs of a dead worker wait for minutes",
        noticed_by=("lease",),
        course="calm",
        changes=(
            ("outbox_claim", "v_now + p_lease", "v_now + p_lease * 20"),
            ("outbox_claim_lane", "t.now + p_lease", "t.now + p_lease * 20"),
        ),
    ),
    "lapses are not counted": Mutant(
        why="a job that kills its worker is never suspected, and takes others with it for ever",
        noticed_by=("fence", "state machine"),
        course="poison",
        changes=(("record_failure", "o.lapses + p_lapsed::integer", "o.lapses"),),
    ),
    "suspects run among others": Mutant(
        why="a job that kills its worker takes the same innocents with it again",
        noticed_by=("company",),
        course="poison",
        patch=broken.have_no_children,
    ),
    "timeouts are not kept": Mutant(
        why="a handler that hangs keeps its slot and its lease for ever",
        noticed_by=("timeout",),
        course="hangs",
        patch=broken.let_handlers_hang,
    ),
    "payload in last_error": Mutant(
        why="a secret of a customer is read by whoever reads dead letters",
        noticed_by=("canary",),
        course="calm",
        changes=(
            ("record_failure", "then d.error else", "then left(d.error || o.payload::text, 2048) else"),
        ),
    ),
}  # fmt: skip


def patch(name: str) -> None:
    """Applies the Python half of a mutant to this process; nothing when there is none."""
    if name and (patched := MUTANTS[name].patch) is not None:
        patched()


def change_database(conn: psycopg.Connection[object], name: str, schema: str = "pulse") -> None:
    """Applies the SQL half: the functions are read from the catalogue and created again with other words."""
    mutant = MUTANTS[name]
    if mutant.before:
        conn.execute(mutant.before.encode())
    texts: dict[str, str] = {}
    for function, old, new in mutant.changes:
        text = texts.get(function) or _definition_of(function, conn, schema)
        assert old in text, f"{function} does not say: {old}"
        texts[function] = text.replace(old, new)
    for text in texts.values():
        conn.execute(text.encode())


def _definition_of(function: str, conn: psycopg.Connection[object], schema: str) -> str:
    row = conn.execute(
        "select pg_get_functiondef(p.oid) from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.proname = %s",
        (schema, function),
    ).fetchone()
    assert isinstance(row, tuple), f"there is no function {function}"
    return str(row[0])
