"""One change of Debezium, whatever the form of its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from omnisupport_ingest.sources.debezium.positions import order_of


@dataclass(frozen=True, slots=True)
class Change:
    """A change, a row of a snapshot, or a truncate. Its values are those of the JSON.

    ``op``: ``c``, ``u``, ``d``, ``r`` or ``t``. ``before`` and ``after``: column → value. ``key``: the
    record's key, column → value; None if the file has none. ``fields`` and ``key_fields``: the Connect
    schemas of the columns by name, empty without a schema. ``old_key``: on the ``c`` of a key change, the key
    before it. ``ts``: commit time. ``commit_before``: ``sequence[0]``. ``position``: commit and ordinal, if
    they do not follow from PostgreSQL's ``lsn``; ``ordered_by`` is then the order to which they belong.
    ``flat``: whether it came in the flat form.
    """

    op: str
    schema: str | None
    table: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    key: Mapping[str, Any] | None
    old_key: Mapping[str, Any] | None
    fields: Mapping[str, Mapping[str, Any]]
    key_fields: Mapping[str, Mapping[str, Any]]
    ts: datetime
    lsn: int | None
    commit_before: int | None
    tx_id: int | None
    total_order: int | None
    position: tuple[int, int] | None = None
    ordered_by: str = ""
    flat: bool = False

    @property
    def order(self) -> str:
        """The order that the change belongs to: one of those in ``positions``."""
        return self.ordered_by or order_of(self.lsn, self.total_order)


@dataclass(frozen=True, slots=True)
class Passed:
    """A line that is not a change of a row. ``kind``: its name in the report."""

    kind: str


TOMBSTONE = Passed("tombstone")
MESSAGE = Passed("logical message")
MARKER = Passed("transaction marker")
HEARTBEAT = Passed("heartbeat")
SCHEMA_CHANGE = Passed("schema change")
SIGNAL = Passed("signal")
NOTIFICATION = Passed("notification")
