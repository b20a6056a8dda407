"""The ledger of erasures: the rows whose values people had erased.

Judging events depends on this ledger, so an erasure makes the windows that hold events of its row stale.
Events of the row that land later, in any window, are checked against the same ledger.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc.erasing import Erasures, KeyPlace, Span
from omnisupport_ingest.cdc.subject_values import ErasedSubjects
from omnisupport_ingest.contracts.at_rest import subject_tables
from omnisupport_ingest.contracts.erased_subjects import ErasedName, names_once_erased
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.withdrawn import readable_withdrawn
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.lake.ledger import SEQUENCE, refuse_row, require_rows
from omnisupport_ingest.layers.workspace import Workspace

_NAME = "erasure_ledger"
_REQUIRED = frozenset(("source_schema", "source_table", "key_hash", "through", "windows", SEQUENCE))
_SHA256 = re.compile("[0-9a-f]{64}")

VERSION = "erasures:"
"""Prefix of the version of a ``deduped_events`` window that names the erasures it was judged with."""


SUBJECT_KEYS = "subject_keys:"
"""Prefix of the version of such a window that names the destroyed keys of subjects it was judged without."""

_CERTIFICATES = 10_000
"""Certificates whose ids a process remembers."""

CERTIFICATES = "certificates"
"""Folder of the home with the certificates of erasures; see ``review/certificate.py``."""


class DestroyedKeysLost(IngestError):
    """A window was judged without the values of erased subjects, or a certificate names one that lands plain,
    and the file of keys knows less of who is erased, as an older backup does: erased values would come back.

    Fix: Stop the capture, restore ``keys/`` from its newest backup, and give the ``erase --subject`` commands
    again of the certificates that the message names. Nothing was changed.
    """

    exit_code = 3


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
    """Raise ``ErasuresLost`` if ``window`` was judged with erasures and the ledger has none for it now, and
    ``DestroyedKeysLost`` if it was judged without values whose keys are not destroyed any more.

    ``held``: the versions it was judged with; ``wanted``: the versions it should have.
    """
    _refuse_lost_keys(workspace, source, window, held, wanted)
    lost, known = (any(each.startswith(VERSION) for each in versions) for versions in (held, wanted))
    if lost and not known:
        folder = workspace.erasures(source).folder
        raise ErasuresLost(
            f"Window {window} of {source}/deduped_events was judged with erasures, and {folder} has none of "
            "them: what was erased would come back.",
            fix=f"Restore {folder} from a backup of the lake, then run again. Nothing was changed.",
        )


def _refuse_lost_keys(
    workspace: Workspace, source: str, window: str, held: Sequence[str], wanted: Sequence[str]
) -> None:
    had, has = (
        next((each for each in versions if each.startswith(SUBJECT_KEYS)), None)
        for versions in (held, wanted)
    )
    if had is None or had == has:
        return
    revived = _with_revived_keys(workspace, source)
    if has is None or revived:
        names = f" ({', '.join(revived)})" if revived else ""
        raise DestroyedKeysLost(
            f"Window {window} of {source}/deduped_events was judged without the values of destroyed keys, "
            f"and {workspace.subjects.path} does not know all of these as destroyed: what was erased would "
            "come back.",
            fix="Stop the capture, and restore keys/ from its newest backup. Then give the erase --subject "
            f"commands again of the certificates that are younger{names}. Nothing was changed.",
        )


def erased_subjects(workspace: Workspace, source: str) -> ErasedSubjects:
    """Return the erased subjects whose values the events of ``source`` lose, also those of withdrawn tables,
    and the tables with erased subjects of which no contract says whose their rows are any more.

    Call it after the versions were read: an erasure names its windows first, so a window that is judged
    without knowing of it is judged again. Raises ``SubjectKeysUnreadable`` and ``DestroyedKeysLost`` if
    values land plain, and who was erased is not known any more.
    """
    withdrawn = readable_withdrawn(workspace.settings, workspace.contracts)
    of_source = [each for each in withdrawn if each.source == source]
    tables = subject_tables(named := [*of_source, *workspace.contracts.of_source(source)])
    unnamed = _unnamed(workspace, source, {each.full_name for each in tables.values()})
    plain = any(each.subject is not None and not each.subject.encrypted for each in named) or bool(unnamed)
    if tables and not plain and not workspace.subjects.made:
        # If a key is missing, decrypting raises the error.
        return ErasedSubjects()
    erased = workspace.subjects.erased() if tables or unnamed else None
    if plain or not tables:
        # Without a contract only certificates say that somebody was erased.
        _refuse_revived(workspace, source)
    return ErasedSubjects() if erased is None else ErasedSubjects(source, tables, erased, unnamed)


def note_joined_tables(workspace: Workspace, source: str) -> None:
    """Record the name of the subject of tables of ``source`` whose contracts share it since it was erased:
    such a table may not leave it either, or name it otherwise.

    Raises ``ErasedSubjectsUnreadable`` and ``SubjectKeysUnreadable``.
    """
    names = names_once_erased(workspace.subjects.path)
    erased = {each.name for (of, _), each in names.items() if of == source}
    joined = {
        each.full_name: ErasedName(each.subject.name, each.subject.encrypted)
        for each in workspace.contracts.of_source(source)
        if each.subject is not None and each.subject.name in erased and (source, each.full_name) not in names
    }
    if joined:
        workspace.subjects.note_names(source, joined)


def _unnamed(workspace: Workspace, source: str, known: Collection[str]) -> frozenset[TableName]:
    """Return the tables of ``source`` with erased subjects that landed plain, and no contract among
    ``known``, full names: nobody can say which of their values are of these subjects."""
    names = names_once_erased(workspace.subjects.path)
    tables = (table for (of, table), name in names.items() if of == source and not name.encrypted)
    parts = (table.partition(".") for table in tables if table not in known)
    return frozenset((schema, table) for schema, _, table in parts)


def _refuse_revived(workspace: Workspace, source: str) -> None:
    """Raise ``DestroyedKeysLost`` if a certificate of ``source`` names an erased subject that the file of
    keys does not: then its values would be readable in whatever window is judged now."""
    if revived := _with_revived_keys(workspace, source):
        raise DestroyedKeysLost(
            f"{workspace.subjects.path} does not know all subjects of {source} as erased that certificates "
            "name: what was erased would come back.",
            fix="Restore keys/ from its newest backup. Then give the erase --subject commands again of the "
            f"certificates that are younger ({', '.join(revived)}). Nothing was changed.",
        )


def _with_revived_keys(workspace: Workspace, source: str) -> list[str]:
    """Return the names of the certificates of ``source`` that say destroyed of a key that is not."""
    named: dict[str, frozenset[bytes]] = {}
    for path in sorted((workspace.home.path / CERTIFICATES).glob("*.json")):
        try:
            found = path.stat()
            of, ids = _named_in(path, found.st_mtime_ns, found.st_size)
        except (OSError, Unreadable, ValueError, KeyError, TypeError, AttributeError):
            # Of a former version, or damaged: the command that continues it says so.
            continue
        if of == source:
            named[path.name] = ids
    every = {each for ids in named.values() for each in ids}
    destroyed = workspace.subjects.destroyed(every) if every else set()
    return [name for name, ids in named.items() if ids - destroyed]


@lru_cache(_CERTIFICATES)
def _named_in(path: Path, modified_ns: int, size: int) -> tuple[str, frozenset[bytes]]:
    """Return source and ids of the erased keys in a certificate. It is read again when it has changed."""
    del modified_ns, size
    certificate = json.loads(read_file(path))
    # Those of rows, and of commands that were killed, name no keys.
    ids = certificate.get("keys", {}).get("ids", ())
    return certificate["source"], frozenset(bytes.fromhex(each) for each in ids)


def _order(span: Span) -> tuple[object, ...]:
    return span.through, span.after or ()


def _erasure(row: Mapping[str, Any]) -> Erasure:
    fields = dict(row)
    after, through = fields.pop("after"), fields.pop("through")
    span = Span(None if after is None else tuple(after.values()), tuple(through.values()))
    return Erasure(span=span, windows=tuple(fields.pop("windows")), **fields)
