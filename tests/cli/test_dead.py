"""`pulse-outbox dead`: what died, why, and how it comes back without making things worse."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import subprocess
import sys
import termios
import uuid
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from pulse_outbox import Event, Outbox, TerminalHandlerError
from pulse_outbox.operations import Operations, Selection, connect
from pulse_outbox.replaying import Replay
from tests.cli.conftest import HOSTILE, Result, bury
from tests.support.dispatching import dispatching
from tests.support.waiting import wait_until

QUIET = ("--generation", 0, "--by", "ada", "--yes")


def statuses(calls, topic: str = "mail") -> Counter[str]:
    rows = calls.conn.execute("select status::text from pulse.outbox where topic = %s", (topic,)).fetchall()
    return Counter(row["status"] for row in rows)


def dead_ids(calls, topic: str = "mail") -> list[uuid.UUID]:
    query = "select event_id from pulse.dead_letter where topic = %s order by dead_lettered_at"
    return [row["event_id"] for row in calls.conn.execute(query, (topic,))]


# list and show


def test_list_groups_by_kind_first(command, calls):
    bury(calls, "mail", "Boom", 3)
    bury(calls, "mail", "Bang", 1)
    bury(calls, "fax", "Boom", 2)

    listed = command("dead", "list", "--limit", 2, "--json").json
    assert [(kind["topic"], kind["error_class"], kind["dead"]) for kind in listed["kinds"]] == [
        ("mail", "Boom", 3),
        ("fax", "Boom", 2),
        ("mail", "Bang", 1),
    ]
    assert (listed["dead"], len(listed["newest"])) == (6, 2)
    assert list(listed["kinds"][0]) == [
        "topic", "error_class", "dead", "first_died_at", "last_died_at", "generations", "died_before", "last_error",
    ]  # fmt: skip
    assert listed["kinds"][0]["generations"] == [0]
    out = command("dead", "list", "--limit", 2).out
    assert out.startswith("6 dead letters of 3 kinds\n")
    assert "the newest 2 of 6" in out


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (("--topic", "mail"), 4),
        (("--topic", "mail", "--topic", "fax"), 6),
        (("--error-class", "Boom"), 5),
        (("--topic", "mail", "--error-class", "Bang"), 1),
        (("--since", "10m"), 0),
        (("--since", "2h"), 6),
        (("--until", "10m"), 6),
        (("--until", "2020-01-01"), 0),
        (("--topic", "no such"), 0),
    ],
)
def test_list_takes_filters(command, calls, options, number):
    bury(calls, "mail", "Boom", 3)
    bury(calls, "mail", "Bang", 1)
    bury(calls, "fax", "Boom", 2)

    assert command("dead", "list", *options, "--json").json["dead"] == number
    assert command("dead", "list", *options).code == 0


def test_list_of_nothing(command):
    assert command("dead", "list").out == "no dead letters\n"


def test_payload_is_shown_only_when_asked_for(command, calls):
    bury(calls, "mail", "Boom", 2)
    [event_id, _] = dead_ids(calls)
    silent = [
        command("dead", "list"),
        command("dead", "list", "--json"),
        command("dead", "show", event_id),
        command("dead", "show", event_id, "--json"),
        command("dead", "replay", "--topic", "mail", "--generation", 0, "--dry-run"),
        command("dead", "replay", "--all", "--generation", 0, "--dry-run", "--json"),
        command("status"),
        command("doctor"),
        command("doctor", "--json"),
    ]

    assert not any("SECRET" in result.out + result.err for result in silent)
    assert "SECRET-4711" in command("dead", "show", event_id, "--payload").out
    shown = command("dead", "show", event_id, "--payload", "--json").json
    assert (shown["payload"], shown["headers"]) == ({"card": "SECRET-4711"}, {"auth": "SECRET-4711"})


def test_show_tells_every_cycle(command, calls):
    event_id = calls.dead("mail", error="first\nline two \x1b[2J")
    calls.replay(event_id, 3, "ada")
    calls.fail(calls.claim("mail"), "second", terminal=True)

    out = command("dead", "show", event_id).out
    assert "\x1b" not in out
    assert "1 earlier cycle\n  1. died " in out
    assert "by ada" in out
    assert out.index("second") < out.index("line two")
    shown = command("dead", "show", event_id, "--json").json
    assert (shown["status"], shown["failure_history"][0]["replayed_by"]) == ("DEAD_LETTERED", "ada")


def test_unknown_event_is_one_line(command):
    result = command("dead", "show", uuid.uuid4())

    assert (result.code, result.err.count("\n")) == (1, 1)
    assert command("dead", "show", "nonsense").code == 2


# replay


def test_one_is_replayed_without_a_question(command, calls):
    bury(calls, "mail", "Boom", 2)
    calls.seen("w1", ["mail"])
    first, second = dead_ids(calls)

    result = command("dead", "replay", first, "--generation", 7, "--by", "ada")

    row = calls.row(first)
    assert (result.code, result.err) == (0, "")
    assert (row["status"], row["generation"], row["failure_history"][0]["replayed_by"]) == (
        "PENDING",
        7,
        "ada",
    )
    assert calls.status(second) == "DEAD_LETTERED"


def test_name_of_the_operator_has_a_default(command, calls, monkeypatch):
    monkeypatch.setenv("LOGNAME", "grace")
    bury(calls, "mail", "Boom", 1)
    calls.seen("w1", ["mail"])
    [event_id] = dead_ids(calls)
    command("dead", "replay", event_id, "--generation", 0)

    assert calls.row(event_id)["failure_history"][0]["replayed_by"] == f"grace@{os.uname().nodename}"


def test_what_is_not_dead_is_refused_and_nothing_changes(command, calls):
    bury(calls, "mail", "Boom", 1)
    alive = calls.enqueue("fax")
    [dead] = dead_ids(calls)
    result = command("dead", "replay", dead, alive, *QUIET)

    assert result.code == 1
    assert f"event {alive} is PENDING, not a dead letter; nothing was changed" in result.err
    assert calls.status(dead) == "DEAD_LETTERED"
    assert "does not exist" in command("dead", "replay", uuid.uuid4(), *QUIET).err


@pytest.mark.parametrize(
    "arguments",
    [
        ("dead", "replay", "--generation", 0),  # everything, by omission
        ("dead", "replay", "--topic", "mail"),  # which generation?
        ("dead", "replay", "--topic", "mail", "--all", "--generation", 0),
        ("dead", "replay", str(uuid.uuid4()), "--topic", "mail", "--generation", 0),
        ("dead", "replay", "--all", "--generation", -1),
        ("dead", "replay", "--all", "--generation", 0, "--rate", 0),
        ("dead", "replay", "--all", "--generation", 0),  # no terminal to ask on
        ("dead", "discard", "--all", "--reason", "why"),
        ("dead", "discard", "--reason", "why"),
        ("dead", "discard", "--all", "--yes"),  # why?
        ("dead",),
        ("prune",),
        ("pause", "--reason", "why"),
        ("pause", "mail", "--all", "--reason", "why"),
        ("pause", "mail"),
        ("resume",),
    ],
)
def test_wrong_usage_changes_nothing(command, calls, arguments):
    bury(calls, "mail", "Boom", 2)

    assert command(*arguments).code == 2
    assert statuses(calls) == {"DEAD_LETTERED": 2}
    assert command("status", "--json").json["pauses"] == []


def test_dry_run_shows_what_would_happen(command, calls):
    bury(calls, "mail", "Boom", 3, generation=1)
    bury(calls, "fax", "Bang", 1)
    calls.seen("w1", ["mail"])

    result = command("dead", "replay", "--all", "--generation", 2, "--dry-run", "--json")

    plan = {kind["topic"]: kind for kind in result.json["kinds"]}
    assert (plan["mail"]["events"], plan["mail"]["generations"], plan["mail"]["new_generation"]) == (
        3,
        [1],
        2,
    )
    assert plan["mail"]["what"] == "canary, then 2 at 100/s"
    assert result.json["warnings"] == [
        "no living dispatcher serves fax (generation 2): these events would wait, and so would a canary"
    ]
    assert statuses(calls) == {"DEAD_LETTERED": 3}
    assert "nothing was changed" in command("dead", "replay", "--all", "--generation", 2, "--dry-run").out


def test_nobody_serves_it_so_the_command_asks(command, calls):
    """Even for one event: it would only wait."""
    bury(calls, "mail", "Boom", 1)
    calls.call("dispatcher_seen", "w1", "host", 1, "0.1.0", ["mail"], [2], 0, False)
    [event_id] = dead_ids(calls)

    refused = command("dead", "replay", event_id, "--generation", 3)
    assert refused.code == 2
    assert "no living dispatcher serves mail (generation 3)" in refused.err
    served = command("dead", "replay", event_id, "--generation", 2)
    assert (served.code, served.err) == (0, "")


def test_paused_topic_is_a_warning(command, calls):
    bury(calls, "mail", "Boom", 1)
    calls.seen("w1", ["mail"])
    calls.pause("mail")

    assert (
        "topic mail is paused by operator: maintenance"
        in command("dead", "replay", "--all", "--dry-run", "--generation", 0).err
    )


def test_same_generation_is_kept(command, calls):
    bury(calls, "mail", "Boom", 2, generation=1)
    bury(calls, "mail", "Boom", 2, generation=5)
    command("dead", "replay", "--topic", "mail", "--same-generation", "--no-canary", "--yes")

    rows = calls.conn.execute("select generation, status from pulse.outbox order by 1").fetchall()
    assert [tuple(row.values()) for row in rows] == [(1, "PENDING")] * 2 + [(5, "PENDING")] * 2


def test_limit_takes_the_oldest(command, calls):
    bury(calls, "mail", "Boom", 5)
    ids = dead_ids(calls)
    command("dead", "replay", "--topic", "mail", "--limit", 2, "--no-canary", *QUIET)

    assert calls.statuses(*ids) == ["PENDING"] * 2 + ["DEAD_LETTERED"] * 3


def test_canary_that_nobody_runs_is_reported(command, calls):
    """The time-out of the canary: its kind stays where it is, and the message says why."""
    bury(calls, "mail", "Boom", 5)
    result = command("dead", "replay", "--topic", "mail", "--wait", 0, *QUIET, "--json")

    [kind] = result.json["kinds"]
    assert result.code == 1
    assert (kind["outcome"], kind["replayed"], kind["left"]) == ("canary undecided", 1, 4)
    assert "nobody has started it" in kind["why"]
    assert statuses(calls) == {"DEAD_LETTERED": 4, "PENDING": 1}


def test_canary_that_still_retries_is_reported(command, calls):
    bury(calls, "mail", "Boom", 2)
    with operations_as(command, calls) as operations:
        replay = careful(operations)

        def fail_once(_: float) -> None:
            replay.patience -= replay.patience
            if claim := calls.claim("mail", 1):
                calls.fail(claim, "Boom: it broke", delay=3600, failure={"error_class": "Boom"})
            replay.sleep = lambda _: None

        replay.sleep = fail_once
        replay.patience /= 120  # one second
        replay.run()

    [kind] = replay.kinds
    assert (kind.fate, kind.replayed) == ("canary undecided", 1)
    assert kind.why == "still retrying after 1 of 5 attempts: Boom: it broke"


def test_locked_row_is_passed_over(command, calls, connect):
    bury(calls, "mail", "Boom", 3)
    held = dead_ids(calls)[1]
    stranger = connect()
    stranger.execute("select from pulse.outbox where event_id = %s for update", (held,))

    result = command("dead", "replay", "--topic", "mail", "--no-canary", *QUIET)
    stranger.rollback()

    assert result.code == 1
    assert "1 were locked" in result.out
    assert dead_ids(calls) == [held]


@contextlib.contextmanager
def operations_as(command, calls):
    with connect(os.environ["PULSE_OUTBOX_DSN"]) as conn:
        yield Operations(conn)


def careful(operations: Operations, **options) -> Replay:
    letters = operations.dead_letters(Selection(), newest_first=False)
    return Replay(operations=operations, letters=letters, generation=0, by="ada", **options)


def test_interrupted_replay_harms_nothing(command, calls):
    """Ctrl-C in mid run: what was replayed is replayed, the rest is dead as before, and the command goes on later."""
    bury(calls, "mail", "Boom", 100)
    with operations_as(command, calls) as operations:
        looks = iter(range(3))

        def interrupted(_: float) -> None:
            if next(looks, None) is None:
                raise KeyboardInterrupt

        replay = careful(operations, canary=False, rate=50, sleep=interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay.run()
        done = statuses(calls)["PENDING"]

        assert 0 < done < 100
        assert (replay.replayed, replay.kinds[0].fate) == (done, "interrupted")
        again = careful(operations, canary=False, rate=10_000)
        again.run()

    assert again.replayed == 100 - done
    rows = calls.conn.execute(
        "select jsonb_array_length(failure_history) as cycles from pulse.outbox"
    ).fetchall()
    assert {row["cycles"] for row in rows} == {1}


def test_slow_canary_holds_up_no_other_kind(command, calls):
    """Four kinds are mended and the fifth has nobody who serves it: the four come back at once."""
    bury(calls, "mail", "Boom", 20)
    bury(calls, "fax", "Boom", 20)
    looks = iter(range(20))

    def only_mail_runs(_: float) -> None:
        calls.complete(calls.claim("mail", 100))
        if next(looks, None) is None:
            raise KeyboardInterrupt

    with operations_as(command, calls) as operations:
        replay = careful(operations, rate=10_000, sleep=only_mail_runs)
        with pytest.raises(KeyboardInterrupt):
            replay.run()

    assert {kind.kind.topic: (kind.fate, kind.replayed) for kind in replay.kinds} == {
        "mail": ("replayed", 20),
        "fax": ("interrupted", 1),
    }
    assert statuses(calls, "fax") == {"DEAD_LETTERED": 19, "PENDING": 1}


def test_one_request_replays_none_twice(command, calls):
    """What died again during the replay is not taken for one that is still to be replayed."""
    bury(calls, "mail", "Boom", 1)
    [event_id] = dead_ids(calls)
    request = uuid.uuid4()
    with operations_as(command, calls) as operations:
        assert operations.replay_many([event_id], generation=0, by="ada", request=request) == 1
        calls.fail(calls.claim("mail"), terminal=True)

        assert operations.replay_many([event_id], generation=0, by="ada", request=request) == 0
        assert operations.replay_many([event_id], generation=0, by="ada", request=uuid.uuid4()) == 1


# With a dispatcher that runs what is replayed


class CardDeclined(TerminalHandlerError):
    pass


async def as_process(operator_dsn: str, *arguments: object) -> Result:
    """Beside a dispatcher, which logs to the standard output of this process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pulse_outbox.cli", *map(str, arguments), "--dsn", operator_dsn,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


