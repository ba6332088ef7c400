"""The targets as data: each is measured against the right one, and a missing measurement is not a success."""

from benchmarks.report import report, target_row, targets_table
from benchmarks.targets import TARGETS, Target, judge, own
from tests.benchmarks.measured import results_of


def judged(results, text):
    [judgement] = [one for one in judge(results) if one.target.text.startswith(text)]
    return judgement


def test_drain_is_measured_against_the_fastest_that_fits():
    """pgque is faster but acknowledges whole batches; Node counts only where any language does."""
    results = results_of(
        ("drain", "pulse-outbox", "pulse_outbox", 1, {"rate": 40_000.0}),
        ("drain", "pgqueuer", "pgqueuer", 1, {"rate": 10_000.0}),
        ("drain", "pg-boss", "pg_boss", 1, {"rate": 25_000.0}),
        ("drain", "pgque-py", "pgque", 1, {"rate": 60_000.0}),
        ("drain", "pure SQL, ours", "pulse_outbox", 1, {"rate": 50_000.0}),
    )

    python = judged(results, "drain against the fastest Python peer")
    anyone = judged(results, "drain against the fastest peer with a lease per row in any")
    limit = judged(results, "drain against the pure-SQL limit")

    assert (python.measured.against, python.measured.value, python.word) == ("pgqueuer", 4.0, "met")
    assert (anyone.measured.against, anyone.measured.value, anyone.word) == ("pg-boss", 1.6, "MISSED")
    assert (limit.measured.value, limit.word) == (0.8, "met")


def test_ratio_is_the_median_of_the_rounds_ratios():
    results = results_of(
        ("drain", "pulse-outbox", "pulse_outbox", 1, {"rate": 30_000.0}),
        ("drain", "pgqueuer", "pgqueuer", 1, {"rate": 10_000.0}),
        ("drain", "pulse-outbox", "pulse_outbox", 2, {"rate": 3_000.0}),
        ("drain", "pgqueuer", "pgqueuer", 2, {"rate": 1_000.0}),
    )

    assert judged(results, "drain against the fastest Python peer").measured.value == 3.0


def test_less_waiting_is_better():
    """Compared with the peer that waits least; at most so many times as long."""
    results = results_of(
        ("idle-latency", "pulse-outbox", "pulse_outbox", 1, {"p50_ms": 1.0, "p99_ms": 6.0}),
        ("idle-latency", "pgqueuer", "pgqueuer", 1, {"p50_ms": 4.0, "p99_ms": 9.0}),
        ("idle-latency", "pg-boss", "pg_boss", 1, {"p50_ms": 2.0, "p99_ms": 9.0}),
    )

    middle = judged(results, "idle latency p50")

    assert (middle.measured.against, middle.measured.value, middle.word) == ("pg-boss", 0.5, "met")
    assert judged(results, "idle latency p99").word == "MISSED"


def test_what_was_not_measured_is_not_met():
    assert {judgement.word for judgement in judge(results_of())} == {"not measured"}
    assert "not measured" in targets_table(map(target_row, judge(results_of())))


def test_not_a_number_is_a_miss():
    target = Target(text="", measure=own("drain", "rate"), at_least=1)

    assert not target.met(float("nan"))


def test_every_row_of_the_issue_has_its_target():
    """Twelve rows; the vacuum row and the latency row are two targets each."""
    assert len(TARGETS) == 14


def test_report_names_who_is_missing():
    """A peer that could not be installed is told, not dropped."""
    text = report(
        results_of(("drain", "pulse-outbox", "pulse_outbox", 1, {"rate": 40_000.0})),
    )

    assert "Not measured: gone (no network)" in text
    assert "| pulse-outbox | 40,000 |" in text
