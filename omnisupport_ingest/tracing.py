"""OpenTelemetry traces of runs: where the time of a run went. Off unless a setting asks for them.

A run is a trace, whose id is the run's own. In it each table that the run makes is a span, in that each
attempt at a commit, and in that what it plans and what it makes durable: the failpoints that a
lake passes (``lake.write`` is what Spark does, ``lake.commit`` the commit). Spans name tables, windows and
counts, never a value of a row. A collector that is away costs a run nothing but its spans.
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
"""Begins the names of the failpoints that are spans."""

_PLAN = "plan"

_SECONDS = 5.0
"""How long a run waits at its end for a collector."""

_TELL_THE_ENDPOINT = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers of the library whose messages may hold an error that quotes the endpoint, with a token in it."""

_exporter: Callable[[], SpanExporter] | None = None
"""Makes what spans are sent by; None while nobody asks for them."""

_tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
_planning: ContextVar[ExitStack | None] = ContextVar("planning", default=None)


class TracesMissing(IngestError):
    """``OMNISUPPORT_TRACES_ENDPOINT`` is set, and the library that sends traces is not installed.

    Fix: Install the extra ``omnisupport-ingest[traces]``, or unset the setting.
    """

    exit_code = 4


def send_to(endpoint: str | None) -> None:
    """Have this process send the spans of its runs to ``endpoint`` (OTLP over HTTP), none if it is None.

    ``TracesMissing`` without the library.
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
        logging.getLogger(name).addFilter(_untold)
    export_by(lambda: OTLPSpanExporter(endpoint=endpoint, timeout=_SECONDS))


def export_by(exporter: Callable[[], SpanExporter] | None) -> None:
    """Have the spans of runs go by what ``exporter`` makes, once for each run."""
    global _exporter
    _exporter = exporter


@contextmanager
def run(run_id: str, job: str) -> Iterator[None]:
    """The trace of one run in this process. Whatever becomes of its spans, the run goes on."""
    if _exporter is None:
        yield
        return
    try:
        provider = _provider(run_id, _exporter)
        tracer = provider.get_tracer(SERVICE)
    except Exception as problem:
        # The library has many variables of its own, and refuses some values.
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
        # The library waits for each batch of spans, and for an answer that drips in, for as long as it takes.
        last = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_SECONDS)


def _provider(run_id: str, exporter: Callable[[], SpanExporter]) -> TracerProvider:
    """What makes and sends the spans of one run."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OfRun(RandomIdGenerator):  # type: ignore[misc, unused-ignore]
        def generate_trace_id(self) -> int:
            return uuid.UUID(run_id).int

    # Made for each run: its process is a fork, and a thread that sends does not survive one.
    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE}), id_generator=OfRun(), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    return provider


def _untold(record: logging.LogRecord) -> bool:
    """Have ``record`` name its errors, and not tell what they say. It is logged all the same."""
    told = record.args if isinstance(record.args, tuple) else ()
    record.args = tuple(_named(each) for each in told) or record.args
    record.exc_info = record.exc_text = None
    return True


def _named(value: object) -> object:
    if isinstance(value, BaseException):
        return type(value).__name__
    # The reason of a failure, as text: an error's own words, or those of HTTP.
    return "(not told)" if isinstance(value, str) and "://" in value else value


def span(name: str, **attributes: str | int | bool) -> AbstractContextManager[Any]:
    """A span of the run in progress; nothing where none is traced. An error in it is named, not told."""
    tracer = _tracer.get()
    if tracer is None:
        return nullcontext()
    return _span(tracer, name, attributes)


@contextmanager
def _span(tracer: Tracer, name: str, attributes: dict[str, Any]) -> Iterator[None]:
    from opentelemetry.trace import Status, StatusCode

    # The message of an error may show a value.
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
    """An attempt at a commit to ``table``. Until it makes something durable, it plans."""
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
    """The span of the failpoint ``name`` on its effect on ``of``."""
    if not name.startswith(_OF_A_LAKE):
        return nullcontext()
    planning = _planning.get()
    if planning is not None:
        planning.close()
    return span(name, of=str(of))