KIND = f"{CardDeclined.__module__}.{CardDeclined.__qualname__}"


async def test_canaries_keep_an_unfixed_kind_from_dying_again(calls, dsn, operator_dsn):
    """10,000 dead of five kinds, one not yet fixed: four come back whole, the fifth dies once more, not 2,000 times."""
    outbox = Outbox()
    for number in range(5):
        bury(calls, f"topic.{number}", KIND, 2000)

        @outbox.handler(f"topic.{number}")
        async def handle(event: Event) -> None:
            if event.topic == "topic.3":
                raise CardDeclined("still broken")

    async with dispatching(outbox, dsn):
        result = await as_process(
            operator_dsn, "dead", "replay", "--all", "--rate", 10_000, "--wait", 30, *QUIET, "--json"
        )
        wait_until_done = [
            f"select count(*) = 2000 as done from pulse.outbox where topic = 'topic.{n}' and status = 'COMPLETED'"
            for n in (0, 1, 2, 4)
        ]
        for query in wait_until_done:
            await asyncio.to_thread(
                wait_until, lambda q=query: calls.conn.execute(q).fetchone()["done"], within=30
            )

    fates = {
        kind["topic"]: (kind["outcome"], kind["replayed"], kind["died_again"])
        for kind in result.json["kinds"]
    }
    assert result.code == 1
    assert fates == {f"topic.{n}": ("replayed", 2000, 0) for n in (0, 1, 2, 4)} | {
        "topic.3": ("canary died", 1, 1)
    }
    cycles = calls.conn.execute(
        """select sum(jsonb_array_length(failure_history)) as cycles, count(*) as dead
             from pulse.outbox where topic = 'topic.3' and status = 'DEAD_LETTERED'"""
    ).fetchone()
    assert cycles == {"cycles": 1, "dead": 2000}


