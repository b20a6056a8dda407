"""The ledger of exports: which files with rows were written, so that a certificate of erasure can name them.

One line of JSON per file is appended to ``exports.jsonl`` in the home, readable by its owner only, without
values of rows. An export is recorded before its file has its name, so a command that is killed leaves no file
without an entry, and perhaps an entry without a file.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.durable import sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.records import decode_note, encode_line

FILE = "exports.jsonl"

_WHOLE = re.compile(rb'[0-9a-f]{64}"\}$')
"""Ends every complete line."""


class ExportLedgerUnreadable(IngestError):
    """The ledger of exports is there and cannot be read.

    Fix: Restore it from a backup of the home; or move it away: then no certificate names older exports.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file that was written ``at`` (UTC), or about to be, with ``rows`` of ``table`` (``source.name``).

    ``path`` is absolute.
    """

    at: datetime
    table: str
    path: str
    rows: int
    sha256: str


def note_export(home: Path, table: str, path: Path, rows: int, *, draft: Path | None = None) -> None:
    """Record that ``path`` has ``rows`` of ``table``, or will have them once ``draft`` is renamed to it.

    Durable on return.
    """
    entry = ExportedFile(datetime.now(UTC), table, str(path.absolute()), rows, sha256_of(draft or path))
    line = encode_line(entry).encode() + b"\n"
    with failpoint("export.file", FILE):
        descriptor = os.open(home / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A crash or a full disk cut the last line off: the new entry begins a new line.
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(home / FILE))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(home)


def exported_files(home: Path) -> list[ExportedFile]:
    """Return every entry, oldest first. Raises ``ExportLedgerUnreadable``."""
    try:
        lines = read_file(home / FILE).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, Unreadable) as problem:
        raise _unreadable(home, problem) from problem
    files = []
    for line in lines:
        try:
            files.append(decode_note(ExportedFile, line))
        except ValueError as problem:
            if not _WHOLE.search(line):
                # Cut off by a crash or a full disk, before the export was reported.
                continue
            raise _unreadable(home, problem) from problem
    return files


def still_there(entry: ExportedFile) -> bool:
    """Whether the file is there with the content that was written."""
    path = Path(entry.path)
    try:
        return path.is_file() and sha256_of(path) == entry.sha256
    except OSError:
        return False


def _unreadable(home: Path, why: object) -> ExportLedgerUnreadable:
    return ExportLedgerUnreadable(
        f"The ledger of exports {home / FILE} cannot be read: {why}.",
        fix="Restore it from a backup of the home, or move it away: then no certificate names older exports.",
    )
