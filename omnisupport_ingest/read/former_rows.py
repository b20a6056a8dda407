"""What landed of a row while its table had another key, without Spark.

Such events count for nothing in net changes, dimension and history, but raw and deduped events keep their
values. Whoever erases a row has to erase those too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Span
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import PositionTuple, just_below
from omnisupport_ingest.contracts.model import PositionRange, TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events.event_files import EventFiles

_COLUMNS = ("epoch", "commit_lsn", "ordinal", "source_schema", "source_table", "key", "before", "after")


def has_this_key(contract: TableContract, position: PositionTuple) -> bool:
    """Whether events at ``position`` have the key that is in force."""
    return not any(_holds(each, position) for each in contract.other_keys)


def of_this_key(contract: TableContract, spans: Iterable[tuple[str, Span]]) -> list[tuple[str, Span]]:
    """Return ``spans`` without the events below them that had another key, but its text."""
    found = []
    for key, span in spans:
        ends = (end for _, end in contract.other_keys if end is not None and end <= span.through)
        last = max(ends, default=None)
        after = span.after if last is None else max(just_below(last), span.after or just_below(last))
        found.append((key, Span(after, span.through)))
    return found


def former_spans(files: EventFiles, contract: TableContract, keys: Sequence[str]) -> list[tuple[str, Span]]:
    """Return the spans of former keys under which events carried the values of one of ``keys``.

    A former key whose columns are all in the present one is known by these. Else each event tells, by its
    row image, whose it is: all events of that former key in this stretch are taken for the row's.
    """
    rows = [dict(zip(contract.key, json.loads(key), strict=True)) for key in keys]
    found: dict[tuple[str, Span], None] = {}
    for era in contract.key_eras:
        for start, end in contract.other_keys:
            if end is None or start != (era.epoch, era.commit_lsn.value, era.ordinal):
                continue
            span = Span(just_below(start) if any(start) else None, just_below(end))
            if set(era.key) <= set(contract.key):
                names = {compact([row[name] for name in era.key]) for row in rows}
            else:
                names = {name for row in rows for name in _keys_of(files, contract, row, (start, end))}
            found |= {(name, span): None for name in sorted(names)}
    return list(found)


def _keys_of(
    files: EventFiles, contract: TableContract, row: Mapping[str, str], where: PositionRange
) -> Iterator[str]:
    for held in (*files.accepted(contract), *files.withheld):
        for event in _events(held, contract):
            position = event["epoch"], event["commit_lsn"], event["ordinal"]
            if event["key"] is not None and _holds(where, position):
                images = (read_image(event[name]) for name in ("before", "after"))
                if any(image and row.items() <= image.items() for image in images):
                    yield event["key"]


def _events(file: LakeFile, contract: TableContract) -> Iterator[dict[str, Any]]:
    in_path = [name for name, _ in file.partition]
    names = [name for name in _COLUMNS if name not in in_path]
    where = pc.field("source_schema") == contract.schema
    if "source_table" in names:
        where &= pc.field("source_table") == contract.table
    schema = arrow_schema(RAW_TYPE, without=(WINDOW, *in_path))
    rows = pq.read_table(file.uri, schema=schema, columns=names, filters=where, partitioning=None)
    yield from rows.to_pylist()


def _holds(where: PositionRange, position: PositionTuple) -> bool:
    start, end = where
    return position >= start and (end is None or position < end)
