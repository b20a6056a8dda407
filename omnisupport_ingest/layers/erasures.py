"""The ledger of erasures: the rows whose values people had erased.

Judging events depends on this ledger, so an erasure makes the windows that hold events of its row stale.
Events of the row that land later, in any window, are checked against the same ledger.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc.erasing import Erasures, KeyPlace, Span
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.ledger import SEQUENCE, refuse_row, require_rows
from omnisupport_ingest.layers.workspace import Workspace

_NAME = "erasure_ledger"
_REQUIRED = frozenset(("source_schema", "source_table", "key_hash", "through", "windows", SEQUENCE))
_SHA256 = re.compile("[0-9a-f]{64}")

VERSION = "erasures:"
"""Prefix of the version of a ``deduped_events`` window that names the erasures it was judged with."""


class ErasuresLost(IngestError):
    """A window was judged with erasures that the erasure ledger does not have: judged again, the erased
    values would come back.

    Fix: Restore ``erasure_ledger`` from a backup of the lake, then run again. Nothing was changed.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Erasure:
    """One key whose events within ``span`` were erased. ``key_hash``: SHA-256 of the key's text.

    ``windows``: those that may have held such events then. ``erased_at`` is timezone-aware; ``sequence``
    orders commands, and those of one command share it.
    """

    source_schema: str
    source_table: str
    key_hash: str
    span: Span
    windows: tuple[str, ...]
    erased_by: str
    why: str
    erased_at: datetime
    sequence: int

    @property
    def place(self) -> KeyPlace:
        return self.source_schema, self.source_table, self.key_hash


@dataclass(frozen=True)
class ErasureLedger:
    """Every erasure of one source, in the order in which they were made."""

    erasures: tuple[Erasure, ...]

    @classmethod
    def open(cls, workspace: Workspace, source: str) -> ErasureLedger:
        """Read the ledger; empty if nothing was erased. Raises ``LedgerUnreadable``."""
        return cls.of_entries(workspace.erasures(source).entries())

    @classmethod
    def of_entries(cls, entries: pa.Table) -> ErasureLedger:
        """From rows of the ledger, by ``sequence`` (columns of ``ERASURE_TYPE``). ``LedgerUnreadable``."""
        require_rows(entries, _NAME, _REQUIRED)
        for row, hashed in enumerate(entries["key_hash"].to_pylist()):
            if not _SHA256.fullmatch(hashed):
                refuse_row(entries, _NAME, row, "key_hash is no SHA-256")
        return cls(tuple(map(_erasure, entries.to_pylist())))

    def in_force(self) -> Erasures:
        """Every erasure, of whatever window: a late event must not bring back an erased value."""
        found: dict[KeyPlace, set[Span]] = {}
        for each in self.erasures:
            found.setdefault(each.place, set()).add(each.span)
        return Erasures({place: tuple(sorted(spans, key=_order)) for place, spans in found.items()})

    def digest(self, window: str) -> str | None:
        """Return a digest (SHA-256) of the erasures that name ``window``; None if none does.

        The same erasures give the same digest, whoever made them, when, and how often.
        """
        erased = {(each.place, each.span) for each in self._by_window.get(window, ())}
        if not erased:
            return None
        lines = sorted([*place, span.after or (), span.through] for place, span in erased)
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()

    def windows(self) -> list[str]:
        """Return the windows that some erasure names, sorted."""
        return sorted(self._by_window)

    def of(self, place: KeyPlace, span: Span) -> tuple[Erasure, ...]:
        """The erasures of one key and span, oldest first."""
        return tuple(each for each in self.erasures if each.place == place and each.span == span)

    @cached_property
    def _by_window(self) -> dict[str, list[Erasure]]:
        found: dict[str, list[Erasure]] = {}
        for each in self.erasures:
            for window in each.windows:
                found.setdefault(window, []).append(each)
        return found


def refuse_lost(
    workspace: Workspace, source: str, window: str, held: Sequence[str], wanted: Sequence[str]
) -> None:
    """Raise ``ErasuresLost`` if ``window`` was judged with erasures and the ledger has none for it now.

    ``held``: the versions it was judged with; ``wanted``: the versions it should have.
    """
    lost, known = (any(each.startswith(VERSION) for each in versions) for versions in (held, wanted))
    if lost and not known:
        folder = workspace.erasures(source).folder
        raise ErasuresLost(
            f"Window {window} of {source}/deduped_events was judged with erasures, and {folder} has none of "
            "them: what was erased would come back.",
            fix=f"Restore {folder} from a backup of the lake, then run again. Nothing was changed.",
        )


def _order(span: Span) -> tuple[object, ...]:
    return span.through, span.after or ()


def _erasure(row: Mapping[str, Any]) -> Erasure:
    fields = dict(row)
    after, through = fields.pop("after"), fields.pop("through")
    span = Span(None if after is None else tuple(after.values()), tuple(through.values()))
    return Erasure(span=span, windows=tuple(fields.pop("windows")), **fields)
