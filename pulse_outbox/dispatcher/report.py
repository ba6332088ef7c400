"""What is said when a result has been stored: the log line, the count, and to whoever has to act on it."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, assert_never

from pulse_outbox.dispatcher.jobs import Completed, Failed, Lapsed, Over, Released, Snoozed, all_completed
from pulse_outbox.dispatcher.running import job_fields
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.claims import Claim
    from pulse_outbox.dispatcher.jobs import Job, Outcome
    from pulse_outbox.dispatcher.sentry import Sentry
    from pulse_outbox.dispatcher.state import Tally, Throughput
    from pulse_outbox.store import Answer, Reaped

# Over a whole batch, quicker than an expression.
_topic_of, _ordering_key_of = attrgetter("topic"), attrgetter("ordering_key")


class Report:
    """Quiet while all is well: a completed job is only counted.

    *died* is called for every dead letter, *due_in* with the seconds after which an event can run again.
    """

    def __init__(
        self,
        *,
        tally: Tally,
        throughput: Throughput,
        sentry: Sentry | None,
        died: Callable[[], None],
        due_in: Callable[[float], None],
    ) -> None:
        self._tally = tally
        self._throughput = throughput
        self._sentry = sentry
        self._died = died
        self._due_in = due_in

    def settled(self, outcomes: Sequence[Outcome], answers: Mapping[UUID, Answer]) -> None:
        """Results are stored, or refused."""
        if not answers and all_completed(outcomes):
            self._completed([outcome.job.claim for outcome in outcomes])
            return
        turn_given = False
        for outcome in outcomes:
            self._settled(outcome, answers.get(outcome.job.claim.event_id) if answers else None)
            turn_given = turn_given or outcome.job.claim.ordering_key is not None
        if turn_given:
            self._due_in(0)  # the next event of its key can run

    def _completed(self, claims: Sequence[Claim]) -> None:
        """Counted together: nearly every write is about nothing else."""
        self._tally.completed += len(claims)
        for topic, number in Counter(map(_topic_of, claims)).items():
            self._throughput.completed[topic] += number
        if any(map(_ordering_key_of, claims)):
            self._due_in(0)  # the next event of its key can run

    def _settled(self, outcome: Outcome, answer: Answer | None) -> None:
        if answer == "lost" or (isinstance(outcome, Over) and outcome.lost):
            self.lost(outcome.job, result=type(outcome).__name__.lower())
            return
        match outcome:
            case Completed() | Over():
                self._tally.completed += 1
                self._throughput.completed[outcome.job.claim.topic] += 1
            case Failed():
                self._failed(outcome, died=answer == "DEAD_LETTERED")
            case Snoozed():
                self._tally.snoozed += 1
                delay = outcome.delay.total_seconds()
                log.info("outbox.snoozed", **job_fields(outcome.job), delay=delay, reason=outcome.reason)
                self._due_in(delay)
            case Released():
                self._tally.released += 1
                self._due_in(0)
            case Lapsed():
                self._lapsed(outcome, died=answer == "DEAD_LETTERED")
            case _:
                assert_never(outcome)

    def lost(self, job: Job, *, result: str) -> None:
        """The lease is somebody else's by now, and so is the event."""
        self._tally.lost += 1
        log.warning("outbox.lease_lost", **job_fields(job), result=result)

    def reaped(self, events: Sequence[Reaped]) -> None:
        """Leases that had run out, of whichever dispatcher."""
        for event in events:
            known = {
                "event_id": str(event.event_id),
                "topic": event.topic,
                "max_attempts": event.max_attempts,
            }
            log.warning(
                "outbox.reaped",
                **known,
                status=event.answer,
                attempts=event.attempts,
                lapses=event.lapses,
                worker=event.worker,
            )
            if event.answer == "DEAD_LETTERED":
                why = {"error": event.last_error, "verdict": "transient", "rule": "lease.expired"}
                self._dead({**known, "attempt": event.attempts, **why})

    def _failed(self, outcome: Failed, *, died: bool) -> None:
        fields = {
            **job_fields(outcome.job),
            "error": outcome.error,
            "verdict": outcome.failure.get("verdict"),
            "rule": outcome.failure.get("rule"),
        }
        if self._sentry is not None:
            self._sentry.failed_attempt(fields)
        if died:
            self._dead(fields)
        else:
            self._tally.retried += 1
            delay = outcome.delay.total_seconds()
            log.warning("outbox.failed", **fields, delay=round(delay, 3))
            self._due_in(delay)

    def _lapsed(self, outcome: Lapsed, *, died: bool) -> None:
        fields = {**job_fields(outcome.job), "error": outcome.error, "rule": "worker.died"}
        log.warning("outbox.lapsed", **fields, status="DEAD_LETTERED" if died else "RETRYING")
        if died:
            self._dead({**fields, "verdict": "transient"})
        self._due_in(0)

    def _dead(self, fields: dict[str, Any]) -> None:
        self._tally.dead += 1
        log.error("outbox.dead_lettered", **fields)
        self._died()
