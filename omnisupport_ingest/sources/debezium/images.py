"""Makes the images that land from the columns of one event: column → PostgreSQL's text, or null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.faults import LineFault, ValueFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import is_unavailable
from omnisupport_ingest.sources.debezium.values import text_of
from omnisupport_ingest.sources.manifests.row_text import text as json_text

_FIX = (
    "Have the connector write its values with their schemas (the converter's schemas.enable=true), or by its "
    "default modes; say with --decimals and --binary how it writes decimals and bytes; or correct the "
    "contract's type."
)

Image = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Images:
    """What lands of an event: its key as a JSON array, its images as JSON objects, its unsent columns."""

    key: str | None
    before: str | None
    after: str | None
    unchanged: list[str] | None
    moved_from: str | None


NO_IMAGES = Images(None, None, None, None, None)

NOT_WHOLE = "[null]"
"""A value of ``moved_from`` that is the key of no row. Judging keeps out every event that has it."""


class Reader:
    """Reads the images of one table. ``contract`` is None for a table without one."""

    def __init__(self, contract: TableContract | None, handling: Handling) -> None:
        columns = contract.source_columns if contract is not None else ()
        self._targets = {column.name: Target.of(column.pg_type) for column in columns}
        self._key = contract.key if contract is not None else None
        self._handling = handling

    def read(self, change: Change) -> Images:
        """Return the images of ``change``. Raises ``LineFault``, which names the column that cannot be
        read."""
        if change.op == "t":
            return NO_IMAGES
        sent = change.before if change.op == "d" else change.after
        if sent is None and change.op != "d":
            raise LineFault(f"it has no after, which an event of op {change.op} carries", "Correct the line.")
        unchanged = sorted(name for name, value in (change.after or {}).items() if is_unavailable(value))
        after = None if change.op == "d" else self._image(change.after or {}, change.fields)
        key = self._key_of(change, sent or {})
        return Images(
            key=compact(list(key.values())) if key else None,
            before=compact(before) if (before := self._before(change, key)) else None,
            after=None if after is None else compact(after),
            unchanged=unchanged or None,
            moved_from=self._moved_from(change),
        )

    def read_oddly(self, change: Change) -> Images:
        """Return the images of a change that ``read`` refuses.

        A value that cannot be read lands as the text that was delivered; the images are marked, so that none
        of their values counts. Raises ``LineFault`` if the key cannot be read.
        """
        sent = change.before if change.op == "d" else change.after
        key = self._key_of(change, sent or {})
        row = {name: value for name, value in (change.after or {}).items() if not is_unavailable(value)}
        after = {name: json_text(value) for name, value in row.items()}
        return Images(
            key=compact(list(key.values())) if key else None,
            before=compact(key) if change.op == "d" and key else None,
            after=None if change.op == "d" or change.after is None else compact(after),
            unchanged=None,
            moved_from=NOT_WHOLE,
        )

    def _before(self, change: Change, key: Image) -> Image:
        # The connector sends the replica identity of a deleted row, by default the key, and makes up the
        # other columns. The event does not say which columns are real.
        if change.op == "d":
            return key
        return self._image(change.before, change.fields) if change.op == "u" and change.before else {}

    def _key_of(self, change: Change, row: Mapping[str, Any]) -> Image:
        names: Sequence[str] = self._key if self._key is not None else tuple(change.key or ())
        key: Image = {}
        for name in names:
            from_row = name in row and not is_unavailable(row[name])
            holder, fields = (row, change.fields) if from_row else (change.key or {}, change.key_fields)
            key[name] = self._text(name, holder.get(name), fields.get(name, {}))
            if key[name] is None and self._key is not None:
                raise LineFault(
                    f"its key column {name!r} has no value",
                    "Take the key that the contract names into the events: a primary key, or the columns of "
                    "the replica identity; or correct x-cdc.key.",
                )
        return key

    def _moved_from(self, change: Change) -> str | None:
        """Return the old key of a key change, if its ``d`` certainly stands just below it; else None.

        Debezium writes the ``d`` and the ``c`` of a key change one after the other at one LSN. So with
        ``total_order`` they are neighbours, unless the lower bits of the position wrap around between them.
        """
        old, order = change.old_key, change.total_order
        if change.op != "c" or old is None or not order or not order % (1 << 14) or self._key is None:
            return None
        if change.lsn is None or not all(name in old for name in self._key):
            return None
        return compact([self._text(name, old[name], change.key_fields.get(name, {})) for name in self._key])

    def _image(self, row: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]) -> Image:
        return {
            name: self._text(name, value, fields.get(name, {}))
            for name, value in row.items()
            if not is_unavailable(value)
        }

    def _text(self, name: str, value: Any, schema: Mapping[str, Any]) -> str | None:
        target = self._targets.get(name)
        try:
            return text_of(value, schema, target or Target(), self._handling)
        except ValueFault as fault:
            if target is None:
                # No contract names the column; raw keeps its value as delivered.
                return json_text(value)
            raise LineFault(f"column {name!r}, {target.name} by its contract: {fault}", _FIX) from None
