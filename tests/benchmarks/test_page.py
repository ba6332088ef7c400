"""The page in the docs holds what was measured, and only what is worth publishing."""

import re
from typing import Any

import pytest

from benchmarks import page
from benchmarks.results import Results
from tests.benchmarks.measured import results_of

COSTS = {"rate": 20_000.0, "cpu_worker": 20.0, "cpu_server": 30.0, "cpu": 50.0, "wal_bytes": 1000.0}
DRAINS = [("drain", "pulse-outbox", "pulse_outbox", number, COSTS) for number in (1, 2, 3)]


def test_page_holds_the_numbers():
    text = page.render(results_of(*DRAINS), ())

    assert "Measured on 2026-11-16" in text
    assert "| pulse-outbox | 20,000 |" in text
    assert "drain against the pure-SQL limit" in text
    assert "{{" not in text


def test_what_was_not_measured_again_stays_and_says_so():
    """To measure everything takes hours: a session that measures a part must not throw the rest away."""
    both = results_of(*DRAINS, ("sync", "pulse-outbox", "pulse_outbox", 1, {"rate": 7.0}))
    published = page.render(both, ())
    faster = [(*drain[:4], COSTS | {"rate": 30_000.0}) for drain in DRAINS]

    text = page.render(results_of(*faster), (), published)
    again = page.render(results_of(*faster), (), text)

    assert "| pulse-outbox | 30,000 |" in text
    assert "| pulse-outbox | 20,000 |" not in text
    assert re.search(r"\| pulse-outbox \| 7\.00 .*\n\nMedians of 1 round\. Of an earlier session\.\n", text)
    assert again == text, "and it is said once"


def test_targets_that_were_not_measured_again_stay_and_say_so():
    def measured(rate: float) -> list[Any]:
        return [
            ("drain", label, key, number, COSTS | {"rate": value})
            for number in (1, 2, 3)
            for label, key, value in (
                ("pulse-outbox", "pulse_outbox", rate),
                ("pure SQL, ours", "pure_sql", 20_000.0),
            )
        ]

    published = page.render(results_of(*measured(18_000.0)), ())
    text = page.render(results_of(("sync", "pulse-outbox", "pulse_outbox", 1, {"rate": 7.0})), (), published)

    assert re.search(r"pure-SQL limit.* 0\.90 × .* met +\|", published)
    assert re.search(r"pure-SQL limit.* 0\.90 × .* met \(earlier\) *\|", text)


def test_estimate_follows_from_the_measured_costs():
    """50 s of processor time per million jobs: 320,000 a second on 16 cores, by 7 dispatchers of 50,000 each."""
    text = " ".join(page.render(results_of(*DRAINS), ()).split())

    assert "50.0 s of processor time per million jobs are 320,000 jobs per second on 16 cores" in text
    assert "can't go beyond 50,000 per second, so that would take 7 of them" in text
    assert "grow by 320 MB/s" in text


def test_without_results_no_number_is_told():
    text = page.render(None, ())

    assert "Not measured yet" in text
    assert "{{" not in text


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        (results_of(*DRAINS, quick=True), "quick run"),
        (results_of(*DRAINS, busy=1.5), "others used the machine before 3 of 3 runs"),
        (results_of(*DRAINS[:2]), "fewer than 3 rounds of drain"),
    ],
)
def test_noise_is_not_published(results, complaint):
    with pytest.raises(page.NotFit, match=complaint):
        page.check(results)


def test_quiet_session_is_published():
    page.check(results_of(*DRAINS))


def test_sessions_join_and_the_later_one_counts():
    earlier = results_of(*DRAINS, ("sync", "pulse-outbox", "pulse_outbox", 1, {"rate": 7.0}))
    later = results_of(("sync", "pulse-outbox", "pulse_outbox", 1, {"rate": 8.0}))
    joined = earlier.joined(later)

    assert joined.by_round("sync", "pulse-outbox", "rate") == {1: 8.0}
    assert len(joined.by_round("drain", "pulse-outbox", "rate")) == 3


def test_results_come_back_as_they_were_kept(tmp_path):
    results = results_of(*DRAINS)
    results.save(tmp_path / "results.json")

    assert Results.load(tmp_path / "results.json") == results


def test_page_in_the_docs_has_the_words_of_its_template():
    """Words are changed in benchmarks/page.md; `dev.py bench --page` then writes them."""
    written = page.PAGE.read_text()
    paragraphs = [
        part.strip()
        for part in re.split(r"\n\n|\{\{[a-z0-9:-]+\}\}", page.TEMPLATE.read_text())
        if part.strip()
    ]

    assert [part for part in paragraphs if part not in written] == []