async def test_error_that_comes_back_stops_its_kind(calls, dsn, operator_dsn):
    """The canary lived, the bug is back: a handful dies, not the other 2,000. The other kind goes on."""
    outbox = Outbox()
    bury(calls, "mail", KIND, 2000)
    bury(calls, "fax", KIND, 50)
    lived: list[uuid.UUID] = []

    @outbox.handler("mail")
    async def mail(event: Event) -> None:
        if lived:
            raise CardDeclined("back again")
        lived.append(event.id)

    @outbox.handler("fax")
    async def fax(event: Event) -> None:
        pass

    async with dispatching(outbox, dsn):
        result = await as_process(
            operator_dsn, "dead", "replay", "--all", "--rate", 100, "--wait", 30, *QUIET, "--json"
        )

    kinds = {kind["topic"]: kind for kind in result.json["kinds"]}
    assert result.code == 1
    assert (kinds["mail"]["outcome"], kinds["fax"]["outcome"], kinds["fax"]["replayed"]) == (
        "came back",
        "replayed",
        50,
    )
    assert kinds["mail"]["replayed"] < 200
    assert kinds["mail"]["left"] > 1800


# On a terminal


def on_a_terminal(
    operator_dsn: str, answer: str, *arguments: str, ctrl_c_when: Callable[[], object] | None = None
) -> tuple[int, str]:
    """The command with a terminal for its questions; its exit code and what it wrote to standard output."""
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "pulse_outbox.cli", *arguments],
            stdin=slave, stderr=slave, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PULSE_OUTBOX_DSN": operator_dsn},
            # Its controlling terminal, which makes a signal of Ctrl-C.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  one system call, no lock
        )  # fmt: skip
        os.write(master, answer.encode())
        if ctrl_c_when is not None:
            wait_until(ctrl_c_when)
            os.write(master, b"\x03")
        out, _ = process.communicate(timeout=30)
        return process.returncode, out
    finally:
        os.close(slave)
        os.close(master)


