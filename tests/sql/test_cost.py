"""Every call costs what its own rows cost, however large the table and whatever the planner believes about it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pulse_outbox import embedded
from pulse_outbox.testing.databases import serving
from tests.sql import mixture
from tests.sql.mixture import Meter

ROWS = 200_000


class Tables:
    """The same due rows by themselves, several times, and among two hundred thousand others. And a few, for which a
    plan costs next to nothing however it is made."""

    def __init__(self, tiny_dsn: str, small_dsns: Sequence[str], big_dsn: str) -> None:
        self.tiny_dsn, self.small_dsns, self.big_dsn = tiny_dsn, small_dsns, big_dsn
        with psycopg.connect(tiny_dsn, autocommit=True) as conn:
            mixture.fill(conn, 0, due=200)
            conn.execute("vacuum analyze pulse.outbox")
        for small_dsn in small_dsns:
            with psycopg.connect(small_dsn) as conn:
                mixture.fill(conn, 0)
        # The worst case for plans: made on an almost empty table and kept while it grows.
        with psycopg.connect(big_dsn) as conn:
            mixture.fill(conn, 0)
        self.early = {mode: self.session(big_dsn, mode) for mode in MODES}
        for meter in self.early.values():
            warm_up(meter)
        with psycopg.connect(big_dsn) as conn:
            mixture.add_in_the_way(conn, ROWS)

    def session(self, dsn: str, mode: str) -> Meter:
        return Meter(psycopg.connect(dsn, options=f"-c plan_cache_mode={mode}"))


MODES = ("force_generic_plan", "force_custom_plan")


def warm_up(meter: Meter) -> dict[str, int]:
    """The costs without those of the first call, which reads the catalogs and makes the plans."""
    meter.costs()
    return meter.costs()


@pytest.fixture(scope="module")
def tables() -> Iterator[Tables]:
    """On a server of their own: what is left of the calls before is cleaned up while they go on, unless somebody's
    transaction, in whichever database, is older; then the same call costs up to three times as much."""
    with (
        embedded.start() as server,
        serving(server.dsn) as testbed,
        ExitStack() as stack,
    ):
        tiny, big, *small = (stack.enter_context(testbed.database()) for _ in range(8))
        tables = Tables(tiny, small, big)
        yield tables
        for meter in tables.early.values():
            meter.conn.close()


def dearest(tables: Tables) -> dict[str, int]:
    """What each call costs, of several small tables.

    What calls that were rolled back have left in an index is cleaned up when one of its pages is full, and random ids
    decide which are: where that was a moment ago a call costs a third, and stays so.
    """
    runs = []
    for dsn in tables.small_dsns:
        meter = tables.session(dsn, "auto")
        runs += [warm_up(meter) for _ in range(2)]
        meter.conn.close()
    return {name: max(costs[name] for costs in runs) for name in runs[0]}


def too_dear(costs: dict[str, int], small: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Deeper indexes and a few more pages are fine; walking over strangers is not."""
    return {name: (small[name], cost) for name, cost in costs.items() if cost > 2 * small[name] + 200}


def test_large_table_costs_as_much_as_a_small_one(tables):
    """Plans made before and after ANALYZE, generic and custom, or kept from when the table was almost empty."""
    small = dearest(tables)
    found = {}

    for mode, meter in tables.early.items():
        found[f"{mode}, planned early"] = too_dear(warm_up(meter), small)
    for analyzed in (False, True):
        if analyzed:
            with psycopg.connect(tables.big_dsn, autocommit=True) as conn:
                conn.execute("analyze pulse.outbox")
        for mode in MODES:
            meter = tables.session(tables.big_dsn, mode)
            found[f"{mode}, {'after' if analyzed else 'before'} analyze"] = too_dear(warm_up(meter), small)
            meter.conn.close()

    assert found == {name: {} for name in found}


def test_a_walk_over_strangers_would_be_seen(tables):
    """The control: a claim without the index of due rows costs many times as much."""
    meter = tables.session(tables.big_dsn, "auto")
    small = warm_up(meter)
    meter.conn.execute("drop index pulse.outbox_due")
    with meter.undone():
        claim = "select * from pulse.outbox_claim(gen_random_uuid(), 'w', '{work}', 100, p_fresh => true)"
        cost = meter.buffers(claim)
    meter.conn.close()

    assert too_dear({"claim": cost}, small)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_plans_made_on_an_empty_table_are_no_walks_later(testbed, mode):
    """With nothing in it, a walk along the whole table is the cheapest plan, and a session may keep it."""
    stranger = [uuid.uuid4()]
    with (
        testbed.database() as dsn,
        psycopg.connect(dsn, autocommit=True) as owner,
        psycopg.connect(dsn, options=f"-c plan_cache_mode={mode}") as conn,
    ):
        owner.execute("alter table pulse.outbox set (autovacuum_enabled = false)")
        owner.execute("vacuum analyze pulse.outbox")
        meter = Meter(conn)
        for _ in range(8):
            meter.costs_of_what_is_lost(stranger)
        mixture.add_in_the_way(owner, 20_000)

        assert {
            name: cost for name, cost in meter.costs_of_what_is_lost(stranger).items() if cost > 100
        } == {}


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", ["tiny", "big"])
def test_no_plan_walks_along_the_table(tables, size, mode):
    """Nested statements too: each scan of the outbox goes to its rows by an index condition or by their place.

    Where there are few rows a walk would be cheap; but a plan may be kept until there are many.
    """
    dsn = tables.tiny_dsn if size == "tiny" else tables.big_dsn
    with psycopg.connect(dsn, options=f"-c plan_cache_mode={mode}") as conn:
        try:
            conn.execute("load 'auto_explain'")
        except psycopg.Error as error:
            pytest.skip(f"no auto_explain: {error}")
        plans = []

        def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
            text = diagnostic.message_primary or ""
            if "plan:\n" in text:
                plans.append(json.loads(text.split("plan:\n", 1)[1]))

        conn.add_notice_handler(keep)
        for setting in (
            "auto_explain.log_min_duration = 0",
            "auto_explain.log_nested_statements = on",
            "auto_explain.log_format = json",
            "client_min_messages = log",
        ):
            conn.execute(f"set {setting}")
        conn.commit()
        meter = Meter(conn)
        meter.costs()

    walking = [
        f"{node['Node Type']} {node.get('Index Name', '')} in: {plan['Query Text']}"
        for plan in plans
        for node in nodes(plan["Plan"])
        if node.get("Relation Name") == "outbox" and walks(node) and not looks_for_a_token(plan)
    ]
    assert len(plans) > 500
    assert walking == []
    # Each row is written as soon as it was looked at: a join might look at all of them first.
    ending = [plan for plan in plans if "status       = 'COMPLETED'" in str(plan["Query Text"])]
    assert ending
    assert {node["Node Type"] for plan in ending for node in nodes(plan["Plan"])} <= {
        "Aggregate",
        "CTE Scan",
        "ModifyTable",
        "Index Scan",
        "Function Scan",
    }


def walks(node: dict[str, Any]) -> bool:
    match node["Node Type"]:
        case "ModifyTable" | "Tid Scan":
            return False
        case "Bitmap Heap Scan":
            return not all("Index Cond" in child for child in node["Plans"])
        case _:
            return "Index Cond" not in node


def looks_for_a_token(plan: dict[str, Any]) -> bool:
    """A repeated claim looks through what is running. The first try (`p_fresh`) plans that and does not do it."""
    return str(plan["Query Text"]).startswith("not p_fresh and exists")
