"""Numbers out of measurements: a wrong median here would be a wrong promise in the docs."""

import math

import pytest

from benchmarks.measures import median, quantile, rate, ratios, summarise, tenths, thinned, time_of


def test_quantile_is_an_observed_value():
    """p99 of 100 values is the 99th, not a mean with the worst one."""
    values = [float(number) for number in range(100, 0, -1)]

    assert quantile(values, 0.5) == 50
    assert quantile(values, 0.99) == 99
    assert quantile(values, 0.999) == 100
    assert math.isnan(quantile([], 0.5))


def test_median_of_an_even_number_lies_between():
    assert median([4, 1, 3, 2]) == 2.5
    assert median([3, 1, 2]) == 2


def test_summary_tells_how_far_rounds_lie_apart():
    summary = summarise([90.0, 100.0, 120.0])

    assert (summary.median, summary.low, summary.high, summary.rounds) == (100, 90, 120, 3)
    assert summary.spread == pytest.approx(0.3)


def test_ratios_are_made_round_by_round():
    """A round in which the machine was slow slows both; dividing medians of all rounds would mix them."""
    ours = {1: 100.0, 2: 10.0, 3: 50.0}
    theirs = {1: 50.0, 2: 5.0, 4: 1.0}

    assert ratios(ours, theirs) == [2.0, 2.0]


def test_rate_counts_from_the_first_job_to_the_durable_end():
    marks = [(1, 10.0), (50, 11.0), (101, 12.0)]

    assert rate(marks) == 50
    assert rate(marks, ended=14.0) == 25
    assert math.isnan(rate(marks[:1]))


def test_tenths_compare_the_beginning_and_the_end():
    """Twice as slow at the end is 0.5, wherever the marks happen to fall."""
    quick = [(number, number / 1000) for number in range(1, 901)]
    slow = [(900 + number, 0.9 + number / 500) for number in range(1, 101)]
    first, last = tenths(quick + slow)

    assert first == pytest.approx(1000, rel=0.02)
    assert last == pytest.approx(500, rel=0.02)


def test_time_between_two_marks_lies_on_a_line():
    marks = [(1, 0.0), (101, 1.0)]

    assert time_of(marks, 51) == pytest.approx(0.5)
    assert time_of(marks, 0) == 0.0
    assert time_of(marks, 1000) == 1.0


def test_thinned_values_keep_both_ends():
    values = [float(number) for number in range(10_000)]

    assert thinned(values, 3) == [0.0, 5000.0, 9999.0]
    assert thinned([2.0, 1.0], 3) == [1.0, 2.0]
