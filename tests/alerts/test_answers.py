"""What Sentry's answers mean, and how often a kind of death is told."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from pulse_outbox.alerts.paying import Pace
from pulse_outbox.alerts.sentry import Receipt, judge
from pulse_outbox.failures import DeadLetter

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, "accepted"),
        (202, "accepted"),
        (301, "failed"),
        (400, "refused"),
        (401, "failed"),  # the key: to be put right
        (403, "failed"),
        (404, "failed"),
        (408, "failed"),
        (413, "refused"),
        (422, "refused"),
        (429, "failed"),
        (500, "failed"),
        (502, "failed"),
        (503, "failed"),
    ],
)
def test_only_what_would_never_be_accepted_is_given_up(status, kind):
    assert judge(status, {}, NOW).kind == kind


@pytest.mark.parametrize(
    ("status", "headers", "pause"),
    [
        (200, {}, 0),
        (429, {}, 60),
        (429, {"retry-after": "7"}, 7),
        (429, {"retry-after": "Tue, 01 Jan 2030 12:00:30 GMT"}, 30),
        (429, {"retry-after": "Tue, 01 Jan 2030 11:00:00 GMT"}, 60),
        (429, {"retry-after": "soon"}, 60),
        (429, {"retry-after": "nan"}, 60),
        (429, {"retry-after": "1e99"}, 3600),
        (429, {"retry-after": "-5"}, 60),
        (503, {"retry-after": "9"}, 9),
        (500, {"retry-after": "9"}, 0),
        (429, {"x-sentry-rate-limits": "11:error:key", "retry-after": "99"}, 11),
        (200, {"x-sentry-rate-limits": "60:transaction:key, 2700:default;error:organization"}, 2700),
        (200, {"x-sentry-rate-limits": "5::organization"}, 5),
        (200, {"x-sentry-rate-limits": "60:transaction;span:key"}, 0),
        (200, {"x-sentry-rate-limits": "nonsense"}, 0),
    ],
)
def test_sentry_is_left_alone_for_as_long_as_it_asks(status, headers, pause):
    assert judge(status, headers, NOW).pause == pause


@pytest.mark.parametrize(
    ("rule", "count", "page"),
    [
        ("policy", 1, "a-job-died"),
        ("policy", 9, "a-job-died"),
        ("policy", 10, "many-jobs-died"),
        (None, 1, "a-job-died"),
        ("worker.died", 1, "a-poison-job"),
        ("lease.expired", 1000, "a-poison-job"),
    ],
)
def test_an_alert_names_a_page_that_is_there(rule, count, page):
    letter = DeadLetter(
        alert_id=UUID(int=1),
        topic="mail",
        error_class="Boom",
        count=count,
        event_id=UUID(int=2),
        source=None,
        target=None,
        handler_name=None,
        last_error=None,
        attempts=1,
        verdict=None,
        rule=rule,
        first_failed_at=None,
        dead_lettered_at=NOW,
        last_dead_lettered_at=NOW,
    )

    assert letter.runbook == f"runbooks/{page}.md"
    assert (Path(__file__).parents[2] / letter.runbook).is_file()


def test_a_receipt_is_a_value():
    assert judge(503, {}, NOW) == Receipt("failed", why="status 503")


def test_deaths_of_a_kind_gather_for_longer_while_they_go_on():
    """The first is told at once, the next after 1, 2, 4 … 15 seconds, and another kind at once."""
    pace, kind = Pace(), ("mail", "Boom")
    now, waited = 100.0, []
    for _ in range(7):
        assert pace.quiet(now) == []
        pace.alerted(kind, now)
        waited.append(pace.until_next(now))
        assert pace.quiet(now + waited[-1] - 0.01) == [kind]
        now += waited[-1]

    assert waited == [1, 2, 4, 8, 15, 15, 15]
    assert pace.quiet(now + 15) == []
    pace.alerted(kind, now + 15)
    assert pace.until_next(now + 15) == 1, "it had been quiet for long enough to be news again"
    assert Pace().until_next(0) == float("inf")
