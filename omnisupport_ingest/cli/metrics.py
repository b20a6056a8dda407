"""Prometheus metrics: what ``status`` shows, as numbers for a monitoring system.

``METRICS`` lists all of them; the page of the documentation is made from it. All values come from the
document of ``status``, so a metric and the command cannot disagree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.probes import Health, application, look
from omnisupport_ingest.cli.status_health import logs_in
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.ports import LOOPBACK, PortTaken

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily

PREFIX = "omnisupport_"

_FRESH_SECONDS = 10.0
"""Seconds that the result of a look is reused, so that several or frequent readers cost no more."""

_Values = Iterator[tuple[tuple[str, ...], float | None]]


class MetricsMissing(IngestError):
    """``OMNISUPPORT_METRICS_PORT`` is set, and the library that serves metrics is not installed.

    Fix: Install the extra ``omnisupport-ingest[metrics]``, or unset the setting.
    """

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge: ``name`` without the prefix, its labels, and ``values``, which finds its values in the
    document of ``status`` (None: not reported)."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[dict[str, Any]], _Values]


_ValueOf = Callable[[dict[str, Any]], float | None]


def _home(name: str, text: str, value_of: _ValueOf) -> Metric:
    """Return a metric of the home."""
    return Metric(name, text, (), lambda document: iter([((), value_of(document))]))


def _log(name: str, text: str, value_of: _ValueOf) -> Metric:
    """Return a metric of each log of the home."""

    def values(document: dict[str, Any]) -> _Values:
        for log in logs_in(document):
            yield (log["name"],), value_of(log)

    return Metric(name, text, ("source",), values)


def _source(name: str, text: str, value_of: _ValueOf) -> Metric:
    """Return a metric of each source in use."""

    def values(document: dict[str, Any]) -> _Values:
        for source in document["sources"]:
            yield (source["source"],), value_of(source)

    return Metric(name, text, ("source",), values)


def _table(name: str, text: str, value_of: _ValueOf) -> Metric:
    """Return a metric of each table of the lake."""

    def values(document: dict[str, Any]) -> _Values:
        for source in document["sources"]:
            for table in source["tables"]:
                yield (
                    (source["source"], str(table["table"]).removeprefix(f"{source['source']}/")),
                    value_of(table),
                )

    return Metric(name, text, ("source", "table"), values)


def _target(name: str, text: str, value_of: _ValueOf) -> Metric:
    """Return a metric of each target."""

    def values(document: dict[str, Any]) -> _Values:
        for source in document["sources"]:
            for target in source["targets"]:
                table = str(target["table"]).removeprefix(f"{source['source']}.")
                yield (source["source"], table), value_of(target)

    return Metric(name, text, ("source", "table"), values)


def _quarantine(document: dict[str, Any]) -> _Values:
    for source in document["sources"]:
        for reason, events in source["quarantine"].items():
            yield (source["source"], reason), float(events)


def _level(table: dict[str, Any], name: str) -> float | None:
    level = table.get("service_level")
    return None if level is None or level[name] is None else float(level[name])


def _verified(table: dict[str, Any]) -> float | None:
    through = (table.get("verified") or {}).get("through")
    return None if through is None else datetime.fromisoformat(through["at"]).timestamp()


def _differs(table: dict[str, Any]) -> float | None:
    verified = table.get("verified")
    return None if verified is None else float(verified["differs"])


def _landing(source: dict[str, Any], name: str) -> float | None:
    """Return a number of the landing of ``source``; None where landing cannot be read."""
    landing = source["landing"]
    return None if landing["problem"] else landing[name]


def _gap(source: dict[str, Any]) -> float | None:
    gap = source["landing"]["gap"]
    if source["landing"]["problem"]:
        return None
    return float(gap is not None and not gap["repaired"])


METRICS: tuple[Metric, ...] = (
    _home("broken", "1 if `status` says BROKEN.", lambda home: float(home["health"]["level"] == "broken")),
    _home(
        "running",
        "1 while `up`, `demo` or the service `daemon` runs, and Dagster's daemon gives heartbeats.",
        lambda home: float(home["platform"]["running"] and not home["platform"]["daemon_hangs"]),
    ),
    _home(
        "reasons",
        "Things that `status` warns of, or calls broken.",
        lambda home: len(home["health"]["reasons"]),
    ),
    _home("disk_free_bytes", "Room on the disk of the home.", lambda home: home["disk"]["free"]),
    _home(
        "disk_days_left",
        "Days until the disk is full, an estimate; none in the first week.",
        lambda home: home["disk"]["days"] if home["disk"]["settled"] else None,
    ),
    _home(
        "checks_failed",
        "Checks whose last evaluation failed.",
        lambda home: len(home["platform"]["checks"]["failed"]) if home["platform"]["checks"] else None,
    ),
    _log("source_reachable", "1 if the server of a log answers.", lambda log: float(log["reachable"])),
    _log(
        "capture_failed",
        "1 if the capture of a source has failed.",
        lambda log: float(log["capture"] == "FAILED"),
    ),
    _log(
        "capture_running",
        "1 while capture of a source runs, or a person has paused it.",
        lambda log: float(log["capture"] in ("RUNNING", "PAUSED")),
    ),
    _log(
        "slot_retained_bytes",
        "WAL that the server keeps for the slot.",
        lambda log: log["slot"]["retained_bytes"],
    ),
    _log("slot_safe_bytes", "WAL until the server gives the slot up.", lambda log: log["slot"]["safe_bytes"]),
    _source("landed_batches", "Batches that have landed.", lambda source: _landing(source, "batches")),
    _source("landed_events", "Events that have landed.", lambda source: _landing(source, "events")),
    _source(
        "landing_lag_seconds",
        "How far the watermark is behind the clock.",
        lambda source: source["landing"]["watermark_lag_seconds"],
    ),
    _source("landing_gap", "1 while a gap holds batches back.", _gap),
    Metric("quarantine_events", "Events in quarantine, by reason.", ("source", "reason"), _quarantine),
    _table(
        "table_rows",
        "Rows of a table of the lake; none if it cannot be read.",
        lambda table: None if table["problem"] else table["rows"],
    ),
    _table(
        "table_pending_batches", "Landed batches that a table lacks.", lambda table: table["pending_batches"]
    ),
    _table(
        "table_lag_seconds",
        "How far what people read is behind the clock.",
        lambda table: table.get("lag_seconds"),
    ),
    _table(
        "table_allowed_lag_seconds",
        "How far it may be behind: its service level.",
        lambda table: _level(table, "allowed_lag_seconds"),
    ),
    _table(
        "table_service_level_kept",
        "1 if the service level is kept, 0 if it is broken.",
        lambda table: _level(table, "kept"),
    ),
    _table(
        "table_verified_timestamp_seconds",
        "When the table was equal to its source last, in seconds since 1970.",
        _verified,
    ),
    _table(
        "table_differs",
        "1 if a comparison with the source found other rows, until one finds them equal.",
        _differs,
    ),
    _target(
        "target_behind_versions",
        "Versions of its dimension that a target lacks; none if that is not known.",
        lambda target: target["versions_behind"],
    ),
    _target(
        "target_behind_seconds",
        "How long ago the first version that a target lacks was committed; 0 if it lacks none.",
        lambda target: target["seconds_behind"],
    ),
    _target(
        "target_failing",
        "1 if the last sync of a target failed.",
        lambda target: float(target["problem"] is not None),
    ),
)
"""All are gauges. `landed_batches` and `landed_events` grow until landing is trimmed."""


class Looks:
    """A collector of the library; it reuses a look at the home for some seconds."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        """``look`` returns the document of ``status``."""
        self._look = look
        self._found: dict[str, Any] | None = None
        self._until = 0.0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of a look. If the home cannot be read, only ``up`` with 0."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        if time.monotonic() >= self._until:
            try:
                self._found = self._look()
            except IngestError:
                self._found = None
            self._until = time.monotonic() + _FRESH_SECONDS
        up = GaugeMetricFamily(f"{PREFIX}up", "1 if the home can be looked at.")
        up.add_metric((), float(self._found is not None))
        yield up
        for metric in METRICS if self._found is not None else ():
            family = GaugeMetricFamily(f"{PREFIX}{metric.name}", metric.help, labels=metric.labels)
            for labels, value in metric.values(self._found or {}):
                if value is not None:
                    family.add_metric(labels, value)
            yield family


@click.command(hidden=True)
@click.option("--listen", default=LOOPBACK, show_default=True, metavar="ADDRESS", help="Where to listen.")
def metrics(listen: str) -> None:
    """Serve metrics for Prometheus, and health, at http://127.0.0.1:PORT until Ctrl-C, as a service of `up`.

    PORT is OMNISUPPORT_METRICS_PORT.
    """
    port = open_settings().metrics_port
    if port is None:
        raise click.UsageError("Set OMNISUPPORT_METRICS_PORT to the port to serve metrics on.")
    with stop_on_signal() as stop:
        end = serve(port, listen)
        try:
            stop.wait()
        finally:
            end()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = 30
    """Seconds that a connection may be silent."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes send a request every few seconds."""


