"""How a source writes its events, as far as the events do not tell: what its definition says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from omnisupport_ingest.contracts.sources import load_source, sources_folder
from omnisupport_ingest.settings import Settings

QUARANTINE, REFUSE = "quarantine", "refuse"
"""What becomes of a line that cannot be read: its event waits in quarantine, or its file does not land."""

BY_POSITION, BY_ARRIVAL = "position", "arrival"
"""What orders events: what they say themselves (log position, else a time); or how they stand one behind the
other in their file (files as they land) or in their partition."""

DROP, DELETE = "drop", "delete"
"""What a tombstone with a key is: the end of what a delete has said already, or the delete itself."""


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table whose events do not name it: ``pattern`` (``*``, ``?``) is of file names or topics."""

    pattern: str
    schema: str
    table: str


@dataclass(frozen=True, slots=True)
class Handling:
    """How a source writes its events.

    ``decimals``: the connector's ``decimal.handling.mode`` (``double`` tells itself: it is a number).
    ``binary``: its ``binary.handling.mode``; None is ``bytes``, which is base64 in JSON. ``tables``: where
    an event names no table, the first whose pattern fits. ``fields``: of the flat form, what a member is
    called that has another name than Debezium's own (``op``, ``deleted``, ``source.ts_ms`` …): its name in
    the row or among the headers. ``prefix``: its ``add.fields.prefix``. ``bare_rows``: a row may come without
    a word about it. ``time_columns``: where an event has no commit time, the first of them that is not null.
    ``order``: ``BY_POSITION`` or ``BY_ARRIVAL``. ``tombstones``: ``DROP`` or ``DELETE``. ``odd_lines``:
    ``QUARANTINE`` or ``REFUSE``. ``keys``: the names of the key columns of each table, by which a bare row is
    told from the tombstone ``{"id": 1, "value": null}``; empty where one has a column ``value``.
    """

    decimals: str = "precise"
    binary: str | None = None
    tables: tuple[NamedTable, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "__"
    bare_rows: bool = False
    time_columns: tuple[str, ...] = ()
    order: str = BY_POSITION
    tombstones: str = DROP
    odd_lines: str = QUARANTINE
    keys: frozenset[frozenset[str]] = frozenset()

    def table_of(self, name: str) -> NamedTable | None:
        """Return the table whose events come in the file or topic ``name``; None if the definition names
        none."""
        return next((each for each in self.tables if fnmatchcase(name, each.pattern)), None)


@dataclass(frozen=True, slots=True)
class LineContext:
    """What is known of a line besides its text: file or topic, and times.

    ``name``: of its file or topic. ``moment``: its time where it tells none; None if there is no such time.
    ``noted``: when it was written down, for a line that cannot be read: its event stands in that window.
    """

    name: str = ""
    moment: datetime | None = None
    noted: datetime | None = None


PLAIN, ALONE = Handling(), LineContext()


def handling_in_force(settings: Settings, source: str) -> Handling:
    """How the events of ``source`` are read in the home of ``settings``; without a definition, as Debezium
    writes by default. ``ContractError`` if the definition is wrong."""
    path = sources_folder(settings) / f"{source}.json"
    return handling_of(load_source(path).events if path.exists() else {})


def handling_of(events_settings: Mapping[str, Any]) -> Handling:
    """Return the handling in ``events_settings``, the checked member ``events`` of a definition."""
    tables = tuple(NamedTable(**each) for each in events_settings.get("tables", ()))
    columns = tuple(events_settings.get("time_columns", ()))
    return Handling(**{**events_settings, "tables": tables, "time_columns": columns})
