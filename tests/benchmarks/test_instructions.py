"""Instructions are counted, and counted alike: the harness for comparing SQL where no clock can be trusted."""

import shutil

import pytest

from benchmarks.instructions import PURE_SQL, count


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.timeout(180)
def test_same_work_costs_the_same():
    with_constraints = count(jobs=60, batch=2)
    without = count(jobs=60, batch=2, sql=(PURE_SQL / "without_constraints.sql").read_text())
    again = count(jobs=60, batch=2)

    assert again.per_job == pytest.approx(with_constraints.per_job, rel=0.005)
    assert without.per_job < 0.95 * with_constraints.per_job
    costs, fewer = ({name: number for number, name in each.functions} for each in (with_constraints, without))
    assert fewer.get("ExecConstraints", 0) < 0.5 * costs["ExecConstraints"] < 0.5 * with_constraints.per_job
