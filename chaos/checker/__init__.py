"""The checker: a pure function from what was remembered to what was wrong with it.

Each rule is a function of its own, and the name of a violation. Read `lives` first: what is known of one event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.checker import claims, failures, keys, leases, one_event, operators, priorities, witnesses
from chaos.checker.lives import Violation, lives_of

if TYPE_CHECKING:
    from chaos.evidence import Evidence

__all__ = ["Violation", "check"]


def check(evidence: Evidence) -> list[Violation]:
    """Everything that is wrong, rule by rule."""
    lives, found = lives_of(evidence)
    found += witnesses.check_wishes(evidence, lives)
    for life in lives.values():
        found += one_event.check_steps(life)
        found += one_event.check_fence(life)
        found += one_event.check_results(life)
        found += one_event.check_timeout(life)
        found += one_event.check_budget(life)
        found += one_event.check_end(life)
        found += failures.check_failures(life)
    found += claims.check_due(lives.values())
    found += claims.check_held(evidence, lives.values())
    found += claims.check_backoff(lives.values())
    found += claims.check_generations(evidence, lives.values())
    found += claims.check_topics(evidence, lives.values())
    found += claims.check_company(lives.values())
    found += claims.check_concurrency(evidence)
    found += claims.check_handed(lives.values())
    found += priorities.check_priorities(evidence, lives.values())
    found += leases.check_tokens(lives.values())
    found += leases.check_pauses(evidence, lives.values())
    found += leases.check_leases(evidence, lives.values())
    found += leases.check_hold(evidence, lives.values())
    found += witnesses.check_rows(evidence, lives)
    found += keys.check_keys(evidence, lives.values())
    found += keys.check_turns(evidence, lives.values())
    found += witnesses.check_effects(evidence, lives)
    found += witnesses.check_alerts(evidence, lives)
    found += operators.check_acts(evidence, lives.values())
    found += operators.check_asked(evidence, lives.values())
    found += failures.check_histories(evidence, lives.values())
    found += [Violation("canary", "", f"a secret is in {place}") for place in evidence.canaries]
    found += [
        Violation("traceback", "", f"an error that nobody caught is in {log}") for log in evidence.tracebacks
    ]
    found += [
        Violation("stuck", "", f"{fault.values['who']} did not end when it was told to")
        for fault in evidence.faults
        if fault.kind == "stuck"
    ]
    if evidence.strays:
        found.append(Violation("alert", "", f"Sentry was told {evidence.strays} times of something else"))
    if not any(run.outcome == "ok" for run in evidence.runs):
        found.append(Violation("idle", "", "no handler has ended well: this run proves nothing"))
    if evidence.drained_in is None:
        found.append(Violation("drain", "", "the backlog did not drain in time after the faults had ended"))
    return found