def test_ctrl_c_says_how_far_it_came(calls, operator_dsn):
    """And the same command goes on from there."""
    bury(calls, "mail", "Boom", 300)
    replay = ["dead", "replay", "--all", "--same-generation", "--no-canary", "--rate"]

    code, out = on_a_terminal(
        operator_dsn, "y\n", *replay, "50", ctrl_c_when=lambda: statuses(calls)["PENDING"] > 5
    )
    left = statuses(calls)["DEAD_LETTERED"]
    assert code == 130
    assert 0 < left < 295
    assert "interrupted: not finished" in out
    assert f"{300 - left} replayed, {left} left dead; the same command goes on with them" in out

    code, out = on_a_terminal(operator_dsn, "y\n", *replay, "10000")
    assert (code, statuses(calls)) == (0, {"PENDING": 300})
    assert f"{left} replayed, 0 left dead" in out


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 3), ("\n", 1, 3)])
def test_many_are_changed_only_after_a_yes(calls, operator_dsn, answer, code, left):
    bury(calls, "mail", "Boom", 3)
    ended, out = on_a_terminal(
        operator_dsn, answer, "dead", "discard", "--topic", "mail", "--reason", "obsolete"
    )

    assert ended == code
    assert ("nothing was changed" in out) == (code == 1)
    assert statuses(calls)["DEAD_LETTERED"] == left