def serve(port: int, listen: str = LOOPBACK) -> Callable[[], None]:
    """Serve on ``port`` of the address ``listen``; return a function that stops it.

    Raises ``MetricsMissing`` without the library, and ``PortTaken`` if another program has the port.
    """
    from omnisupport_ingest.cli.status import status_document

    require_library()
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Looks(status_document))
    settings, stop = open_settings(), threading.Event()
    health = Health(lambda: look(settings))
    try:
        server = make_server(
            listen, port, application(health, make_wsgi_app(registry)), _Server, handler_class=_Handler
        )
    except OSError as error:
        raise PortTaken(
            f"Port {port} on {listen} cannot be used: {error.strerror}.",
            fix="Stop the program that uses it, or set OMNISUPPORT_METRICS_PORT to another port.",
        ) from error
    # The end does not wait for these threads: a look that hangs would keep the process alive.
    threading.Thread(target=health.watch, args=(stop,), daemon=True).start()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def require_library() -> None:
    """Raise ``MetricsMissing`` if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MetricsMissing(
            "OMNISUPPORT_METRICS_PORT is set, and prometheus-client is not installed.",
            fix='Install it: pip install "omnisupport-ingest[metrics]". Or unset the setting.',
        ) from None


def metrics_page() -> str:
    """Return the page docs/metrics.md, made from the list."""
    rows = "\n".join(
        f"| `{PREFIX}{each.name}` | {', '.join(f'`{label}`' for label in each.labels) or '–'} | {each.help} |"
        for each in METRICS
    )
    return f"""\
# Metrics

Off by default. With the extra `metrics` installed (`pip install "omnisupport-ingest[metrics]"`) and
`OMNISUPPORT_METRICS_PORT=9464`, `up` serves them for Prometheus at `http://127.0.0.1:9464/metrics`, on
loopback alone; `serve metrics` does for services that are started one by one. Beside them are
[`/livez` and `/readyz`](deploy.md#health). Each reading is a look as of
`omnisupport-ingest status`, kept for {_FRESH_SECONDS:.0f} seconds. This page is made by
`python -m omnisupport_ingest.cli.reference`.

`deploy/grafana-dashboard.json` of the repository is a dashboard of them: import it in Grafana, and choose
your Prometheus. `deploy/prometheus-alerts.yaml` has alerts on red checks, failed runs, tables that are
behind or differ, late targets, slots and the disk, each with the command that helps: name it under
`rule_files`, and change its limits.

All are gauges. `{PREFIX}up` is 1 if the home can be looked at, `{PREFIX}running` is 1 if something is taken
in, too; its absence tells that whoever serves the metrics does not run.

| metric | labels | what it is |
|---|---|---|
{rows}
"""
