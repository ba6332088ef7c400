"""`dev.py bench`: what is chosen, and what is refused before anything is installed or started."""

import pytest

from benchmarks.cli import _parser, _sized, main
from benchmarks.environments import find_peers
from benchmarks.workloads import WORKLOADS


def test_list_names_every_peer_and_workload(capsys):
    assert main(["--list"]) == 0

    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*find_peers(), *WORKLOADS))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workloads", "drian"], "there is no workload 'drian'"),
        (["--peers", "celery"], "there is no peer 'celery'"),
        (["--against", "no-such-branch"], "there is no revision 'no-such-branch'"),
        (["--workloads", "drain", "--set", "count"], "SIZE=VALUE is needed"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, complaint):
    assert main(arguments) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert complaint in lines[0]


def test_sizes_can_be_set():
    args = _parser().parse_args(["--quick", "--set", "count=77", "keys=1"])
    _, sizes = _sized(WORKLOADS["drain"], args)

    assert sizes["count"] == 77
    assert "keys" not in sizes  # this workload has no such size


def test_every_peer_is_pinned_and_says_why():
    """A comparison with whatever is newest could not be repeated."""
    for peer in find_peers().values():
        assert peer.reason
        assert all("==" in package or "@" in package for package in peer.requires)
        assert (peer.folder / ("driver.mjs" if peer.node else "driver.py")).is_file()
