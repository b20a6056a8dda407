"""What ``deploy/`` names is there: commands, options, settings, files; every service in each of the ways."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.cli.probes import LIVE, READY
from omnisupport_ingest.cli.serve import serve
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest_tests.test_docs import _problem

DEPLOY = Path(__file__).parents[1] / "deploy"
PROGRAM = "/opt/omnisupport/bin/omnisupport-ingest "
SERVICES = {("capture",), ("alarms", "--watch"), *(("serve", name) for name in serve.params[0].type.choices)}  # type: ignore[attr-defined]


def units() -> dict[str, list[str]]:
    """The words of each unit's command, without the program."""
    found = {}
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        [line] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), flags=re.MULTILINE)
        assert line.startswith(PROGRAM)
        found[unit.stem] = line.removeprefix(PROGRAM).split()
    return found


def compose() -> dict[str, Any]:
    text = (DEPLOY / "docker" / "compose.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def containers() -> list[dict[str, Any]]:
    found = yaml.safe_load((DEPLOY / "kubernetes" / "statefulset.yaml").read_text())
    listed: list[dict[str, Any]] = found["spec"]["template"]["spec"]["containers"]
    return listed


def commands() -> list[list[str]]:
    """Every command of ours that a service manager starts or asks."""
    found = list(units().values())
    for service in compose().values():
        found += [service["command"]] if "command" in service else []
        test = service.get("healthcheck", {}).get("test", [])
        found += [test[2:]] if test[1:2] == ["omnisupport-ingest"] else []
    for container in containers():
        found.append(container["args"])
        probes = [each["exec"]["command"] for each in probes_of(container) if "exec" in each]
        found += [probe[1:] for probe in probes if probe[0] == "omnisupport-ingest"]
    return found


def probes_of(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for name, each in container.items() if name.endswith("Probe")]


def test_every_command_can_be_typed() -> None:
    refused = {" ".join(words): problem for words in commands() if (problem := _problem(list(words)))}
    assert refused == {}
    assert len(commands()) > 25
    names = {words[1] for words in commands() if words[0] == "serve"}
    context = click.Context(cli)
    assert all(serve.params[0].type.convert(name, None, context) for name in names)


def test_each_way_has_every_service_once() -> None:
    ours = [tuple(each["command"][:2]) for each in compose().values() if "command" in each]
    ways = {
        "systemd": [tuple(words) for name, words in units().items() if not name.endswith("@")],
        "compose": ours,
        "kubernetes": [tuple(each["args"][:2]) for each in containers()],
    }
    assert {name: sorted(found) for name, found in ways.items()} == dict.fromkeys(ways, sorted(SERVICES))


def test_a_further_log_has_a_unit_that_differs_by_its_name_alone() -> None:
    both = [(DEPLOY / "systemd" / f"omnisupport-capture{end}.service").read_text() for end in ("", "@")]
    _, _, further = both[1].partition("\n")
    assert further.count(" %i\n") == 2
    assert further.replace(" %i\n", "\n") == both[0]


def test_probes_over_http_ask_for_what_is_served_where_it_is_served() -> None:
    asked = [
        (container, each["httpGet"])
        for container in containers()
        for each in probes_of(container)
        if "httpGet" in each
    ]
    assert {each["path"] for _, each in asked} == {LIVE, READY}
    settings = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    [port] = re.findall(r"METRICS_PORT=(\d+)", str(settings["configMapGenerator"]))
    for container, each in asked:
        [named] = [
            each["containerPort"] for each in container["ports"] if each["name"] == asked[0][1]["port"]
        ]
        # A probe comes to the address of the pod, where nothing listens that listens on loopback.
        assert (container["args"], str(named)) == (["serve", "metrics", "--listen", "0.0.0.0"], port), each
    published = compose()["metrics"]["ports"]
    assert published == [f"127.0.0.1:{port}:{port}"], "on loopback alone"


def test_every_variable_is_a_setting() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    text = "".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file())
    assert set(re.findall(rf"{PREFIX}[A-Z_]+", text)) - known == set()


def test_compose_takes_every_other_setting_from_a_file_that_git_does_not_see() -> None:
    named = [each["env_file"] for each in compose().values() if "command" in each]
    assert named == [[{"path": "settings.env", "required": False}]] * len(SERVICES)
    assert "settings.env" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


def test_what_sees_one_anothers_processes_is_in_one_namespace() -> None:
    ours = [each for each in compose().values() if "command" in each]
    assert {each["pid"] for each in ours} == {"service:processes"}
    found = yaml.safe_load((DEPLOY / "kubernetes" / "statefulset.yaml").read_text())["spec"]
    assert (found["replicas"], found["template"]["spec"]["shareProcessNamespace"]) == (1, True)


def test_the_image_copies_what_is_there() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert len(copied) > 5
    assert [each for each in copied if not (DEPLOY.parent / each).exists()] == []
    # The program is built from what is copied, so everything that setup.py packs has to be there.
    packed = re.findall(
        r"^(?:FOLDERS|PAGES) = (\(.*\))$", (DEPLOY.parent / "setup.py").read_text(), re.MULTILINE
    )
    names = {name for listed in packed for name in ast.literal_eval(listed)}
    assert len(names) > 5
    assert names - {each.removeprefix("./") for each in copied} == set()
    # Nothing else is sent to the builder: a checkout may hold a home, and `.env` a password.
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert sorted(each[1:] for each in ignored if each.startswith("!")) == sorted(
        each.removeprefix("./") for each in copied
    )


def test_no_password_is_typed_on_a_command_line_or_left_for_others_to_read() -> None:
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith("    ")]
    assert [line for line in commands if "--from-literal" in line or "password=" in line.lower()] == []
    for file in (".env", "omnisupport.env"):
        made = next(line for line in commands if line.rstrip().endswith(file) or f"{file} " in line)
        assert re.search(r"-m 06[04]0", made), f"{file} is made with rights of its own"


def test_the_end_that_was_asked_for_is_no_failure() -> None:
    """A JVM that ends by SIGTERM exits with 143, and so does the service that it is."""
    unit = (DEPLOY / "systemd" / "omnisupport-spark.service").read_text()
    assert "\nSuccessExitStatus=143\n" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for path in (DEPLOY / "systemd").glob("omnisupport*"):
        text = path.read_text().replace(PROGRAM, f"{sys.executable} ")
        (tmp_path / path.name).write_text(re.sub(r"^(User|Group)=.*", r"\1=root", text, flags=re.MULTILINE))
    files = sorted(str(path) for path in tmp_path.iterdir() if path.suffix in (".service", ".target"))
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
