"""What landed of a row while its table had another key, without Spark.

Such events count for nothing in net changes, dimension and history, but raw and deduped events keep their
values. Whoever erases a row has to erase those too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Span
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import just_below
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events.event_files import EventFiles

_BATCH_ROWS = 4_096
_WITHOUT_END = (1 << 31, 0, 0)
"""A position above every event."""

_COLUMNS = ("epoch", "commit_lsn", "ordinal", "source_schema", "source_table", "key", "before", "after")


def of_this_key(contract: TableContract, spans: Iterable[tuple[str, Span]]) -> list[tuple[str, Span]]:
    """Return ``spans`` cut off where the present key begins: below, their texts are keys of other rows."""
    since = contract.key_since
    if since is None:
        return list(spans)
    begins = just_below((since.epoch, since.commit_lsn.value, since.ordinal))
    return [(key, Span(max(begins, span.after or begins), span.through)) for key, span in spans]


def former_spans(files: EventFiles, contract: TableContract, keys: Sequence[str]) -> list[tuple[str, Span]]:
    """Return the spans of other eras in which events carried the values of one of ``keys``.

    An era whose key has only columns of the present one is known by these. Elsewhere each event tells, by
    its row image, whose it is: all events of that former key in this era are taken for the row's.
    """
    rows = [dict(zip(contract.key, json.loads(key), strict=True)) for key in keys]
    places = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in contract.key_eras]
    found: dict[tuple[str, Span], None] = {}
    for number, era in enumerate(contract.key_eras):
        if number == contract.key_era:
            continue
        start, end = places[number], places[number + 1] if number + 1 < len(places) else _WITHOUT_END
        span = Span(just_below(start) if number else None, just_below(end))
        if set(era.key) <= set(contract.key):
            names = {compact([row[name] for name in era.key]) for row in rows}
        else:
            names = _keys_of(files, contract, rows, span)
        found |= {(name, span): None for name in sorted(names)}
    return list(found)


def _keys_of(
    files: EventFiles, contract: TableContract, rows: Sequence[Mapping[str, str]], span: Span
) -> set[str]:
    """Return the keys of the events in ``span`` whose row images have the values of one of ``rows``."""
    found = set()
    for held in (*files.accepted(contract), *files.withheld):
        for event in _events(held, contract, span):
            position = event["epoch"], event["commit_lsn"], event["ordinal"]
            if event["key"] in found or event["key"] is None or not span.holds(position):
                continue
            images = [image for name in ("before", "after") if (image := read_image(event[name]))]
            if any(row.items() <= image.items() for row in rows for image in images):
                found.add(event["key"])
    return found


def _events(file: LakeFile, contract: TableContract, span: Span) -> Iterator[dict[str, Any]]:
    """Yield the events of the table in ``file`` that may lie in ``span``, some thousand in memory at once."""
    in_path = [name for name, _ in file.partition]
    names = [name for name in _COLUMNS if name not in in_path]
    where = (pc.field("source_schema") == contract.schema) & (pc.field("epoch") <= span.through[0])
    if span.after is not None:
        where &= pc.field("epoch") >= span.after[0]
    if "source_table" in names:
        where &= pc.field("source_table") == contract.table
    schema = arrow_schema(RAW_TYPE, without=(WINDOW, *in_path))
    events = ds.dataset(file.uri, schema=schema, format="parquet").scanner(
        columns=names, filter=where, batch_size=_BATCH_ROWS, use_threads=False
    )
    for batch in events.to_batches():
        yield from batch.to_pylist()
