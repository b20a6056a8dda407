"""Which home this is, so that a copy of it does not take itself for the original and read or drop its slot.

Everything that a home knows of its slot is in its files, which a copy has too. What a copy cannot have is the
very identity file that was made here. A copied or restored file has another inode, or another time of change;
one on a disk that was moved to another machine has another machine id. A home that was moved (``mv``) within
a file system keeps both. A home that is no original asks a person, who knows whether the original still
lives.

The server does not record the slot's owner: a slot can hold no comment, a publication may be an
administrator's and serve several homes, a replication origin takes a superuser, and the role of capture has
no table of its own. What the server does report is how far the slot was confirmed. If that is further than
this home has landed, somebody else has read the slot, and no setting repairs that by itself (``SlotMoved``).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Self

from omnisupport_ingest.durable import create_exclusively, replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.home import Home
from omnisupport_ingest.records import encode, read_note

_MACHINE_ID = Path("/etc/machine-id")


class HomeCopied(IngestError):
    """Raised when the home is a copy of another, or was restored: only a person knows whose the slot is."""

    exit_code = 6


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that a copy of the identity file cannot share. ``changed``: nanoseconds, which no program can
    set.
    """

    machine: str
    device: int
    inode: int
    changed: int

    @classmethod
    def of(cls, file: Path) -> Self:
        status = file.stat()
        return cls(_machine(), status.st_dev, status.st_ino, status.st_ctime_ns)

    def same_file(self, other: _Facts) -> bool:
        """Whether both are of one file.

        The number of a device may change when the machine starts, and the time of change when somebody
        changes the owner; not both while the inode stays.
        """
        moved = self.device != other.device and self.changed != other.changed
        return (self.machine, self.inode) == (other.machine, other.inode) and not moved


@dataclass(frozen=True, slots=True)
class _About:
    """The record of an identity. ``facts``: of its file; None if it had no file."""

    id: str
    facts: _Facts | None = None
    disowned: dict[str, int] = field(default_factory=dict)


_NOTHING = _About("")
_ID = re.compile(r"[0-9a-f]{32}")


class HomeIdentity:
    """The identity of one home: a random id, the facts of the original, and which slots it does not own."""

    def __init__(self, home: Home) -> None:
        """Read and make nothing yet."""
        self._home = home
        self._about = home.path / "identity.json"

    @property
    def id(self) -> str:
        """The id, in hexadecimal digits; empty before the first ``require_original``."""
        return self._record().id

    def require_original(self) -> None:
        """Raise ``HomeCopied`` if the home is no original. Makes the identity of a home that has none.

        Such a home is new, or was made by an older version. Only the holder of the source's lease may call
        it.
        """
        if not self._about.exists():
            self._make({})
        self.look()

    def look(self) -> None:
        """Check as ``require_original`` does, but make nothing."""
        if not self._about.exists():
            return
        recorded = self._record()
        try:
            same = recorded.facts is not None and recorded.facts.same_file(_Facts.of(self._file(recorded.id)))
        except OSError:
            same = False
        if same:
            return
        raise HomeCopied(
            f"{self._home.path} is a copy of another home, was restored from a backup, or was moved to "
            "another file system: whether its replication slot is still its own is not known.",
            fix="If the original is gone for good, this home goes on with its slot: omnisupport-ingest "
            "source adopt --take-over. If it still captures, this home needs a slot of its own: "
            "omnisupport-ingest source adopt --new-slot",
        )

    def adopt(self, disowned: dict[str, int]) -> None:
        """Make this home an original, with a new id.

        ``disowned``: for each source the last epoch whose slot belongs to the home that this one was copied
        from.
        """
        self._make(self.disowned() | disowned)

    def disowned(self) -> dict[str, int]:
        """For each source the last epoch whose slot is another home's."""
        return self._record().disowned

    def owns(self, source: str, epoch: int) -> bool:
        """Return whether the slot of ``epoch`` of ``source`` was made for this home."""
        return epoch > self.disowned().get(source, 0)

    def _make(self, disowned: dict[str, int]) -> None:
        before, new_id = self.id, secrets.token_hex(16)
        file = self._file(new_id)
        with failpoint("home.identity"):
            create_exclusively(file, b"")
            # In one step: a death before it leaves the home what it was.
            about = _About(new_id, _Facts.of(file), disowned)
            try:
                replace(self._about, encode(about))
            except IsADirectoryError:
                file.unlink()
                raise IngestError(
                    f"{self._about} is a folder, so the identity of the home cannot be written.",
                    fix=f"Move {self._about} away.",
                ) from None
            if before:
                self._file(before).unlink(missing_ok=True)

    def _file(self, id_: str) -> Path:
        """The identity file of that id: empty, and never written again."""
        return self._home.path / f"identity-{id_}"

    def _record(self) -> _About:
        try:
            recorded = read_note(_About, self._about)
        except (OSError, Unreadable):
            # A record that cannot be read proves nothing, so a person is asked.
            return _NOTHING
        # The id is part of the name of a file, which is removed with it.
        return recorded if _ID.fullmatch(recorded.id) else _NOTHING


def _machine() -> str:
    try:
        return sha256(_MACHINE_ID.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
