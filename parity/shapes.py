"""What the comparison must know of a table beside its events: types, key, replica identity, defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.landing.manifest import Manifest
from parity.modes import DEFAULT, Modes
from parity.server import Server
from parity.tables import PAST_COLUMNS, SCHEMA
from parity.typed import Typed, typed


@dataclass(frozen=True, slots=True)
class Shape:
    """``types``: column → type, of columns that are gone too. ``key``: as our key has them; none for a
    table without one. ``primary_key``: as Debezium's key has them. ``identity``: what an old row carries.
    ``defaults``: column → its default, as Debezium's JSON has it. ``not_null``: columns that are.
    ``passing``: columns that come and go. ``modes``: how Debezium writes their values.
    """

    types: Mapping[str, str]
    key: Sequence[str]
    primary_key: Sequence[str]
    identity: Sequence[str]
    defaults: Mapping[str, Any]
    not_null: frozenset[str]
    passing: frozenset[str] = frozenset()
    modes: Modes = DEFAULT

    def typed(self, name: str, text: str | None) -> Typed:
        """``text`` of the column ``name`` in Debezium's form."""
        return typed(text, self.types[name], self.modes)


def shapes_of(server: Server, batches: Iterable[Manifest], modes: Modes) -> dict[str, Shape]:
    """The shapes of the tables that ``batches`` have events of, by name: types and keys as we captured them,
    the rest from the server's catalogue."""
    types: dict[str, dict[str, str]] = {}
    keys: dict[str, Sequence[str]] = {}
    for batch in batches:
        for relation in batch.relations:
            of_table = types.setdefault(relation.table, {})
            for name, pg_type in zip(relation.columns, relation.types, strict=True):
                assert of_table.setdefault(name, pg_type) == pg_type, f"{relation.table}.{name} has two types"
            keys[relation.table] = relation.key_columns
    found = {}
    for table, of_table in types.items():
        of_table |= {name: pg_type for name, (pg_type, _) in PAST_COLUMNS.get(table, {}).items()}
        defaults, not_null = _columns(server, table)
        defaults |= {name: default for name, (_, default) in PAST_COLUMNS.get(table, {}).items()}
        identity = list(of_table) if _is_full(server, table) else keys[table]
        found[table] = Shape(
            of_table,
            keys[table],
            _primary_key(server, table),
            identity,
            defaults,
            not_null,
            frozenset(PAST_COLUMNS.get(table, ())),
            modes,
        )
    return found


def _columns(server: Server, table: str) -> tuple[dict[str, Any], frozenset[str]]:
    rows = server.execute(
        "SELECT attname, attnotnull, to_json(d.value) FROM pg_attribute a"
        " LEFT JOIN LATERAL (SELECT adbin, pg_get_expr(adbin, adrelid) AS value FROM pg_attrdef"
        "   WHERE adrelid = attrelid AND adnum = attnum AND attgenerated = '') d ON true"
        f" WHERE attrelid = '{SCHEMA}.\"{table}\"'::regclass AND attnum > 0 AND NOT attisdropped"
    )
    defaults = {name: _constant(text) for name, _, text in rows if text is not None}
    return defaults, frozenset(name for name, not_null, _ in rows if not_null)


def _constant(expression: str) -> Any:
    """``'none'::text`` or ``7``, the only kinds of default here."""
    return expression.split("'")[1] if expression.startswith("'") else int(expression)


def _primary_key(server: Server, table: str) -> Sequence[str]:
    rows = server.execute(
        "SELECT attname FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)"
        f" WHERE indrelid = '{SCHEMA}.\"{table}\"'::regclass AND indisprimary"
    )
    return [name for (name,) in rows]


def _is_full(server: Server, table: str) -> bool:
    ((identity,),) = server.execute(
        f"SELECT relreplident FROM pg_class WHERE oid = '{SCHEMA}.\"{table}\"'::regclass"
    )
    return bool(identity == "f")
