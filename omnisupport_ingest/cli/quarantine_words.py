"""Quarantined events and decisions on them, in words for a person and as JSON values for a program."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnisupport_ingest.stages.quarantined import Quarantined
    from omnisupport_ingest.stages.reviews import Review

OPERATIONS = {
    "c": "create",
    "u": "update",
    "d": "delete",
    "r": "snapshot row",
    "t": "truncate",
    "b": "snapshot boundary",
    "m": "message",
}
_TEXTS = ("key", "moved_from_key", "before", "after", "envelope")
"""The columns that hold values of the row."""


def as_json(row: Quarantined) -> dict[str, Any]:
    """What is known of an event besides the values of its row."""
    return {
        "id": str(row.event),
        "window": row.window,
        "reason": row.reason,
        "detector": row.detector,
        "rules": list(row.rules),
        "table": row.table,
        "op": row.op,
        "source_ts": row.source_ts.isoformat(),
        "first_seen": row.first_seen.isoformat(),
        "batch_id": row.batch_id,
        "file_name": row.file_name,
        "file_row": row.file_row,
        "review_state": row.state,
        "waits_for_run": row.waits,
        "review": review_json(row.review) if row.review else None,
    }


def review_json(review: Review) -> dict[str, Any]:
    return {
        "id": str(review.event),
        "decision": review.decision,
        "by": review.reviewer,
        "why": review.why,
        "at": review.reviewed_at.isoformat(),
        "window": review.window,
        "reason": review.reason,
    }


def counts(rows: Sequence[Quarantined]) -> dict[str, Any]:
    """How many events there are, by reason and by state."""
    return {
        "events": len(rows),
        "by_reason": dict(Counter(row.reason for row in rows).most_common()),
        "by_state": dict(Counter(row.state for row in rows).most_common()),
    }


def in_list(row: Quarantined) -> Iterator[str]:
    """The lines of an event in a list."""
    rules = f" ({', '.join(row.rules)})" if row.rules else ""
    yield f"{row.event}  {row.reason}{rules}  {state_of(row)}"
    yield f"    {row.table}, {operation(row)}, window {row.window}, first seen {moment(row.first_seen)}"
    yield f"    from {came_from(row)}"


def state_of(row: Quarantined) -> str:
    return f"{row.state}, waits for a run" if row.waits else row.state


def operation(row: Quarantined) -> str:
    return OPERATIONS.get(row.op, row.op)


def came_from(row: Quarantined) -> str:
    """The line of a file, or the batch, that brought the event."""
    if row.file_name is None:
        return f"batch {row.batch_id}"
    return row.file_name if row.file_row is None else f"{row.file_name}, line {row.file_row}"


def whole(row: Quarantined, history: Sequence[Review], values: Mapping[str, Any]) -> Iterator[str]:
    """Everything about an event but the values of its row."""
    yield f"{row.event}: {row.reason}, {state_of(row)}"
    yield f"  found by         {row.detector or 'unknown'}"
    yield f"  rules broken     {', '.join(row.rules) or 'none'}"
    yield f"  table            {row.table}, {operation(row)}"
    yield f"  committed        {moment(row.source_ts)}, window {row.window}"
    yield f"  transaction      {values['tx_id'] if values['tx_id'] is not None else 'unknown'}"
    yield f"  first seen       {moment(row.first_seen)}"
    yield f"  batch            {row.batch_id}"
    if row.file_name is not None:
        yield f"  file             {row.file_name}"
        yield f"  line             {row.file_row if row.file_row is not None else 'unknown'}"
    yield from reviews(history)


def reviews(history: Sequence[Review]) -> Iterator[str]:
    """Every decision on an event, the first one first."""
    if not history:
        yield "  reviews          none"
    for each in history:
        done = f"{each.decision} by {each.reviewer}, {moment(each.reviewed_at)}"
        yield f"  review           {done}: {each.why}"


def sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the row without the values: the columns of each image and the length of each text."""
    return {name: _size(name, values[name]) for name in _TEXTS}


def texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """The values of the row, protected by the policies of its contract."""
    return {name: values[name] for name in _TEXTS}


def sizes_in_words(values: Mapping[str, Any]) -> Iterator[str]:
    for name, size in sizes(values).items():
        if size is None:
            continue
        if isinstance(size, int):
            yield f"  {name:<15}  {size} characters"
            continue
        yield f"  {name:<15}  {len(size)} columns, with the length of their text:"
        for column, length in size.items():
            yield f"                   {column}: {'null' if length is None else length}"
    if values["unchanged"]:
        yield f"  not sent         {', '.join(values['unchanged'])}"


def texts_in_words(values: Mapping[str, Any]) -> Iterator[str]:
    for name, text in texts(values).items():
        if text is not None:
            yield f"  {name:<15}  {text}"
    if values["unchanged"]:
        yield f"  not sent         {', '.join(values['unchanged'])}"


def moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _size(name: str, text: str | None) -> int | dict[str, int | None] | None:
    if text is None:
        return None
    if name in ("before", "after"):
        from omnisupport_ingest.cdc.images import read_image

        image = read_image(text)
        if image is not None:
            return {column: None if value is None else len(value) for column, value in image.items()}
    return len(text)


def printed(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)
