"""How a source writes its events: the settings of its definition that the events themselves do not show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.sources import load_source, sources_folder
from omnisupport_ingest.settings import Settings

QUARANTINE, REFUSE = "quarantine", "refuse"
"""Policies for a line that cannot be read: its event waits in quarantine, or its file does not land."""

BY_POSITION, BY_ARRIVAL = "position", "arrival"
"""What orders events: their own log position, or else their time; or their arrival: the order in their file
(files in the order of landing) or in their partition."""

DEFAULT_PREFIX = "__"
"""What the names of metadata begin with in the flat form, if ``add.fields.prefix`` does not say otherwise."""

DROP, DELETE = "drop", "delete"
"""The meaning of a tombstone with a key: it follows a delete and adds nothing, or it is the delete."""


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table that its events do not name. ``pattern`` (``*``, ``?``) matches file names or topics."""

    pattern: str
    schema: str
    table: str


@dataclass(frozen=True, slots=True)
class Handling:
    """How a source writes its events.

    ``decimals``: the connector's ``decimal.handling.mode`` (``double`` needs no setting: values are numbers).
    ``binary``: its ``binary.handling.mode``; None means ``bytes``, which is base64 in JSON. ``tables``: if an
    event names no table, the first whose pattern matches. ``fields``: for the flat form, the member or header
    that holds a field of Debezium (``op``, ``deleted``, ``source.ts_ms`` …), if its name is not the default.
    ``prefix``: its ``add.fields.prefix``. ``bare_rows``: a row may come without metadata. ``time_columns``:
    if an event has no commit time, the first of these columns that is not null holds it. ``order``:
    ``BY_POSITION`` or ``BY_ARRIVAL``. ``tombstones``: ``DROP`` or ``DELETE``. ``odd_lines``: ``QUARANTINE``
    or ``REFUSE``. ``keys``: the names of the key columns of each table, which distinguish a bare row from the
    tombstone ``{"id": 1, "value": null}``; empty if a table has a column ``value``. ``contracted``: the
    tables that a contract names, and ``columns``: the names of their columns; a reader sets both.
    """

    decimals: str = "precise"
    binary: str | None = None
    tables: tuple[NamedTable, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    prefix: str = DEFAULT_PREFIX
    bare_rows: bool = False
    time_columns: tuple[str, ...] = ()
    order: str = BY_POSITION
    tombstones: str = DROP
    odd_lines: str = QUARANTINE
    keys: frozenset[frozenset[str]] = frozenset()
    contracted: frozenset[TableName] = frozenset()
    columns: frozenset[str] = frozenset()

    def with_contracts(self, contracts: Iterable[TableContract]) -> Handling:
        """Return the handling with the tables and columns that ``contracts`` name."""
        tables = list(contracts)
        names = frozenset(column.name for each in tables for column in each.source_columns)
        return replace(self, contracted=frozenset(each.table_name for each in tables), columns=names)

    def leads_to_a_contract(self, name: str, topic: str) -> bool:
        """Whether the events in the file or topic ``name``, with ``topic`` (empty if unknown), are those of a
        table that a contract names: the definition says so, or the topic bears the name of the table."""
        if self.table_of(name) is not None:
            return True
        *above, table = topic.split(".")
        if not above:
            return False
        schema = above[-1] if len(above) > 1 else None
        return any(each[1] == table and (schema is None or each[0] == schema) for each in self.contracted)

    def table_of(self, name: str) -> NamedTable | None:
        """Return the table whose events come in the file or topic ``name``; None if the definition names
        none."""
        return next((each for each in self.tables if fnmatchcase(name, each.pattern)), None)


@dataclass(frozen=True, slots=True)
class LineContext:
    """What is known of a line besides its text.

    ``name``: its file or topic. ``moment``: its time if the line has none; None if unknown. ``noted``: when
    it was written; the event of a line that cannot be read is in the window of this time.
    """

    name: str = ""
    moment: datetime | None = None
    noted: datetime | None = None


PLAIN, ALONE = Handling(), LineContext()


def handling_in_force(settings: Settings, source: str) -> Handling:
    """Return how the events of ``source`` are read in the home of ``settings``.

    Without a definition: as Debezium writes by default. Raises ``ContractError`` if the definition is wrong.
    """
    path = sources_folder(settings) / f"{source}.json"
    return handling_of(load_source(path).events if path.exists() else {})


def handling_of(events_settings: Mapping[str, Any]) -> Handling:
    """Return the handling in ``events_settings``, the checked member ``events`` of a definition."""
    tables = tuple(NamedTable(**each) for each in events_settings.get("tables", ()))
    columns = tuple(events_settings.get("time_columns", ()))
    return Handling(**{**events_settings, "tables": tables, "time_columns": columns})
