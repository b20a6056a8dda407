"""Reading the cursor of a contract: the column by which a table without a log is read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.model import Column, CursorPolicy
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind

TIMES = frozenset({Kind.TIMESTAMP, Kind.TIMESTAMPTZ, Kind.DATE})
"""Kinds of columns that count as times."""

DEFAULT_LOOKBACK = timedelta(minutes=10)
"""Default lookback of a time; for a number the contract must give one."""


def read_cursor(
    path: Path, policy: dict[str, Any] | None, columns: tuple[Column, ...]
) -> CursorPolicy | None:
    """Return the cursor of ``policy`` (``x-cdc.cursor`` of the contract in ``path``). Raises
    ``ContractError``.
    """
    if policy is None or policy.get("field") is None:
        return None
    kinds = {column.name: column.type.kind for column in columns}
    for name in ("field", "event_time"):
        if policy.get(name) is not None and policy[name] not in kinds:
            raise refused(
                path,
                f"x-cdc.cursor.{name}",
                f"{policy[name]!r} is not a column",
                "Name a column of this contract.",
            )
    kind, event_time = kinds[policy["field"]], policy.get("event_time")
    if kind not in TIMES | INTEGERS:
        raise refused(
            path,
            "x-cdc.cursor.field",
            f"{policy['field']!r} is neither a time nor a whole number, so it gives no order",
            "Name a column that grows with every change of its row.",
        )
    if event_time is not None and kinds[event_time] not in TIMES:
        raise refused(
            path, "x-cdc.cursor.event_time", f"{event_time!r} is no time", "Name a timestamp or a date."
        )
    if kind in INTEGERS and event_time is None:
        raise refused(
            path,
            "x-cdc.cursor",
            f"{policy['field']!r} is a number, and a number says nothing of the time of a change",
            "Name the column that does as event_time; it decides the windows.",
        )
    return CursorPolicy(policy["field"], _lookback(path, policy, kind), event_time)


def _lookback(path: Path, policy: dict[str, Any], kind: Kind) -> timedelta | int:
    given = policy.get("lookback")
    if kind in TIMES:
        try:
            return DEFAULT_LOOKBACK if given is None else parse_duration(str(given))
        except ValueError as problem:
            raise refused(
                path, "x-cdc.cursor.lookback", str(problem), "Write an ISO 8601 duration, such as PT10M."
            ) from None
    if not isinstance(given, int):
        raise refused(
            path,
            "x-cdc.cursor.lookback",
            "must be a number for a cursor that is one",
            "Write how many numbers a transaction may take and commit after later ones, such as 1000.",
        )
    return given
