"""The deployment examples: every flag exists, probes ask for paths that are there, and the times fit each other."""

from __future__ import annotations

import argparse
import configparser
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulse_outbox.commands.run import check, settings_of
from pulse_outbox.dispatcher.core import FINAL_ALERTS, FINAL_WRITES
from pulse_outbox.dispatcher.health import Health, respond
from pulse_outbox.dispatcher.settings import DispatcherSettings
from tests.examples.conftest import EXAMPLES

UNITS = sorted((EXAMPLES / "deploy/systemd").glob("*.service"))
MANIFESTS = sorted((EXAMPLES / "deploy/kubernetes").glob("*.yaml"))
AFTER_GRACE = FINAL_WRITES + FINAL_ALERTS


def parsed(words: list[str]) -> tuple[str, argparse.Namespace]:
    """The command, and its options as its own parser reads them; SystemExit where it refuses."""
    program, command, *rest = words
    assert Path(program).name == "pulse-outbox"
    parser = argparse.ArgumentParser()
    import_module(f"pulse_outbox.commands.{command}").add_arguments(parser)
    return command, parser.parse_args(rest)


def settings_in(words: list[str]) -> DispatcherSettings | None:
    """How a dispatcher started like this would work; None when it is another command."""
    command, args = parsed(words)
    if command != "run":
        return None
    assert re.fullmatch(r"[\w.]+:\w+", args.target)
    settings = settings_of(args)
    check(settings)
    return DispatcherSettings(**settings)


def unit(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read_string(path.read_text().replace("%i", "2"))
    return {name: dict(section) for name, section in parser.items()}


def documents() -> list[Any]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def deployments() -> list[Any]:
    return [document for document in documents() if document["kind"] == "Deployment"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_what_exists_and_wait_long_enough(path):
    service = unit(path)["Service"]
    settings = settings_in(shlex.split(service["ExecStart"]))

    if settings is not None:
        assert service["Type"] == "notify"
        assert service["KillMode"] == "mixed"
        assert int(service["TimeoutStopSec"]) > settings.seconds("grace") + AFTER_GRACE
        assert int(service["WatchdogSec"]) > 2 * settings.seconds("lease")
        if "@" in path.name:
            assert settings.generations == (2,)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_units(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    # It looks for the program, the account and the units that are named, which are the reader's.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^(After|Wants|User|WorkingDirectory|EnvironmentFile)=.*\n", "", text, flags=re.MULTILINE)
    name = path.name.replace("@", "@2")
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    own = [line for line in done.stderr.splitlines() if name in line]

    assert own == []


def test_systemd_would_refuse_a_mistake(tmp_path):
    """The control of the test above."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    path = tmp_path / "wrong.service"
    path.write_text("[Service]\nExecStart=/bin/true\nTimeoutStopSec=a while\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )

    assert "wrong.service" in done.stderr


def containers() -> list[tuple[Any, Any]]:
    """Every container, and the pod that it is in."""
    pods = [
        document["spec"]["template"]["spec"] for document in documents() if "template" in document["spec"]
    ]
    return [(container, pod) for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize(("container", "pod"), containers(), ids=lambda value: value.get("name", ""))
def test_containers_start_what_exists_and_end_in_time(container, pod):
    words = [*container["command"], *container.get("args", [])]
    assert all(isinstance(word, str) for word in words), "numbers need quotes"
    settings = settings_in([word.replace("$(POD_NAME)", "pod-1") for word in words])

    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "cpu" not in container["resources"]["limits"]
    assert [entry for entry in container["env"] if "value" in entry] == []  # secrets are not in manifests
    if settings is None:
        return
    assert pod["terminationGracePeriodSeconds"] > settings.seconds("grace") + AFTER_GRACE
    [port] = container["ports"]
    assert settings.health == f":{port['containerPort']}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert b"200 OK" in respond(f"GET {asked['path']} HTTP/1.1\r\n".encode(), healthy())
    live = container["livenessProbe"]
    assert live["httpGet"]["path"] == "/live"
    assert live["periodSeconds"] * live["failureThreshold"] > 2 * settings.seconds("lease")


def healthy() -> Health:
    return Health(live=list, ready=list, facts=dict)


def test_a_probe_of_another_path_would_fail():
    """The control of the test above."""
    assert b"404" in respond(b"GET /health HTTP/1.1\r\n", healthy())


def test_selectors_budgets_and_rollouts_fit():
    budgets = [document for document in documents() if document["kind"] == "PodDisruptionBudget"]

    for deployment in deployments():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        [budget] = [one for one in budgets if one["spec"]["selector"]["matchLabels"] == labels]
        assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    names = [document["metadata"]["name"] for document in documents() if document["kind"] == "Deployment"]
    assert len(names) == len(set(names)) == len(deployments())


def test_generations_differ_in_nothing_but_their_number_and_image():
    """And each is the plain Deployment with a generation."""
    plain, *generations = deployments()

    for number, deployment in enumerate(generations, start=1):
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        settings = settings_in([*container["command"], *container["args"]])
        assert settings is not None
        assert settings.generations == (number,)
        text = yaml.safe_dump(deployment).replace(f"outbox-dispatcher-g{number}", "outbox-dispatcher")
        text = text.replace(container["image"], "shop:2030-01-15")
        again = yaml.safe_load(
            re.sub(rf"^ *(- --generation\n *- '{number}'|generation: '{number}')\n", "", text, flags=re.M)
        )
        assert again == plain
    assert len(generations) == 2
