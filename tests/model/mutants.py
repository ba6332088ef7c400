"""Faults put into the SQL on purpose: the machine must find each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

FUNCTIONS_BEGIN = "create function pulse.lock_claimed("

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Replacements in the text of the migration, within the functions that are named."""

    changes: tuple[tuple[str, str, str], ...]  # function, what it says, what it says now
    before: str = ""  # added where the functions begin

    def apply(self, text: str) -> str:
        for function, old, new in self.changes:
            body = re.search(rf"create function pulse\.{function}\(.*?\n\$\$;", text, re.DOTALL)
            assert body, f"there is no function {function}"
            changed = body[0].replace(old, new)
            assert changed != body[0], f"{function} does not say: {old}"
            text = text.replace(body[0], changed)
        return text.replace(FUNCTIONS_BEGIN, self.before + FUNCTIONS_BEGIN)


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

MUTANTS = {
    "no fence": Mutant(
        changes=(
            *fence("o.event_id", "c.event_id"),
            ("answers", "when (o.claim_token = c.token) is not true then 'lost'", ""),
        )
    ),
    "attempts as the fence": Mutant(
        changes=(
            *fence("o.attempts", ATTEMPTS),
            ("answers", "(o.claim_token = c.token) is not true", f"(o.attempts = {ATTEMPTS}) is not true"),
        ),
        before=ATTEMPTS_OF_A_CLAIM,
    ),
    "claim is not idempotent": Mutant(changes=(("outbox_claim", "if not p_fresh then", "if false then"),)),
    "reap keeps the token": Mutant(
        changes=(("record_failure", "case when not p_reaped then o.claim_token end", "o.claim_token"),)
    ),
    "claim takes too many": Mutant(
        changes=(
            ("take", "limit v_stride", "limit null"),
            ("take", "v_rows[:v_wanted]", "v_rows"),
            ("take", "where w.number <= v_wanted", "where true"),
        )
    ),
    "no refund for a lapse in company": Mutant(
        changes=(("record_failure", "not o.alone and o.max_attempts > 1", "false"),)
    ),
    "a lapse alone is refunded": Mutant(
        changes=(("record_failure", "not o.alone and o.max_attempts > 1", "true"),)
    ),
    "the dead hold no key": Mutant(
        changes=(
            ("unpark", HEAD_OF_THE_DEAD, RUNNING_HEAD),
            ("whose_turn", HEAD_OF_THE_DEAD, RUNNING_HEAD),
        )
    ),
    "keys run in any order": Mutant(
        changes=(("take", "v_rows := pulse.whose_turn(v_rows, p_now)", "v_rows := v_rows"),)
    ),
    "the watchdog does not hold off": Mutant(
        changes=(("outbox_reap", "if v_hold > v_now then", "if false then"),)
    ),
    "pauses are ignored": Mutant(
        changes=(("paused_topics", "from pulse.pause p", "from pulse.pause p where false"),)
    ),
    "retries come back too early": Mutant(
        changes=(
            ("take", "and o.next_run_at <= p_now", ""),
            ("outbox_claim", "where l.next_run_at <= v_now", "where true"),
        )
    ),
    "release keeps the attempt": Mutant(
        changes=(("release_locked", "greatest(0, o.attempts - 1)", "o.attempts"),)
    ),
    "replay of what is not dead": Mutant(
        changes=(("outbox_replay", "'{DEAD_LETTERED}'", "'{DEAD_LETTERED, COMPLETED}'"),)
    ),
    "what is left of a batch is forgotten": Mutant(
        changes=(
            ("enter_leases", "set indexed_at = o.lease_until", "set lease_until = o.lease_until"),
            ("dissolve", "o.event_id = any (v_batch.event_ids)\n                and", "false and"),
        )
    ),
    "a batch ends with its first lease": Mutant(
        changes=(("outbox_reap", "v_left := pulse.dissolve(v_now, p_limit)", "v_left := 0"),)
    ),
    "the end of a turn unparks nobody": Mutant(
        changes=(("outbox_complete", "perform pulse.unpark(v_keys, v_now)", "null"),)
    ),
}
