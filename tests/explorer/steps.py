"""Everything that may happen next: the steps of workers, the watchdog, the operator, the network and bad luck."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from tests.explorer.database import Database, Rules, Scenario, Transition, job
from tests.explorer.states import (
    COMPLETED,
    DEAD,
    ENDED,
    GAP,
    IDLE,
    MANY,
    NOBODY,
    RUNNING,
    WAITING,
    Call,
    Held,
    Operator,
    Row,
    State,
    Worker,
)

VERBS = {"ok": "complete", "failed": "fail", "bad": "die", "unstarted": "release", "died": "lapse"}
NETWORK = ("", "its answer is lost", "it is held back")


class Step(NamedTuple):
    """One thing that happened. `log`: what it asked of the database."""

    words: tuple[object, ...]
    state: State
    wrong: str
    log: list[Transition]


def first_state(scenario: Scenario) -> State:
    other = Row() if scenario.jobs == 2 else Row(status=COMPLETED)
    return State(
        rows=(Row(), other),
        workers=(IDLE, IDLE),
        operator=Operator(),
        faults=scenario.faults,
        outages=scenario.outages,
    )


class Steps:
    """The steps of one scenario under one set of rules."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario = scenario
        self.rules = rules

    def after(self, state: State) -> Iterator[Step]:
        for who in range(len(state.workers)):
            yield from self.of_worker(state, who)
        if not state.down:
            yield from self.of_watchdog(state)
            yield from self.of_operator(state)
        if self.scenario.clock:
            yield from self.of_time(state)

    def step(
        self,
        state: State,
        database: Database | None,
        words: tuple[object, ...],
        who: int = -1,
        worker: Worker | None = None,
        taken: tuple[int, ...] | list[int] = (),
        **changes: object,
    ) -> Step:
        """The state after it: *worker* has this memory now, claims of what was *taken* are out of date."""
        workers = state.workers
        if taken:
            workers = tuple(_outdated(w, taken) for w in workers)
        if worker is not None:
            workers = (worker, workers[1]) if who == 0 else (workers[0], worker)
        rows = tuple(database.rows) if database else state.rows
        after = state._replace(rows=rows, workers=workers, **changes)  # type: ignore[arg-type]
        wrong = (database.wrong if database else "") or self.judge(after)
        return Step(words, after, wrong, database.log if database else [])

    def database(self, state: State) -> Database:
        return Database(state, self.scenario, self.rules)

    # What must hold in every state

    def judge(self, state: State) -> str:
        for number, row in enumerate(state.rows):
            if row.status in WAITING and row.attempts != row.spent:
                return f"{job(number)} waits with {row.attempts} attempts, of which {row.spent} were spent"
            if row.status == RUNNING and row.attempts != row.spent + 1:
                return f"{job(number)} runs as attempt {row.attempts} after {row.spent} that were spent"
            if row.status == DEAD and row.paid and not row.told:
                return f"the alert of {job(number)} is paid, and nobody was told"
            if row.parked and self.has_its_turn(state, number):
                return f"{job(number)} waits for its turn for ever"
        for worker in state.workers if 1 in self.scenario.budgets else ():
            own = [held for held in worker.held if held.lapses == 0]
            running = sum(held.stage == "running" for held in own)
            once = sum(
                held.stage == "waiting" and self.scenario.budgets[held.row] == 1 and not held.stale
                for held in own
            )
            if once and once + running > self.scenario.slots:
                return "a job that must not start twice waits in memory behind another"
        return ""

    def has_its_turn(self, state: State, number: int) -> bool:
        return not self.database(state).blocked(number)

    # Workers

    def of_worker(self, state: State, who: int) -> Iterator[Step]:
        worker = state.workers[who]
        if who and worker == IDLE == state.workers[0]:
            return  # whatever it could do, the other one can
        for late in range(len(worker.late)):
            if not state.down:
                yield from self.arrive(state, who, worker, late)
        if worker.stalled == "stalled":
            yield self.step(state, None, (who, "goes on"), who, worker._replace(stalled="late"))
            return
        if not state.down:
            yield from self.claim(state, who, worker)
            yield from self.settle(state, who, worker)
            if self.scenario.alerts:
                yield from self.alert(state, who, worker)
            if self.scenario.clock and not worker.beaten:
                yield from self.beat(state, who, worker)
        yield from self.run(state, who, worker)
        if state.faults and self.scenario.crashes and worker._replace(late=()) != IDLE:
            yield self.step(state, None, (who, "crashes"), who, crashed(worker), faults=state.faults - 1)
        if state.faults and self.scenario.clock and worker.held:
            yield self.step(
                state,
                None,
                (who, "is stopped"),
                who,
                worker._replace(stalled="stalled"),
                faults=state.faults - 1,
            )

    def claim(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        if self.rules.claim == "two steps":
            yield from self.claim_in_two_steps(state, who, worker)
            return
        if worker.asking:
            yield from self.send_claim(state, who, worker, *worker.asking, fresh=False)
            return
        for lapses in (0, 1, MANY):
            if self.room(worker, lapses) and self.database(state).due(lapses):
                yield from self.send_claim(
                    state._replace(minted=state.minted + 1), who, worker, state.minted + 1, lapses, fresh=True
                )

    def room(self, worker: Worker, lapses: int) -> int:
        """How many it asks for."""
        if lapses == MANY and any(held.lapses == MANY for held in worker.held):
            return 0
        return max(0, min(self.scenario.room - len(worker.held), 1 if lapses == MANY else 2))

    def free(self, worker: Worker, lapses: int) -> int:
        """How many of them could start at once."""
        held = sum(held.lapses == lapses and held.stage in ("waiting", "running") for held in worker.held)
        return max(0, (2 if lapses == 1 else self.scenario.slots) - held)

    def choices(self, state: State, lapses: int) -> list[tuple[int, ...]]:
        """Which rows a claim may find due; another's backoff may not be over."""
        due = self.database(state).due(lapses)
        sizes = (1,) if lapses == MANY else (1, 2)
        return [chosen for size in sizes for chosen in combinations(due, size)]

    def send_claim(
        self, state: State, who: int, worker: Worker, token: int, lapses: int, *, fresh: bool
    ) -> Iterator[Step]:
        limit, slots = self.room(worker, lapses), self.free(worker, lapses)
        choices: list[tuple[int, ...]] = self.choices(state, lapses)
        if not fresh:
            choices.append(())  # it may find nothing, or what it took before
        again = "" if fresh else "again "
        for considered in choices:
            for network in NETWORK[: 1 + (state.faults > 0)]:
                database = self.database(state)
                rows, taken = database.claim(token, lapses, considered, limit, slots, fresh)
                words = (who, f"{again}claims {names(rows)}", network)
                answered = outdate(passed(worker, token), taken)
                if network:
                    asking = answered._replace(asking=(token, lapses))
                    yield self.step(state, database, words, who, asking, taken, faults=state.faults - 1)
                    continue
                running = {
                    n for n, row in enumerate(database.rows) if row.status == RUNNING and row.token == token
                }
                if running - set(rows):
                    database.say(
                        f"{names(running - set(rows))} runs under a token whose claimer was not told of it"
                    )
                held = [self.held(database, number, token, lapses) for number in rows]
                yield self.step(
                    state, database, words, who,
                    answered._replace(asking=None, held=tuple(sorted((*answered.held, *held)))), taken,
                )  # fmt: skip
        if state.faults and self.scenario.late and fresh:
            call = Call("claim", token=token, lapses=lapses)
            yield self.step(
                state,
                None,
                (who, "claims", NETWORK[2]),
                who,
                worker._replace(asking=(token, lapses), late=(*worker.late, call)),
                faults=state.faults - 1,
            )

    def held(self, database: Database, number: int, token: int, lapses: int) -> Held:
        attempts = database.rows[number].attempts if self.rules.fence == "attempts" else 0
        return Held(number, "waiting", lapses, attempts, False, token)

    def claim_in_two_steps(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        """What a subquery without locks does: it looks, and then takes what it saw."""
        if worker.picked:
            token = state.minted + 1
            database = self.database(state)
            for number in worker.picked:
                database.take(number, token)
            held = [self.held(database, number, token, 0) for number in worker.picked]
            yield self.step(
                state._replace(minted=token), database, (who, f"takes {names(worker.picked)}"), who,
                worker._replace(picked=(), held=tuple(sorted((*worker.held, *held)))), worker.picked,
            )  # fmt: skip
        elif self.room(worker, 0) == 2:
            for picked in self.choices(state, 0):
                yield self.step(
                    state,
                    None,
                    (who, f"sees that {names(picked)} is due"),
                    who,
                    worker._replace(picked=picked),
                )

    def run(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        """Handlers start, end, and kill."""
        for place, held in enumerate(worker.held):
            if held.stage == "waiting":
                if self.may_start(worker, held):
                    row = state.rows[held.row]
                    step = self.step(
                        state,
                        None,
                        (who, f"starts {job(held.row)}"),
                        who,
                        with_stage(worker, place, "running"),
                    )
                    if row.token == held.token and row.status == COMPLETED:
                        step = step._replace(
                            wrong=f"{job(held.row)} is started again by the one who completed it"
                        )
                    yield step
                if self.scenario.gives_back:
                    yield self.step(
                        state,
                        None,
                        (who, f"gives {job(held.row)} back"),
                        who,
                        with_stage(worker, place, "unstarted"),
                    )
            elif held.stage == "running":
                for end in self.scenario.other_ends if held.row else self.scenario.ends:
                    if end == "kill":
                        after = killed(worker, held)
                        whom = "its worker" if held.lapses == 0 else "its child process"
                        yield self.step(state, None, (who, f"has {job(held.row)} kill {whom}"), who, after)
                    else:
                        yield self.step(
                            state,
                            None,
                            (who, f"ends {job(held.row)}: {end}"),
                            who,
                            with_stage(worker, place, end),
                        )

    def may_start(self, worker: Worker, held: Held) -> bool:
        if held.lapses:
            return True  # in a child
        own = [other for other in worker.held if other.lapses == 0]
        if sum(other.stage == "running" for other in own) >= self.scenario.slots:
            return False
        # Who must not start twice does not wait behind others.
        budgets = self.scenario.budgets
        return budgets[held.row] == 1 or not any(
            other.stage == "waiting" and budgets[other.row] == 1 for other in own
        )

    def settle(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        for place, held in enumerate(worker.held):
            verb = VERBS.get(held.stage)
            if verb is None:
                continue
            call = Call(verb, held.row, 0, held.attempts, held.stale, held.token)
            for network in NETWORK[: 1 + (state.faults > 0)]:
                database = self.database(state)
                answer = database.settle(call)
                if network:
                    after, faults = worker, state.faults - 1
                else:
                    after, faults = self.answered(state, worker, place, held, verb, answer), state.faults
                words = (
                    who,
                    f"stores {job(held.row)}: {verb}",
                    network or (answer if answer == "lost" else ""),
                )
                yield self.step(state, database, words, who, after, faults=faults)
            if state.faults and self.scenario.late:
                yield self.step(
                    state, None, (who, f"stores {job(held.row)}: {verb}", NETWORK[2]), who,
                    worker._replace(late=tuple(sorted((*worker.late, call)))), faults=state.faults - 1,
                )  # fmt: skip

    def answered(
        self, state: State, worker: Worker, place: int, held: Held, verb: str, answer: str
    ) -> Worker:
        """Its memory after the answer."""
        if answer == "lost" and not self.rules.read_back and verb == "complete":
            return with_stage(worker, place, "waiting")  # so it runs the job again
        after = worker._replace(held=worker.held[:place] + worker.held[place + 1 :])
        row = state.rows[held.row]
        spent = verb == "die" or row.attempts >= self.scenario.budgets[held.row]
        if self.rules.alert == "in memory" and answer == "done" and verb in ("fail", "die") and spent:
            after = after._replace(alert=(-1 - held.row, False))
        return after

    def arrive(self, state: State, who: int, worker: Worker, late: int) -> Iterator[Step]:
        """A call that was held back is executed at last."""
        call = worker.late[late]
        worker = worker._replace(late=worker.late[:late] + worker.late[late + 1 :])
        if call.verb != "claim":
            database = self.database(state)
            if call.verb == "pay":
                database.pay_alert(call.token)
            else:
                database.settle(call)
            yield self.step(state, database, (who, f"has its late {call.verb} arrive"), who, worker)
            return
        for considered in self.choices(state, call.lapses):
            database = self.database(state)
            limit, slots = self.room(worker, call.lapses), self.free(worker, call.lapses)
            rows, taken = database.claim(call.token, call.lapses, considered, limit, slots, True, call.stale)
            if taken and (worker.asking is None or worker.asking[0] != call.token):
                database.say(f"{names(taken)} runs under a token that nobody asks with any more")
            yield self.step(
                state,
                database,
                (who, f"has its late claim arrive: {names(rows)}"),
                who,
                outdate(worker, taken),
                taken,
            )

    # Alerts

    def alert(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        if worker.alert is None:
            if self.rules.alert == "in memory":
                return
            for number, row in enumerate(state.rows):
                if row.status == DEAD and not row.paid:
                    database = self.database(state)
                    alert = database.next_alert(number, state.minted + 1)
                    yield self.step(
                        state._replace(minted=max(state.minted, alert)), database,
                        (who, f"is lent the alert of {job(number)}"), who, worker._replace(alert=(alert, False)),
                    )  # fmt: skip
            return
        alert, sent = worker.alert
        if not sent:
            database = self.database(state)
            for number, row in enumerate(state.rows):
                if row.status == DEAD and row.alert == alert:
                    if row.told not in (NOBODY, alert):
                        database.say(f"the death of {job(number)} has two alerts")
                    database.rows[number] = row._replace(told=alert)
                elif self.rules.alert == "in memory" and row.status == DEAD:
                    database.rows[number] = row._replace(told=alert, alert=alert)
            yield self.step(
                state, database, (who, "sends the alert"), who, worker._replace(alert=(alert, True))
            )
            yield self.step(state, None, (who, "finds Sentry down"), who, worker._replace(alert=None))
            return
        for network in NETWORK[: 1 + (state.faults > 0)]:
            database = self.database(state)
            database.pay_alert(alert)
            after = worker if network else worker._replace(alert=None)
            yield self.step(
                state,
                database,
                (who, "pays the alert", network),
                who,
                after,
                faults=state.faults - bool(network),
            )
        if state.faults and self.scenario.late:
            call = Call("pay", token=alert)
            yield self.step(
                state, None, (who, "pays the alert", NETWORK[2]), who,
                worker._replace(late=tuple(sorted((*worker.late, call)))), faults=state.faults - 1,
            )  # fmt: skip

    # The watchdog and time

    def of_watchdog(self, state: State) -> Iterator[Step]:
        if not self.scenario.clock:
            for number, row in enumerate(state.rows):
                if row.status != RUNNING:
                    continue
                abandoned = not any(_has(worker, number, row.token) for worker in state.workers)
                if abandoned or state.faults:
                    database = self.database(state)
                    database.reap([number])
                    words = f"reaps {job(number)}" + (
                        "" if abandoned else ", whose holder lives and was not heard"
                    )
                    yield self.step(
                        state, database, ("watchdog", words), faults=state.faults - (not abandoned)
                    )
            return
        lapsed = [n for n, row in enumerate(state.rows) if row.status == RUNNING and row.lease == 0]
        database = self.database(state)
        reaped, hold = database.reap(lapsed, state.swept, state.hold)
        words = f"reaps {names(reaped)}" if reaped else "sweeps" + (", and holds off" if hold else "")
        for number in reaped:
            for worker in state.workers:
                if _has(worker, number, state.rows[number].token) and not worker.stalled:
                    database.say(f"the watchdog takes {job(number)} from a worker that lives")
        yield self.step(state, database, ("watchdog", words), swept=0, hold=hold)

    def beat(self, state: State, who: int, worker: Worker) -> Iterator[Step]:
        calls = [Call("beat", h.row, 0, h.attempts, h.stale, h.token) for h in worker.held]
        database = self.database(state)
        answers = [database.settle(call) for call in calls]
        kept = tuple(
            held
            for held, call in zip(worker.held, calls, strict=True)
            if database.holds(call) or held.stage != "waiting"
        )
        lost = "" if len(kept) == len(answers) else "something is lost"
        yield self.step(
            state, database, (who, "beats", lost), who, worker._replace(held=kept, beaten=True, stalled="")
        )
        if state.faults and self.scenario.late and calls:
            yield self.step(
                state, None, (who, "beats", NETWORK[2]), who,
                worker._replace(late=tuple(sorted((*worker.late, *calls)))), faults=state.faults - 1,
            )  # fmt: skip

    def of_time(self, state: State) -> Iterator[Step]:
        """A tick comes when every living worker has its answers and has beaten, or when the database is away."""
        if state.down:
            yield self.step(state, None, ("database", "is back"), down=False)
        elif state.outages:
            yield self.step(state, None, ("database", "goes away"), down=True, outages=state.outages - 1)
        ready = all(
            worker.stalled == "stalled" or (worker.beaten and worker.asking is None) or worker == IDLE
            for worker in state.workers
        )
        if state.down or ready:
            rows = tuple(row._replace(lease=row.lease - 1) if row.lease else row for row in state.rows)
            workers = tuple(worker._replace(beaten=False) for worker in state.workers)
            later = state._replace(
                rows=rows,
                workers=workers,
                swept=min(GAP, state.swept + 1),
                hold=max(0, state.hold - 1),
            )
            yield self.step(later, None, ("time", "passes"))

    # The operator

    def of_operator(self, state: State) -> Iterator[Step]:
        operator = state.operator
        for place, late in enumerate(operator.late):
            database = self.database(state)
            database.operate(*late)
            rest = operator.late[:place] + operator.late[place + 1 :]
            yield self.step(
                state, database, ("operator", f"has a late {late[0]} of {job(late[1])} arrive"),
                operator=operator._replace(late=rest),
            )  # fmt: skip
        if operator.asking:
            calls = [operator.asking]
        elif operator.requests < self.scenario.requests:
            request = operator.requests + 1
            verbs = ["replay", "discard"] if self.scenario.discards else ["replay"]
            calls = [(verb, number, request) for verb in verbs for number in range(self.scenario.jobs)]
            operator = operator._replace(requests=request)
        else:
            return
        for call in calls:
            verb, number, _ = call
            again = "again " if state.operator.asking else ""
            # The others are refused as well; one kind of refusal is enough.
            worth_asking = (DEAD, COMPLETED) if verb == "replay" else (DEAD, *WAITING)
            if not again and state.rows[number].status not in worth_asking:
                continue
            for network in NETWORK[: 1 + (state.faults > 0)]:
                database = self.database(state)
                database.operate(*call)
                after = operator._replace(asking=call if network else None)
                yield self.step(
                    state, database, ("operator", f"{again}asks to {verb} {job(number)}", network),
                    operator=after, faults=state.faults - bool(network),
                )  # fmt: skip
            if state.faults and self.scenario.late:
                after = operator._replace(asking=call, late=(*operator.late, call))
                yield self.step(
                    state, None, ("operator", f"asks to {verb} {job(number)}", NETWORK[2]),
                    operator=after, faults=state.faults - 1,
                )  # fmt: skip


def is_good_end(state: State, scenario: Scenario) -> bool:
    """All is done, or waits behind a dead letter that holds its key; and whoever had to be told was told."""
    one, two = state.rows
    told = all(row.status != DEAD or bool(row.told) for row in state.rows) or not scenario.alerts
    held_up = scenario.key == "hold" and one.status == DEAD and two.status in WAITING
    return told and one.status in ENDED and (two.status in ENDED or held_up)


# Memory


def with_stage(worker: Worker, place: int, stage: str) -> Worker:
    held = list(worker.held)
    held[place] = held[place]._replace(stage=stage)
    return worker._replace(held=tuple(sorted(held)))


def crashed(worker: Worker) -> Worker:
    """Nothing is remembered. A claim of its that is still under way is as good as one made just before."""
    return IDLE._replace(late=tuple(call for call in worker.late if call.verb != "claim"))


def killed(worker: Worker, by: Held) -> Worker:
    """By a job: its worker ends, or its child, whose parent reports what was running in it."""
    if by.lapses == 0:
        return crashed(worker)
    return worker._replace(
        held=tuple(
            sorted(
                held._replace(stage="died" if held.stage == "running" else "unstarted")
                if held.lapses == by.lapses and held.stage in ("running", "waiting")
                else held
                for held in worker.held
            )
        )
    )


def passed(worker: Worker, token: int) -> Worker:
    """A claim was executed again: a try of it that is still under way comes too late."""
    if not worker.late:
        return worker
    late = (
        call._replace(stale=True) if call.verb == "claim" and call.token == token else call
        for call in worker.late
    )
    return worker._replace(late=tuple(sorted(late)))


def outdate(worker: Worker, taken: list[int] | tuple[int, ...]) -> Worker:
    return _outdated(worker, taken) if taken else worker


def _outdated(worker: Worker, taken: list[int] | tuple[int, ...]) -> Worker:
    """The rows have been claimed: whatever it knows of them is history."""
    if not worker.held and not worker.late:
        return worker
    return worker._replace(
        held=tuple(sorted(h._replace(stale=True) if h.row in taken else h for h in worker.held)),
        late=tuple(sorted(c._replace(stale=True) if c.row in taken else c for c in worker.late)),
    )


def _has(worker: Worker, number: int, token: int) -> bool:
    """It holds the present claim of the row, or asks for it."""
    if worker.asking is not None and worker.asking[0] == token:
        return True
    return any(held.row == number and not held.stale for held in worker.held)


def names(numbers: list[int] | tuple[int, ...] | set[int]) -> str:
    return " and ".join(job(number) for number in sorted(numbers)) or "nothing"
