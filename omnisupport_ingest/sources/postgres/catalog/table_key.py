"""The key by which changes of a table can be told apart, and what to do for a table without one."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveIndex, LiveTable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified


class NoKey(IngestError):
    """Nothing at the source tells the rows of a table apart in its changes."""


def key_of(table: LiveTable) -> LiveIndex:
    """The index whose columns are the key of ``table``: the primary key where the stream carries it.

    ``NoKey`` names every way to give the table one.
    """
    name, primary = qualified(table.schema, table.table), table.primary_key
    if table.replica_identity == "n":
        raise NoKey(
            f"{table.full_name} has replica identity NOTHING: its updates and deletes name no row.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;" if primary else _ways_out(table),
        )
    usable = [
        index
        for index in table.unique
        if not index.deferrable and set(index.columns) <= table.identity and _may_be_key(table, index)
    ]
    if usable:
        # The primary key is first.
        return usable[0]
    if primary is not None and primary.deferrable:
        raise NoKey(
            f"The primary key of {table.full_name} is deferrable: two rows may share a key for a time, and "
            "it is no replica identity.",
            fix=f"ALTER TABLE {name} DROP CONSTRAINT {identifier(primary.name)}, ADD CONSTRAINT"
            f" {identifier(primary.name)} PRIMARY KEY ({_listed(primary.columns)}) NOT DEFERRABLE;",
        )
    if primary is not None and not _may_be_key(table, primary):
        raise NoKey(
            f"The primary key of {table.full_name} has a column that the server generates; the stream does "
            "not carry it.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX ...; of an index on other columns, or "
            "leave the table out: capture does not publish a table without a contract.",
        )
    if table.replica_identity == "i" and primary is not None:
        raise NoKey(
            f"The index that was the replica identity of {table.full_name} is gone.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;",
        )
    if table.replica_identity == "f":
        problem = (
            f"{table.full_name} has replica identity FULL, but nothing that keeps its rows apart: two equal "
            "rows would be one."
        )
    else:
        problem = (
            f"{table.full_name} has no primary key and no other replica identity: its updates and deletes "
            "could not name their row."
        )
    raise NoKey(problem, fix=_ways_out(table))


def _may_be_key(table: LiveTable, index: LiveIndex) -> bool:
    columns = [table.column(name) for name in index.columns]
    return all(column is not None and not column.generated for column in columns)


def _ways_out(table: LiveTable) -> str:
    name = qualified(table.schema, table.table)
    candidates = [index for index in table.unique if not index.deferrable and _may_be_key(table, index)]
    if candidates:
        by_index = f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {identifier(candidates[0].name)};"
    else:
        by_index = (
            f"CREATE UNIQUE INDEX ... ON {name} (...); on NOT NULL columns, then "
            f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX ...;"
        )
    return (
        f"one of\n  ALTER TABLE {name} ADD PRIMARY KEY (...);\n  {by_index}\n"
        "  or leave it out: capture does not publish a table without a contract.\n"
        "  (REPLICA IDENTITY FULL alone is no way: it sends whole rows, and does not keep them apart. For\n"
        "  columns that you know to do that, write a contract by hand: docs/source.md, tables without a key.)"
    )


def _listed(columns: tuple[str, ...]) -> str:
    return ", ".join(identifier(column) for column in columns)
