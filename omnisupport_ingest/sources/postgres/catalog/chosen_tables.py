"""Tables as a person names them on a command line, found among those of the source."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from omnisupport_ingest.contracts.names import spellings
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, TableName
from omnisupport_ingest.sources.postgres.session.quoting import identifier


class NoSuchTable(IngestError):
    """The source has no table of the name that was given, or several."""


def choose(text: str, tables: Collection[TableName]) -> TableName:
    """The table that ``text`` names: ``schema.table``, either part quoted or not, or ``table`` of public.

    Letters count as they are written. ``NoSuchTable`` with the nearest names.
    """
    found = [name for name in tables if text in _spellings(name)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = " or ".join(f"{identifier(schema)}.{identifier(table)}" for schema, table in sorted(found))
        raise NoSuchTable(f"{text} may be one of several tables.", fix=f"Quote its parts: {listed}")
    near = difflib.get_close_matches(text.lower(), [_plain(name).lower() for name in tables], n=3, cutoff=0.8)
    meant = [_plain(name) for name in sorted(tables) if _plain(name).lower() in near]
    raise NoSuchTable(
        f"The source has no table {text}.",
        fix=f"Did you mean {' or '.join(meant)}?"
        if meant
        else "Name it as schema.table; --all takes every one.",
    )


def all_tables(tables: Collection[LiveTable]) -> list[LiveTable]:
    """The tables that ``--all`` means: not views, nor partitions, nor what an extension keeps for itself."""
    return [
        table
        for table in tables
        if table.kind in ("r", "p") and table.root is None and table.extension is None
    ]


def _plain(name: TableName) -> str:
    return f"{name[0]}.{name[1]}"


def _spellings(name: TableName) -> set[str]:
    schema, table = name
    alone = {table, identifier(table)}
    return spellings(name) - (set() if schema == "public" else alone)
