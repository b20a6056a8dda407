"""The flat form of an event (``ExtractNewRecordState``): a row whose metadata stands beside its columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from omnisupport_ingest.sources.debezium.handling import DEFAULT_PREFIX, Handling

OP, DELETED, TOTAL_ORDER = "op", "deleted", "transaction.total_order"
METADATA = (OP, DELETED, TOTAL_ORDER, "ts_ms", "ts_us", "ts_ns", "schema", "table", "lsn", "sequence", "txId")
"""The metadata that is read; all but the first three are members of Debezium's ``source``."""

_NAMES = frozenset(
    {"__op", "__deleted", "__table", "__db", "__schema", "__lsn", "__txId", "__sequence", "__name"}
    | {"__connector", "__version", "__snapshot", "__xmin", "__origin", "__origin_lsn"}
    | {"__ts_ms", "__ts_us", "__ts_ns"}
)
_NOT_READ = ("db", "name", "connector", "version", "snapshot", "xmin", "origin", "origin_lsn")
"""Members of Debezium's ``source`` that nothing is read from."""
_PREFIXES = ("__source_", "__transaction_", "__debezium")


class Flat:
    """A line of the flat form, taken apart. ``row``: its columns. Its metadata stands beside them, in the row
    or among the headers. ``is_flat``: there is metadata, so the line is of this form."""

    def __init__(self, headers: Mapping[str, Any], value: Mapping[str, Any], handling: Handling) -> None:
        self._handling = handling
        self._held = {**headers, **value}
        self.row = {name: member for name, member in value.items() if not is_metadata(name, handling)}
        self.is_flat = any(self.name_of(each) in self._held for each in (OP, DELETED))

    def about(self, what: str) -> Any:
        """Return the value of ``what``, one of ``METADATA``."""
        return self._held.get(self.name_of(what))

    def name_of(self, what: str) -> str:
        """Return the name of the member that holds ``what``: of two possible names, the one that exists."""
        names = names_of(what, self._handling)
        return next((each for each in names if each in self._held), names[0])

    def is_about(self, name: str) -> bool:
        """Whether a member is metadata of the row, not a column."""
        return is_metadata(name, self._handling)


def is_metadata(name: str, handling: Handling) -> bool:
    """Whether a member of this name is metadata of its row, not a column.

    A name in a contract is a column. Another prefix than Debezium's own may begin names of columns too, so
    with it only the names of known metadata count.
    """
    if name in handling.fields.values():
        return True
    if name in handling.columns:
        return False
    return name in _NAMES or name.startswith(_PREFIXES) or name in _names_with(handling.prefix)


@cache
def _names_with(prefix: str) -> frozenset[str]:
    """Return the names of known metadata with another ``prefix`` than Debezium's own."""
    members = METADATA[3:]
    names = {prefix + each for each in (OP, DELETED, "transaction_total_order", *members)}
    names |= {f"{prefix}source_{each}" for each in members}
    if prefix:
        names |= {f"{prefix}source_{each}" for each in _NOT_READ}
        names |= {prefix + each for each in ("transaction_id", "transaction_data_collection_order")}
    return frozenset(names)


def names_of(what: str, handling: Handling) -> tuple[str, ...]:
    """Return the names that the member for ``what`` may have, the preferred one first; an empty one, which no
    member has, if they are all those of columns."""
    fields, prefix = handling.fields, handling.prefix
    if what == TOTAL_ORDER:
        return (fields.get(what, f"{prefix}transaction_total_order"),)
    for known in (f"source.{what}", what):
        if known in fields:
            return (fields[known],)
    names = (f"{prefix}{what}",) if what in (OP, DELETED) else (f"{prefix}source_{what}", f"{prefix}{what}")
    if prefix == DEFAULT_PREFIX:
        return names
    return tuple(each for each in names if each not in handling.columns) or ("",)
