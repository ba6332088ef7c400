"""The questions that are put to the model, and the mistakes that it must find.

The bounds are for the tests: the whole takes a few seconds. `python -m tests.explorer --large` has more bad luck in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.explorer.database import Rules, Scenario

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="lost answers", room=1, faults=2),
        Scenario(name="two in one worker", faults=1, gives_back=True),
        Scenario(name="a budget of one", budgets=(1, 2), ends=("ok", "kill"), faults=1),
        Scenario(name="a job that kills", ends=("kill",), faults=1, late=False),
        Scenario(name="one key", key="hold", ends=("ok", "bad"), room=1, faults=1, requests=1, discards=True),
        Scenario(
            name="one key, the dead step aside", key="skip", ends=("bad",), room=1, faults=1, requests=1
        ),
        Scenario(
            name="one replay after the other",
            jobs=1,
            budgets=(1, 1),
            ends=("bad", "ok"),
            room=1,
            faults=2,
            requests=2,
        ),
        Scenario(
            name="alerts and replays", jobs=1, ends=("failed",), room=1, faults=1, alerts=True, requests=1
        ),
        Scenario(
            name="two dead of a kind",
            budgets=(1, 1),
            ends=("bad",),
            other_ends=("bad",),
            room=1,
            faults=1,
            late=False,
            alerts=True,
        ),
        Scenario(name="outages", jobs=1, ends=("ok",), room=1, faults=1, late=False, clock=True, outages=1),
    )
}

LARGE = {
    name: replace(scenario, faults=scenario.faults + 1, late=True, gives_back=True)
    for name, scenario in SCENARIOS.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A product with one mistake, and the question that shows it."""

    rules: Rules
    scenario: str


VARIANTS = {
    "no fence": Variant(rules=Rules(fence="nothing"), scenario="lost answers"),
    "attempts as the fence": Variant(rules=Rules(fence="attempts"), scenario="one replay after the other"),
    "a claim that is repeated takes other rows": Variant(
        rules=Rules(claim_finds_its_rows=False), scenario="two in one worker"
    ),
    "a claim may arrive after its repetition": Variant(
        rules=Rules(late_claims_take=True), scenario="two in one worker"
    ),
    "no read-back": Variant(rules=Rules(read_back=False), scenario="lost answers"),
    "a lapse in company spends the budget": Variant(rules=Rules(refund="never"), scenario="a job that kills"),
    "a lapse alone is given back": Variant(rules=Rules(refund="always"), scenario="a job that kills"),
    "release gives back two attempts": Variant(rules=Rules(release_refunds=2), scenario="two in one worker"),
    "release gives nothing back": Variant(rules=Rules(release_refunds=0), scenario="two in one worker"),
    "a budget of one is given back": Variant(rules=Rules(once_lapses=True), scenario="a budget of one"),
    "a budget of one is claimed ahead": Variant(
        rules=Rules(once_claimed_ahead=True), scenario="a budget of one"
    ),
    "the budget is off by one": Variant(rules=Rules(budget_off_by=1), scenario="lost answers"),
    "a claim looks first and takes later": Variant(
        rules=Rules(claim="two steps"), scenario="two in one worker"
    ),
    "a claim takes too many": Variant(rules=Rules(claim="too many"), scenario="lost answers"),
    "a heartbeat revives what was reaped": Variant(
        rules=Rules(heartbeat_revives=True, reap_keeps_token=True), scenario="outages"
    ),
    "the watchdog does not hold off": Variant(rules=Rules(hold_off=False), scenario="outages"),
    "keys do not wait": Variant(rules=Rules(keys_wait=False), scenario="one key"),
    "the end of a turn unparks nobody": Variant(rules=Rules(unpark=False), scenario="one key"),
    "replay of what is not dead": Variant(
        rules=Rules(replay_checks=False), scenario="one replay after the other"
    ),
    "replay does not know its own request": Variant(
        rules=Rules(replay_knows_its_request="no"), scenario="one replay after the other"
    ),
    "replay knows only the last request": Variant(
        rules=Rules(replay_knows_its_request="last entry"), scenario="one replay after the other"
    ),
    "replay writes no history": Variant(
        rules=Rules(replay_appends=False), scenario="one replay after the other"
    ),
    "alerts only in memory": Variant(rules=Rules(alert="in memory"), scenario="alerts and replays"),
    "an alert is paid before it is sent": Variant(
        rules=Rules(alert="paid first"), scenario="alerts and replays"
    ),
    "an alert gets a new id each time": Variant(
        rules=Rules(alert="new id each time"), scenario="alerts and replays"
    ),
}
