"""How far sources without a log have been read: tables by their cursors, partitions of Kafka topics by
offsets.

``source status NAME`` shows one of them, ``status`` all. Each is queried on a thread of its own
(``ReadingLooks``), so a cluster that does not answer delays nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, sources_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.session.lease import is_captured

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Contracts
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.kafka.run import Lag
    from omnisupport_ingest.sources.query.state import Progress

Document = dict[str, Any]


def reading_document(settings: Settings, definition: SourceDefinition, home: Home) -> Document:
    """Return how far the source of ``definition``, of the kind query or kafka, has been read, as JSON values.

    ``problem``: why that is unknown, with the fix; None if it is known. ``parked``: of topics, the tables
    that are left out until their contracts are right; None if not known.
    """
    document: Document = {
        "source": definition.name,
        "kind": definition.kind.value,
        "state": _state(home, definition.name),
        "connection": definition.connection,
    }
    read_state = _of_topics if definition.kind is SourceKind.KAFKA else _of_tables
    try:
        return document | read_state(settings, definition, home) | {"problem": None}
    except IngestError as error:
        nothing: Document = {"partitions": [], "behind": None, "parked": None}
        if definition.kind is SourceKind.QUERY:
            nothing = {"tables": []}
        return document | nothing | {"problem": {"problem": error.problem, "fix": error.fix}}


def is_well(document: Document) -> bool:
    """Whether a document of ``reading_document`` names no problem, no parked table, and no records that were
    deleted unread."""
    gone = any(each["gone"] for each in document.get("partitions", ()))
    return document["problem"] is None and not document.get("parked") and not gone


def reading_lines(document: Document) -> Iterator[str]:
    """Yield the document of ``reading_document`` for people: a line for the source, then one for each
    part."""
    yield f"{document['source']}: {document['state']}, {document['connection']}"
    for each in document.get("tables", ()):
        cursor = "never read to its end" if each["cursor"] is None else f"read up to {each['cursor']}"
        at = f", {render.ago(each['read_at'])}" if each["read_at"] else ""
        going = f"; being read {each['reading']}" if each["reading"] else ""
        yield f"  {each['table']}: {cursor}{at}{going}"
    for each in document.get("partitions", ()):
        landed = "nothing has landed" if each["landed"] is None else f"landed up to offset {each['landed']}"
        newest = f", newest record landed {render.ago(each['landed_at'])}" if each["landed_at"] else ""
        gap = f"; {render.counted(each['gone'], 'offset')} were deleted before: a gap" if each["gone"] else ""
        where = f"{each['topic']}[{each['partition']}]"
        waits = f"; waits before a row of {each['parked']}" if each["parked"] else ""
        yield f"  {where}: {landed} of {each['end']}, {each['behind']} behind{newest}{waits}{gap}"
    for each in document.get("parked") or ():
        yield f"  {each['table']} is left out: {each['problem']}\n  Fix: {each['fix']}"
    if document["problem"] is not None:
        yield f"{document['problem']['problem']}\nFix: {document['problem']['fix']}"


def reading_summary(document: Document) -> str:
    """Return the document in one line, for the view of the whole platform."""
    subject = f"{document['source']}, {document['connection']}, {document['state']}"
    if document["problem"] is not None:
        return f"{subject}: {document['problem']['problem']}"
    if document["kind"] == "query":
        read = [each["read_at"] for each in document["tables"] if each["read_at"]]
        return (
            f"{subject}, last read {render.ago(max(read))}" if read else f"{subject}, never read to its end"
        )
    newest = [each["landed_at"] for each in document["partitions"] if each["landed_at"]]
    landed = f", newest record landed {render.ago(max(newest))}" if newest else ""
    gone = sum(each["gone"] for each in document["partitions"])
    gap = f", {render.counted(gone, 'offset')} were deleted unread: a gap" if gone else ""
    names = ", ".join(each["table"] for each in document.get("parked") or ())
    parked = f", left out: {names} (source status {document['source']})" if names else ""
    return f"{subject}, {render.counted(document['behind'], 'record')} behind{landed}{parked}{gap}"


class ReadingLooks:
    """Looks at every source of a home that is read by cursors or from topics, each on a thread of its own.
    The looks begin when the object is made."""

    def __init__(self, settings: Settings, home: Home, contracts: Contracts) -> None:
        self._found: dict[str, Document] = {}
        self._looks: list[tuple[SourceDefinition, threading.Thread]] = []
        for each in sources_in_force(settings, contracts).all:
            if each.kind in (SourceKind.KAFKA, SourceKind.QUERY):
                look = threading.Thread(target=self._look, args=(settings, each, home), daemon=True)
                look.start()
                self._looks.append((each, look))

    def results(self, answered_by: float) -> Sequence[Document]:
        """Return the documents of all looks. If a look has not ended by ``answered_by`` (``time.monotonic``),
        its document says so."""
        for definition, look in self._looks:
            look.join(max(0.0, answered_by - time.monotonic()))
            if definition.name not in self._found:
                self._found[definition.name] = {
                    "source": definition.name,
                    "kind": definition.kind.value,
                    "state": "not known",
                    "connection": definition.connection,
                    "tables": [],
                    "partitions": [],
                    "behind": None,
                    "parked": None,
                    "problem": {
                        "problem": "It has not answered in time.",
                        "fix": f"omnisupport-ingest source status {definition.name} waits longer.",
                    },
                }
        return [self._found[definition.name] for definition, _ in self._looks]

    def _look(self, settings: Settings, definition: SourceDefinition, home: Home) -> None:
        document = reading_document(settings, definition, home)
        self._found.setdefault(definition.name, document)


def _state(home: Home, source: str) -> str:
    if PauseRequest(_landing(home, source)).read() is not None:
        return "PAUSED"
    return "RUNNING" if is_captured(home.run, source) else "STOPPED"


def _landing(home: Home, source: str) -> Path:
    return home.path / "landing" / source


def _of_tables(settings: Settings, definition: SourceDefinition, home: Home) -> Document:
    from omnisupport_ingest.sources.query.state import FILE, QueryState

    folder = _landing(home, definition.name)
    names = [each.full_name for each in definition.tables(contracts_in_force(settings))]
    if not (folder / FILE).exists():
        # A look makes no file.
        return {"tables": [_table(name, None) for name in names]}
    with QueryState(folder) as state:
        return {"tables": [_table(name, state.progress(name)) for name in names]}


def _table(name: str, progress: Progress | None) -> Document:
    reading = progress.reading if progress is not None else None
    return {
        "table": name,
        "cursor": progress.cursor if progress is not None else None,
        "read_at": render.iso(progress.finished) if progress is not None else None,
        "reading": None if reading is None else ("whole" if reading.full else "from its cursor"),
    }


def _of_topics(settings: Settings, definition: SourceDefinition, home: Home) -> Document:
    from omnisupport_ingest.sources.kafka.run import lags

    contracts, landing = contracts_in_force(settings), home.path / "landing"
    partitions = lags(definition, contracts, landing)
    parked = LandedKeys(landing / definition.name).changed(definition.tables(contracts))
    return {
        "partitions": [_partition(each) for each in partitions],
        "behind": sum(each.behind for each in partitions),
        "parked": [
            {"table": name, "problem": each.problem, "fix": each.fix} for name, each in parked.items()
        ],
    }


def _partition(lag: Lag) -> Document:
    since = None if lag.landed_at is None else (datetime.now(UTC) - lag.landed_at).total_seconds()
    return {
        "topic": lag.held.topic,
        "partition": lag.held.partition,
        "landed": lag.landed,
        "low": lag.held.low,
        "end": lag.held.end,
        "behind": lag.behind,
        "gone": lag.gone,
        "parked": lag.parked or None,
        "landed_at": render.iso(lag.landed_at),
        "seconds_since_landed": None if since is None else round(since, 1),
    }
