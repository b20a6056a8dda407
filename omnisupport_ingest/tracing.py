"""OpenTelemetry traces of runs: where the time of a run went. Off unless a setting turns them on.

A run is a trace, whose id is the run's own. It has a span for each table that the run makes. Inside are spans
for each attempt at a commit, and inside these, its planning and its durable effects: the failpoints of the
lake (``lake.write`` is the work of Spark, ``lake.commit`` the commit). Spans name tables, windows and counts,
never a value of a row. If a collector does not answer, a run loses only its spans.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from omnisupport_ingest import failpoints
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

SERVICE = "omnisupport-ingest"

_log = logging.getLogger(__name__)

_OF_A_LAKE = "lake."
"""Prefix of the failpoints that are spans."""

_PLAN = "plan"

_SECONDS = 5.0
"""Seconds that a run waits for a collector at its end."""

_TELL_THE_ENDPOINT = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers of the library whose messages may contain an error that quotes the endpoint, which may contain a
token."""

_exporter: Callable[[], SpanExporter] | None = None
"""Makes the exporter of spans; None if tracing is off."""

_tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
_planning: ContextVar[ExitStack | None] = ContextVar("planning", default=None)


class TracesMissing(IngestError):
    """``OMNISUPPORT_TRACES_ENDPOINT`` is set, and the library that sends traces is not installed.

    Fix: Install the extra ``omnisupport-ingest[traces]``, or unset the setting.
    """

    exit_code = 4


def send_to(endpoint: str | None) -> None:
    """Make this process send the spans of its runs to ``endpoint`` (OTLP over HTTP); None: send none.

    Raises ``TracesMissing`` without the library.
    """
    if endpoint is None:
        export_by(None)
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracesMissing(
            "OMNISUPPORT_TRACES_ENDPOINT is set, and the libraries of OpenTelemetry are not installed.",
            fix='Install them: pip install "omnisupport-ingest[traces]". Or unset the setting.',
        ) from None
    for name in _TELL_THE_ENDPOINT:
        logging.getLogger(name).addFilter(_without_texts)
    export_by(lambda: OTLPSpanExporter(endpoint=endpoint, timeout=_SECONDS))


def export_by(exporter: Callable[[], SpanExporter] | None) -> None:
    """Export the spans of runs by what ``exporter`` makes; it is called once per run."""
    global _exporter
    _exporter = exporter


@contextmanager
def run(run_id: str, job: str) -> Iterator[None]:
    """Trace one run in this process. Problems with its spans never affect the run."""
    if _exporter is None:
        yield
        return
    try:
        provider = _provider(run_id, _exporter)
        tracer = provider.get_tracer(SERVICE)
    except Exception as problem:
        # The library reads many variables of its own, and refuses some values.
        _log.warning("No traces of this run are sent: the library refuses (%s).", type(problem).__name__)
        yield
        return
    token = _tracer.set(tracer)
    failpoints.watched_by(_passing)
    try:
        with span("run", **{"run.id": run_id, "run.job": job}):
            yield
    finally:
        failpoints.watched_by(None)
        _tracer.reset(token)
        # The library waits without limit for each batch of spans, and for a slow answer.
        last = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_SECONDS)


def _provider(run_id: str, exporter: Callable[[], SpanExporter]) -> TracerProvider:
    """Return the provider that makes and sends the spans of one run."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OfRun(RandomIdGenerator):  # type: ignore[misc, unused-ignore]
        def generate_trace_id(self) -> int:
            return uuid.UUID(run_id).int

    # Made for each run: its process is a fork, in which a sending thread of the parent does not exist.
    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE}), id_generator=OfRun(), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    return provider


def _without_texts(record: logging.LogRecord) -> bool:
    """Reduce the errors in ``record`` to their names; their texts may contain secrets. Always returns True:
    it is logged."""
    given = record.args if isinstance(record.args, tuple) else ()
    record.args = tuple(_named(each) for each in given) or record.args
    record.exc_info = record.exc_text = None
    return True


def _named(value: object) -> object:
    if isinstance(value, BaseException):
        return type(value).__name__
    # The reason of a failure as text: the words of an error, or those of HTTP.
    return "(not shown)" if isinstance(value, str) and "://" in value else value


def span(name: str, **attributes: str | int | bool) -> AbstractContextManager[Any]:
    """Return a span of the run in progress; it does nothing if no run is traced. Of an error, only the name
    is recorded."""
    tracer = _tracer.get()
    if tracer is None:
        return nullcontext()
    return _span(tracer, name, attributes)


@contextmanager
def _span(tracer: Tracer, name: str, attributes: dict[str, Any]) -> Iterator[None]:
    from opentelemetry.trace import Status, StatusCode

    # The message of an error may contain a value.
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as made:
        try:
            yield
        except Exception as error:
            made.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise


@contextmanager
def attempt(table: str) -> Iterator[None]:
    """Trace an attempt at a commit to ``table``. Until its first durable effect, it counts as planning."""
    if _tracer.get() is None:
        yield
        return
    with span("attempt", table=table), ExitStack() as planning:
        planning.enter_context(span(_PLAN))
        token = _planning.set(planning)
        try:
            yield
        finally:
            _planning.reset(token)


def _passing(name: str, of: object) -> AbstractContextManager[Any]:
    """Return the span for the failpoint ``name`` and its effect on ``of``."""
    if not name.startswith(_OF_A_LAKE):
        return nullcontext()
    planning = _planning.get()
    if planning is not None:
        planning.close()
    return span(name, of=str(of))
