"""Epoch records: which history of the source an event belongs to. Each epoch has a number, allocated durably.

A new epoch begins when continuity cannot be proved (another server, timeline or slot, or a gap). Its record
says why, and describes the server at that moment.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.landing.errors import EpochContested, ManifestUnreadable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.storage import create_exclusively, put_back

FORMAT_VERSION = 2
"""Format version of an epoch record. Version 1 has no ``rows_from``."""

_RESTORE = "Restore this file from a backup of the landing folder."

_RECORD = re.compile(r"([0-9]{6,9})\.json")


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """The server and slot that an epoch reads from.

    ``consistent_point``: where the slot's stream starts, as its creation reported it. ``session_settings``:
    settings of the connections that decide how values are written as text.
    """

    system_identifier: str
    timeline: int
    slot: str
    consistent_point: Lsn
    database: str
    server_version: str
    session_settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch that has begun. ``facts`` is None if the source is not a server (files).

    ``rows_from``: of a source that is read by a cursor. Rows with an earlier time land in the window of this
    moment, as their own window may be sealed; None: in their own.
    """

    number: int
    reason: str
    began_at: datetime
    facts: EpochFacts | None
    rows_from: datetime | None = None
    format_version: int = FORMAT_VERSION


_FORMAT = Format(EpochRecord, FORMAT_VERSION, {1: lambda document: {**document, "rows_from": None}})


def epoch_numbers(folder: Path) -> list[int]:
    """Return the numbers of the epochs recorded in ``folder``, ascending."""
    with os.scandir(folder) as entries:
        matches = [_RECORD.fullmatch(entry.name) for entry in entries]
    return sorted(int(match.group(1)) for match in matches if match)


def read_epoch(folder: Path, number: int) -> EpochRecord:
    """Return the record of one epoch. Raises the errors of ``encoding.decode``."""
    file = _file(folder, number)
    try:
        record = decode(_FORMAT, content_of(file), file)
    except FileNotFoundError:
        raise ManifestUnreadable(f"{file} does not exist.", fix=put_back(file, _RESTORE)) from None
    if record.number != number:
        raise ManifestUnreadable(
            f"{file} cannot be read: number is {record.number}, not the name of the file.",
            fix=put_back(file, _RESTORE),
        )
    return record


def write_epoch(folder: Path, record: EpochRecord) -> None:
    """Make ``record`` durable. Raises ``EpochContested`` if an epoch of that number has begun already."""
    file = _file(folder, record.number)
    with failpoint("landing.epoch"):
        created = create_exclusively(file, encode(record))
    if not created:
        raise EpochContested(
            f"Epoch {record.number} has just been begun by another process ({file}).",
            fix="Leave one capture per source running; it uses the epoch that is there.",
        )


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"
