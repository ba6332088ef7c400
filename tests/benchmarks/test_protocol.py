"""The harness and its drivers understand each other, also when a driver misbehaves."""

import json
import os
import sys

import pytest

from benchmarks.driver import Task, payload_of
from benchmarks.protocol import DriverFailed, DriverProcess, parse_line, started

TASK = Task(action="setup", dsn="none")


@pytest.fixture
def driver(tmp_path):
    def start(script):
        return DriverProcess(
            [sys.executable, "-c", script], TASK, environment=dict(os.environ), log=tmp_path / "log"
        )

    return start


def test_line_is_a_message_or_noise():
    """Products print banners; a banner must not end a run."""
    message = parse_line('{"event": "done", "count": 3}')

    assert message is not None
    assert (message.event, dict(message.fields)) == ("done", {"count": 3})
    assert parse_line("Starting worker …") is None
    assert parse_line("[1, 2]") is None
    assert parse_line('{"level": "info"}') is None


def test_driver_waits_for_go_and_answers(driver):
    script = """
import json, sys
print("a banner", flush=True)
print(json.dumps({"event": "ready", "settings": "as told"}), flush=True)
assert sys.stdin.readline() == "go\\n"
print(json.dumps({"event": "done", "action": json.loads(sys.argv[1])["action"]}), flush=True)
"""
    with started(driver(script)) as process:
        process.go()

        assert process.wait_for("done", 10)["action"] == "setup"
        assert process.settings == "as told"


def test_death_of_a_driver_is_told_with_its_last_words(driver):
    with (
        pytest.raises(DriverFailed, match=r"ended early: .*no such thing"),
        started(driver("raise SystemExit('no such thing')")),
    ):
        pass


def test_silent_driver_is_given_up_and_ended(driver):
    with pytest.raises(DriverFailed, match="did not say"), driver("import time; time.sleep(600)") as process:
        process.wait_for("ready", 0.05)

    assert process._process.poll() is not None


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_payload_has_the_asked_size(size):
    length = len(json.dumps(payload_of(1234, size)))

    assert abs(length - size) <= 12
