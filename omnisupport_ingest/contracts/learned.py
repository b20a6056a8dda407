"""Columns that contracts have learned by themselves (``x-cdc.evolution``: ``additive``), recorded in the
home.

A contract file belongs to a person, so capture never writes one. It records new columns in the home, as
entries that the file would have; loading the contracts of the home reads both. Once the file names a column
(``contracts propose --write`` adds the same entry), the record of it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.model import BLOCK
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.locks import locked_folder
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
    """The learned columns of one source of a home. Its capture adds to them; who writes the contract file
    removes those that the contract has lost."""

    def __init__(self, home: Path, source: str) -> None:
        self._file = home / FOLDER / f"{source}.json"

    def of(self, table: str) -> dict[str, dict[str, Any]]:
        """Return the columns that the contract ``table`` has learned, each with its entry."""
        return {name: json.loads(line) for name, line in self._read().get(table, {}).items()}

    def learn(self, table: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
        """Add ``columns`` to those that ``table`` has learned; durable on return. Existing entries stay."""
        # No failpoint: a folder that exists already serves as well.
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = {name: json.dumps(line, ensure_ascii=False) for name, line in columns.items()}
        self._change(table, lambda mine: mine | {name: lines[name] for name in lines if name not in mine})

    def forget_others(self, table: str, names: Collection[str]) -> None:
        """Remove what ``table`` has learned except the columns ``names``; durable on return.

        For when a person has taken a column out of the contract, which would come back from here.
        """
        self._change(table, lambda mine: {name: line for name, line in mine.items() if name in names})

    def forget_defaults(self, table: str, names: Collection[str]) -> None:
        """Remove the defaults, which older rows have, of the learned columns ``names`` of ``table``; durable
        on return."""

        def without(name: str, line: str) -> str:
            entry = json.loads(line)
            if name not in names or "default" not in entry:
                return line
            del entry["default"]
            return json.dumps(entry, ensure_ascii=False)

        self._change(table, lambda mine: {name: without(name, line) for name, line in mine.items()})

    def _change(self, table: str, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Replace what ``table`` has learned by what ``change`` makes of it."""
        if not self._file.parent.exists():
            return
        with locked_folder(self._file.parent):
            held = self._read()
            mine = held.get(table, {})
            now = change(mine)
            if now != mine:
                with failpoint("home.learned"):
                    replace(self._file, encode(Learned(held | {table: now})))

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


def with_learned(home: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the contract ``document`` with the learned columns that it does not name.

    Each raises the minor part of the version by one, and is optional under ``block``.
    """
    policy = document["x-cdc"]
    table = policy.get("name", policy["table"])
    learned = LearnedColumns(home, policy["source"]).of(table)
    new = {name: line for name, line in learned.items() if name not in document["properties"]}
    if not new:
        return document
    more: dict[str, Any] = {"version": raised(policy["version"], minor=len(new))}
    if policy.get("evolution") == BLOCK:
        # Rows from before they were learned are without them.
        more["optional_columns"] = [*dict.fromkeys([*policy.get("optional_columns", ()), *new])]
    return document | {"properties": document["properties"] | new, "x-cdc": policy | more}


def raised(version: str, *, major: int = 0, minor: int = 0) -> str:
    """Return ``version`` (major.minor.patch) with one part raised and the following parts at 0."""
    parts = [int(part) for part in version.split(".")]
    return f"{parts[0] + major}.0.0" if major else f"{parts[0]}.{parts[1] + minor}.0"
