"""How fast work goes, and how often the lanes are listed."""

from __future__ import annotations

import pytest

from pulse_outbox.dispatcher.pace import Looks, Rate


class TestRate:
    def test_it_is_that_of_the_last_moments(self):
        rate = Rate(now=0.0)
        for step in range(100):
            rate.per_second(ended=step * 10, now=step * 0.05)  # 200 per second

        assert rate.per_second(ended=1000, now=5.0) == pytest.approx(200, rel=0.05)
        assert rate.per_second(ended=1000, now=60.0) == 0, "and nothing has ended since"

    def test_idle_time_does_not_count(self):
        """After a pause the first jobs show at once how quick they are."""
        rate = Rate(now=0.0)
        rate.per_second(ended=0, now=9.9)
        rate.restart(ended=0, now=10.0)

        assert rate.per_second(ended=1000, now=10.1) == pytest.approx(10_000)

    def test_a_single_moment_says_little(self):
        """Ten jobs within a millisecond are not ten thousand per second."""
        assert Rate(now=0.0).per_second(ended=10, now=0.001) == 500


class TestLooks:
    def test_quick_listings_are_made_often(self):
        looks = Looks(poll=5)
        looks.listed(100.0, took=0.0001)

        assert not looks.listing_is_due(100.04, work_is_known=True)
        assert looks.listing_is_due(100.06, work_is_known=True)
        assert not looks.known_are_due(100.04), "what is listed so often need not be asked for beside"

    def test_listing_takes_a_small_share_of_the_time(self):
        looks = Looks(poll=5)
        looks.listed(100.0, took=0.008)

        assert not looks.listing_is_due(100.39, work_is_known=True)
        assert looks.listing_is_due(100.41, work_is_known=True)
        assert looks.known_are_due(100.06)
        looks.known_asked(100.06)
        assert not looks.known_are_due(100.1)

    def test_costly_listings_are_made_as_rarely_as_polling(self):
        looks = Looks(poll=5)
        costly = []
        for now in (100.0, 101.0):  # the first one may have had to wait for something else
            looks.listed(now, took=0.2)
            costly.append(looks.are_costly)

        assert costly == [False, True]
        assert not looks.last_was_quick()
        assert looks.listing_is_due(102.1, work_is_known=True)
        assert not looks.listing_is_due(105.9, work_is_known=False)
        assert looks.listing_is_due(106.1, work_is_known=False)

    def test_somebody_may_need_one_at_once(self):
        looks = Looks(poll=5)
        looks.listed(100.0, took=0.2)
        looks.listed(101.0, took=0.2)
        assert looks.listed_within(1, now=101.5)

        looks.list_at_once()

        assert not looks.listed_within(1, now=101.5)
        assert looks.listing_is_due(101.5, work_is_known=False)
