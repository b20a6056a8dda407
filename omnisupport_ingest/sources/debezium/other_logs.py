"""The position of an event from another database than PostgreSQL: MySQL's or SQL Server's log.

**MySQL, MariaDB**: ``source.file`` (the number at its end), ``source.pos`` and ``source.row``. A server
writes transactions to its binary log as they commit, one after the other. The two events of a key change
share a position, as they do in PostgreSQL; the identity tells them apart. A log that begins again (``RESET
MASTER``, another server) begins at a lower number; a person must then begin a new epoch.

**SQL Server**: ``source.change_lsn`` and ``source.event_serial_no``. A row stays locked from its change to
the commit, so of two changes of one key the one that committed first has the lower ``change_lsn``.

A row of the first snapshot stands below every change of its epoch. What a row of an incremental snapshot saw
cannot be compared with these logs, so such a row has no position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.positions import BINLOG, CHANGE_LSN, ORDER_BITS, SNAPSHOT_BASE

MYSQL = ("mysql", "mariadb")
"""A tuple: what stands in the place of the name may be of any kind, such as a list."""
SQL_SERVER = "sqlserver"

_FILE_NUMBER = re.compile(r"\.([0-9]{1,15})$")
_LSN = re.compile(r"([0-9a-fA-F]{8}):([0-9a-fA-F]{8}):([0-9a-fA-F]{4})")
_POS_LIMIT = 1 << 48

PositionInEpoch = tuple[int, int]
"""Commit and ordinal, as a position has them."""


def position_of(source: Mapping[str, Any], op: str) -> tuple[PositionInEpoch, str] | None:
    """Return the position of the event of ``source`` and the order that it belongs to.

    None for a connector whose log is not known here. ``LineFault`` if the position is missing or wrong."""
    connector = source.get("connector")
    if connector in MYSQL:
        order = BINLOG
    elif connector == SQL_SERVER:
        order = CHANGE_LSN
    else:
        return None
    if op == "r":
        return _of_snapshot(source), order
    return (_in_binlog(source) if order == BINLOG else _in_log(source)), order


def _of_snapshot(source: Mapping[str, Any]) -> PositionInEpoch:
    if source.get("snapshot") == "incremental":
        raise _no_position("it was read by an incremental snapshot, which says nothing of what it saw")
    return 0, SNAPSHOT_BASE + 1


def _in_binlog(source: Mapping[str, Any]) -> PositionInEpoch:
    name, pos, row = source.get("file"), source.get("pos"), source.get("row")
    row = 0 if row is None else row
    match = _FILE_NUMBER.search(name) if isinstance(name, str) else None
    if match is None or not _within(pos, _POS_LIMIT) or not _within(row, 1 << ORDER_BITS):
        raise _no_position("its source.file, source.pos and source.row are no position in a binary log")
    return int(match[1]), pos << ORDER_BITS | row


def _in_log(source: Mapping[str, Any]) -> PositionInEpoch:
    change_lsn, serial = source.get("change_lsn"), source.get("event_serial_no")
    serial = 0 if serial is None else serial
    match = _LSN.fullmatch(change_lsn) if isinstance(change_lsn, str) else None
    if match is None or not _within(serial, 1 << 32) or int(match[1], 16) >= 1 << 31:
        raise _no_position("its source.change_lsn and source.event_serial_no are no position in a log")
    file, block, slot = (int(each, 16) for each in match.groups())
    return file << 32 | block, slot << 32 | serial


def _within(value: Any, limit: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _no_position(problem: str) -> LineFault:
    return LineFault(problem, "Land it with a definition of its source that orders events by arrival.")