# discard


def test_discard_says_who_and_why(command, calls):
    bury(calls, "mail", "Boom", 3)
    calls.enqueue("fax")
    result = command("dead", "discard", "--all", "--reason", "obsolete", "--by", "ada", "--yes", "--json")

    assert (result.code, result.json["discarded"]) == (0, 3)
    rows = calls.conn.execute(
        "select failure_history -> -1 as cycle from pulse.outbox where topic = 'mail'"
    ).fetchall()
    assert {(row["cycle"]["discarded_by"], row["cycle"]["reason"]) for row in rows} == {("ada", "obsolete")}
    assert statuses(calls, "fax") == {"PENDING": 1}


def test_discard_by_id_takes_what_waits(command, calls):
    waiting = calls.enqueue("mail")
    running = calls.enqueue("fax")
    calls.claim("fax")

    assert command("dead", "discard", running, "--reason", "why").code == 1
    assert command("dead", "discard", waiting, "--reason", "why").code == 0
    assert calls.statuses(waiting, running) == ["DISCARDED", "RUNNING"]
    assert command("dead", "discard", waiting, "--reason", "why").code == 1


def test_discard_counts_what_it_discarded_although_one_is_gone(command, calls):
    """It can't be taken back, so nobody may be left in doubt about it."""
    bury(calls, "mail", "Boom", 3)
    first, second, third = dead_ids(calls)
    calls.conn.execute(
        f"""
        create function public.meanwhile() returns trigger language plpgsql as
          $$ begin delete from pulse.outbox where event_id = '{second}'; return null; end $$;
        create trigger meanwhile after update on pulse.outbox for each row
          when (new.status = 'DISCARDED') execute function public.meanwhile()
        """
    )

    result = command("dead", "discard", first, second, third, "--reason", "why", "--yes", "--json")

    assert (result.code, result.json["discarded"], result.json["left"]) == (1, 2, 1)


