"""Columns that contracts have learned by themselves (``x-cdc.evolution``: ``additive``), recorded in the
home.

A contract file belongs to a person, so capture never writes one. It records new columns in the home, as
entries that the file would have; loading the contracts of the home reads both. Once the file names a column
(``contracts propose --write`` adds the same entry), the record of it is ignored.
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
    """The file with the columns that contracts have learned cannot be read.

    Fix: Restore it from a backup; or write its columns into the contracts, and remove it.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Learned:
    """By table (its name in the lake) and column, the entry under ``properties``, as JSON."""

    tables: dict[str, dict[str, str]]


class LearnedColumns:
    """The learned columns of one source of a home. Written by its capture."""

    def __init__(self, home: Path, source: str) -> None:
        self._file = home / FOLDER / f"{source}.json"

    def of(self, table: str) -> dict[str, dict[str, Any]]:
        """Return the columns that the contract ``table`` has learned, each with its entry."""
        return {name: json.loads(line) for name, line in self._read().get(table, {}).items()}

    def learn(self, table: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
        """Add ``columns`` to those that ``table`` has learned; durable on return. Existing entries stay."""
        held = self._read()
        mine = held.get(table, {})
        new = {
            name: json.dumps(line, ensure_ascii=False) for name, line in columns.items() if name not in mine
        }
        if not new:
            return
        # No failpoint: a folder that exists already serves as well.
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
    """Return name, time of change (ns) and size of each record, by which new columns are noticed."""
    found = ((file.name, file.stat()) for file in sorted((home / FOLDER).glob("*.json")))
    return tuple((name, each.st_mtime_ns, each.st_size) for name, each in found)


def with_learned(home: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the contract ``document`` with the learned columns that it does not name.

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
    """Return ``version`` (major.minor.patch) with one part raised and the following parts at 0."""
    parts = [int(part) for part in version.split(".")]
    return f"{parts[0] + major}.0.0" if major else f"{parts[0]}.{parts[1] + minor}.0"
