"""A run is a trace: its tables, attempts, plans and durable steps are spans in one another."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress

import dagster as dg
import pytest

from omnisupport_ingest import failpoints, tracing
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.commit import CommitConflict, until_first
from omnisupport_ingest.layers.events import raw
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, Change, Commit, Story

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

RUN = str(uuid.uuid4())


class Spans:
    """The spans of the runs of a test, by name."""

    def __init__(self) -> None:
        self.exporter = memory.InMemorySpanExporter()
        # The provider of a run shuts down what it sends by, and that forgets nothing.
        self.exporter.shutdown = lambda: None

    @property
    def all(self):  # type: ignore[no-untyped-def]
        return self.exporter.get_finished_spans()

    def parents(self) -> list[tuple[str, str | None]]:
        names = {each.context.span_id: each.name for each in self.all}
        return [(each.name, names[each.parent.span_id] if each.parent else None) for each in self.all]


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    tracing.export_by(lambda: found.exporter)
    yield found
    tracing.export_by(None)


@dg.op
def writes() -> None:
    with (
        tracing.span("table", table="desk/notes"),
        tracing.attempt("desk/notes"),
        failpoint("lake.commit", "x"),
    ):
        pass


@dg.job(executor_def=run_executor)
def writing() -> None:
    writes()


def test_a_run_of_dagster_is_a_trace_with_its_own_id(spans: Spans) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        done = dg.execute_job(dg.reconstructable(writing), instance=instance)
    assert done.success
    (root,) = (each for each in spans.all if each.parent is None)
    assert (root.name, root.attributes["run.job"]) == ("run", "writing")
    assert {each.context.trace_id for each in spans.all} == {uuid.UUID(done.run_id).int}
    assert root.resource.attributes["service.name"] == "omnisupport-ingest"
    assert spans.parents() == [
        ("plan", "attempt"),
        ("lake.commit", "attempt"),
        ("attempt", "table"),
        ("table", "run"),
        ("run", None),
    ]


def test_a_layer_plans_then_writes_then_commits(tmp_path, spark, spans: Spans) -> None:
    story = Story(tmp_path)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "s3cret", "body": "text"})]))
    with tracing.run(RUN, "ingest"), tracing.span("table", table="raw"):
        raw.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    names = [name for name, parent in spans.parents() if parent == "attempt"]
    assert names[0] == "plan" and names.index("lake.write") < names.index("lake.commit")
    planned, written = (
        next(each for each in spans.all if each.name == name) for name in ("plan", "lake.write")
    )
    assert planned.end_time <= written.start_time
    assert "s3cret" not in str([each.to_json() for each in spans.all])


def test_each_attempt_is_a_span_and_an_error_is_named_and_not_told(spans: Spans) -> None:
    tries: list[int] = []

    def attempt() -> None:
        with tracing.attempt("desk/notes"), failpoint("lake.commit", "x"):
            tries.append(1)
            if len(tries) < 3:
                raise CommitConflict("s3cret", fix="none")

    with tracing.run(RUN, "ingest"):
        until_first(attempt, 5)
    attempts = [each for each in spans.all if each.name == "attempt"]
    assert [each.status.description for each in attempts] == ["CommitConflict"] * 2 + [None]
    assert "s3cret" not in str([each.to_json() for each in spans.all])


def test_what_is_no_part_of_a_lake_is_no_span_and_nothing_is_after_the_run(spans: Spans) -> None:
    with tracing.run(RUN, "ingest"), failpoint("runtime.file", "x"):
        pass
    assert [each.name for each in spans.all] == ["run"]
    with tracing.span("table"), tracing.attempt("x"), failpoint("lake.commit", "x"):
        pass
    assert len(spans.all) == 1 and failpoints._watcher is None


def test_without_the_setting_nothing_of_the_library_is_loaded() -> None:
    code = (
        "import sys; from omnisupport_ingest import tracing\n"
        "tracing.send_to(None)\n"
        "with tracing.run('x', 'y'), tracing.span('z'), tracing.attempt('a'): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(tracing.TracesMissing, match="OMNISUPPORT_TRACES_ENDPOINT is set"):
        tracing.send_to("http://127.0.0.1:4318/v1/traces")
    assert Settings(_env_file=None).traces_endpoint is None


@pytest.mark.parametrize(
    "environment",
    [{}, {"OTEL_BSP_MAX_QUEUE_SIZE": "10"}],
    ids=["no collector", "setting refused by the library"],
)
def test_traces_that_cannot_be_sent_fail_no_run(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing.send_to("http://127.0.0.1:9/v1/traces")
    try:
        with tracing.run(RUN, "ingest"), tracing.span("table"):
            done = True
    finally:
        tracing.export_by(None)
    assert done and failpoints._watcher is None


def _slow_collector(listening: socket.socket, *, answers: bool) -> None:
    """Take connections and say nothing, or begin an answer that never ends."""
    held = []
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            held.append(connection)
            if answers:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                threading.Thread(target=_drip, args=(connection,), daemon=True).start()


def _drip(connection: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection.sendall(b"x")
            time.sleep(0.5)


@pytest.mark.parametrize("answers", [False, True], ids=["hangs", "drips"])
def test_a_run_does_not_wait_until_a_collector_that_hangs_has_all_spans(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(tracing, "_SECONDS", 1.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        threading.Thread(target=_slow_collector, args=(listening,), kwargs={"answers": answers}).start()
        tracing.send_to(f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces")
        try:
            with tracing.run(RUN, "ingest"):
                # From here on what the run waits, a tenth of what the library waits for each batch.
                monkeypatch.setattr(tracing, "_SECONDS", 0.1)
                # Several batches: each of them is waited for.
                for _ in range(2_500):
                    with tracing.span("table"):
                        pass
            # The library still waits, and the run has ended all the same.
            sending = [each for each in threading.enumerate() if each.name == "last-spans"]
        finally:
            tracing.export_by(None)
            listening.shutdown(socket.SHUT_RDWR)
    assert sending


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9/v1?token=s3cret", "collector:4318/v1?token=s3cret"])
def test_the_library_does_not_tell_the_endpoint(caplog: pytest.LogCaptureFixture, endpoint: str) -> None:
    caplog.set_level(logging.DEBUG, "opentelemetry")
    tracing.send_to(endpoint)
    try:
        with tracing.run(RUN, "ingest"):
            pass
    finally:
        tracing.export_by(None)
    assert caplog.records and "s3cret" not in caplog.text
    assert "s3cret" not in str(Settings(traces_endpoint=endpoint, _env_file=None))