def test_discard_dry_run_changes_nothing(command, calls):
    bury(calls, "mail", "Boom", 3)

    assert command("dead", "discard", "--all", "--reason", "why", "--dry-run", "--json").json["events"] == 3
    assert statuses(calls) == {"DEAD_LETTERED": 3}


def test_hostile_names_are_data(command, calls):
    bury(calls, HOSTILE, HOSTILE.replace("\n", ""), 2)
    outputs = [
        command("dead", "list"),
        command("dead", "list", "--topic", HOSTILE),
        command("dead", "replay", "--topic", HOSTILE, "--generation", 0, "--dry-run"),
        command(
            "dead", "replay", "--topic", HOSTILE, "--limit", 1, "--generation", 0, "--by", HOSTILE, "--yes"
        ),
        command("dead", "discard", "--topic", HOSTILE, "--reason", HOSTILE, "--by", HOSTILE, "--yes"),
        command("dead", "show", dead_or_not(calls)),
    ]

    assert not {"\x1b", "\u202e"} & set("".join(result.out + result.err for result in outputs))
    assert sorted(statuses(calls, HOSTILE).items()) == [("DISCARDED", 1), ("PENDING", 1)]


def dead_or_not(calls) -> uuid.UUID:
    [row] = calls.conn.execute("select event_id from pulse.outbox where status = 'DISCARDED'").fetchall()
    event_id = row["event_id"]
    assert isinstance(event_id, uuid.UUID)
    return event_id


def test_rights_of_an_operator_are_enough_and_no_more(operator_dsn, calls):
    """The control to all tests above: this login can't write past the functions."""
    with psycopg.connect(operator_dsn) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("update pulse.outbox set status = 'PENDING'")
