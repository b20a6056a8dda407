"""Columns that contracts have learned by themselves (``x-cdc.evolution``: ``additive``), kept in the home.

A contract file belongs to a person, so capture never writes one. What it finds stands in the home, as the
lines that the file would have, and whoever loads the contracts of the home reads both. Once the file names a
column (``contracts propose --write`` puts the same line there), what stands here counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import encode, read_note

FOLDER = "learned"


class LearnedUnreadable(IngestError):
    """The record of learned columns is there and cannot be read."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Learned:
    """By the table's name in the lake: by column, its line under ``properties``, as JSON."""

    tables: dict[str, dict[str, str]]


class LearnedColumns:
    """The learned columns of one source of a home. Written by its capture."""

    def __init__(self, home: Path, source: str) -> None:
        self._file = home / FOLDER / f"{source}.json"

    def of(self, table: str) -> dict[str, dict[str, Any]]:
        """The columns that the contract ``table`` has learned, each with its line; none if there are none."""
        return {name: json.loads(line) for name, line in self._read().get(table, {}).items()}

    def learn(self, table: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
        """Add ``columns`` to what ``table`` has learned; durable on return. A line that is there stays."""
        held = self._read()
        mine = held.get(table, {})
        new = {
            name: json.dumps(line, ensure_ascii=False) for name, line in columns.items() if name not in mine
        }
        if not new:
            return
        # No failpoint: a folder: one that is there already is as good.
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with failpoint("home.learned"):
            replace(self._file, encode(Learned(held | {table: mine | new})))

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            return read_note(Learned, self._file).tables
        except FileNotFoundError:
            return {}
        except (OSError, Unreadable) as error:
            raise LearnedUnreadable(
                f"{self._file}, which has the columns that contracts have learned, cannot be read: {error}.",
                fix="Restore it from a backup. Or write its columns into the contracts "
                "(omnisupport-ingest contracts propose TABLE --write), and remove it.",
            ) from error


Stamp = tuple[tuple[str, int, int], ...]


def learned_stamp(home: Path) -> Stamp:
    """What tells that ``home`` has learned more: name, time of change and size of each record."""
    found = ((file.name, file.stat()) for file in sorted((home / FOLDER).glob("*.json")))
    return tuple((name, each.st_mtime_ns, each.st_size) for name, each in found)


def with_learned(home: Path, document: dict[str, Any]) -> dict[str, Any]:
    """The contract ``document`` with the columns that the home has learned and the file does not name.

    Each raises the minor part of the version by one.
    """
    policy = document["x-cdc"]
    table = policy.get("name", policy["table"])
    learned = LearnedColumns(home, policy["source"]).of(table)
    new = {name: line for name, line in learned.items() if name not in document["properties"]}
    if not new:
        return document
    return document | {
        "properties": document["properties"] | new,
        "x-cdc": policy | {"version": raised(policy["version"], minor=len(new))},
    }


def raised(version: str, *, major: int = 0, minor: int = 0) -> str:
    """``version`` (major.minor.patch) with a part raised; the parts behind it begin again at 0."""
    parts = [int(part) for part in version.split(".")]
    return f"{parts[0] + major}.0.0" if major else f"{parts[0]}.{parts[1] + minor}.0"
