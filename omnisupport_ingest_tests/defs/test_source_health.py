"""The sensor and the check that watch the captured source: a real server, a real command, a real webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr

from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.source_health import CHECK, source_health_check
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.alarm import AlarmNotSent, send_alarm
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.health import Health
from omnisupport_ingest.sources.postgres.slot.retention import Level, SlotWarning
from omnisupport_ingest_tests.sources.postgres.awkward import contract_document
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest, contract

NEVER = 1 << 60
LANDING = keys.landing_key(SOURCE)


@pytest.fixture
def tickets(source: SourceUnderTest, tmp_path: Path) -> SourceUnderTest:
    """A captured table; thresholds that nothing reaches, and a command that writes down what it is told."""
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    text = json.dumps(contract_document("tickets")).replace('"source": "shop"', f'"source": "{SOURCE}"')
    (contracts / "tickets.json").write_text(text)
    source.overrides |= {
        "contracts_dir": contracts,
        "slot_warning_bytes": NEVER,
        "slot_alarm_bytes": NEVER,
        "alarm_command": f"cat >> {tmp_path}/told; echo >> {tmp_path}/told",
    }
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'old')")
    source.tables.append(contract("tickets", ("id", "v")))
    return source


class Watch:
    """Ticks of the sensor on a real instance, each with the settings as they are then."""

    def __init__(self, source: SourceUnderTest, instance: dg.DagsterInstance, told: Path) -> None:
        self._source, self._instance, self._told = source, instance, told
        self.cursor: str | None = None

    def tick(self) -> dg.SensorResult:
        workspace = Workspace.open(self._source.settings)
        repository = build_definitions(workspace).get_repository_def()
        sensor = repository.get_sensor_def(f"source_health_{SOURCE}")
        context = dg.build_sensor_context(self._instance, cursor=self.cursor, repository_def=repository)
        result = sensor(context, workspace=workspace)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result

    @property
    def told(self) -> list[dict[str, object]]:
        """The documents that the command was given, in order."""
        text = self._told.read_text() if self._told.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def watch(tickets: SourceUnderTest, tmp_path: Path) -> Iterator[Watch]:
    with dg.instance_for_test() as instance:
        yield Watch(tickets, instance, tmp_path / "told")


def evaluated(result: dg.SensorResult) -> list[dg.AssetCheckEvaluation]:
    return [each for each in result.asset_events if isinstance(each, dg.AssetCheckEvaluation)]


def test_source_that_was_never_captured_is_well_and_nobody_is_told(watch: Watch) -> None:
    (evaluation,) = evaluated(watch.tick())
    assert evaluation.passed
    assert watch.told == []


def test_people_are_told_when_health_changes_and_not_at_every_tick(
    tickets: SourceUnderTest, watch: Watch
) -> None:
    tickets.catch_up()
    watch.tick()
    assert watch.told == []
    tickets.overrides["slot_warning_bytes"] = 1
    (evaluation,) = evaluated(watch.tick())
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert evaluation.metadata["wal_kept_bytes"].value > 1
    tickets.sql("INSERT INTO tickets VALUES (2, 'more')")
    assert watch.tick().asset_events == [], "another size of the same problem is no news"
    tickets.overrides["slot_alarm_bytes"] = 1
    (evaluation,) = evaluated(watch.tick())
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    tickets.overrides |= {"slot_warning_bytes": NEVER, "slot_alarm_bytes": NEVER}
    (evaluation,) = evaluated(watch.tick())
    assert evaluation.passed
    assert [each["level"] for each in watch.told] == ["warning", "alarm", "well"]
    assert all("max_slot_wal_keep_size" in each["problems"][0]["fix"] for each in watch.told[:2])


def test_a_warning_that_becomes_an_alarm_is_another_kind_beside_any_other_alarm() -> None:
    def kinds(level: Level, size: str) -> tuple[str, ...]:
        left_out = SlotWarning("Capture leaves out a table.", "fix", Level.ALARM)
        return Health(
            SOURCE, Level.ALARM, (left_out, SlotWarning(f"{size} GB are kept.", "fix", level))
        ).kinds

    assert kinds(Level.WARNING, "5.1") == kinds(Level.WARNING, "6.2")
    assert kinds(Level.WARNING, "5.1") != kinds(Level.ALARM, "5.1")


def test_dropped_slot_raises_the_alarm_with_its_repair(tickets: SourceUnderTest, watch: Watch) -> None:
    tickets.catch_up()
    watch.tick()
    tickets.sql(f"SELECT pg_drop_replication_slot('{tickets.slot}')")
    watch.tick()
    (told,) = watch.told
    assert (told["source"], told["level"]) == (SOURCE, "alarm")
    assert "--new-epoch" in told["problems"][0]["fix"]


def test_tick_that_could_not_tell_anybody_is_made_again(tickets: SourceUnderTest, watch: Watch) -> None:
    tickets.catch_up()
    watch.tick()
    works = tickets.overrides["alarm_command"]
    tickets.overrides |= {"slot_warning_bytes": 1, "alarm_command": "exit 7 # s3cret"}
    for _ in range(2):
        with pytest.raises(Exception, match="ended with code 7") as failed:
            watch.tick()
        assert "s3cret" not in repr(failed.value)
    tickets.overrides["alarm_command"] = works
    watch.tick()
    assert [each["level"] for each in watch.told] == ["warning"]


def test_check_asks_the_server_when_it_is_run(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    tickets.overrides["slot_alarm_bytes"] = 1
    workspace = Workspace.open(tickets.settings)
    check = source_health_check(
        sources_in_force(workspace.settings, workspace.contracts).find("support_desk")
    )
    definitions = dg.Definitions(
        assets=[dg.AssetSpec(LANDING)],
        asset_checks=[check],
        resources={"workspace": workspace},
        jobs=[dg.define_asset_job("checks", selection=dg.AssetSelection.checks(check))],
    )
    with dg.instance_for_test() as instance:
        done = definitions.resolve_job_def("checks").execute_in_process(instance=instance)
    (evaluation,) = done.get_asset_check_evaluations()
    assert (evaluation.check_name, evaluation.passed) == (CHECK, False)
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR


class Hook(HTTPServer):
    """A webhook on loopback that answers ``code`` and keeps what it was posted."""

    def __init__(self, code: int) -> None:
        self.posted: list[dict[str, object]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                hook.posted.append(json.loads(self.rfile.read(length)))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @contextmanager
    def listening(self) -> Iterator[str]:
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.server_port}/s3cret"
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


def to_webhook(address: str) -> Settings:
    return Settings(alarm_webhook=SecretStr(address), _env_file=None)


def test_webhook_is_posted_the_document() -> None:
    hook = Hook(204)
    with hook.listening() as address:
        assert send_alarm(to_webhook(address), {"level": "alarm"})
    assert hook.posted == [{"level": "alarm"}]


def test_webhook_that_refuses_or_is_away_is_told_without_its_address() -> None:
    with Hook(503).listening() as address, pytest.raises(AlarmNotSent, match="answered 503") as refused:
        send_alarm(to_webhook(address), {})
    with pytest.raises(AlarmNotSent, match="cannot be reached") as away:
        send_alarm(to_webhook(address), {})
    with pytest.raises(AlarmNotSent, match="no http") as other:
        send_alarm(to_webhook("file:///etc/passwd"), {})
    for error in (refused, away, other):
        assert "s3cret" not in str(error.value) and "passwd" not in str(error.value)
        assert "ALARM_WEBHOOK" in error.value.fix


def test_nothing_set_tells_nobody() -> None:
    assert not send_alarm(Settings(_env_file=None), {})
