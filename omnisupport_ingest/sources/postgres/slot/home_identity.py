"""The identity of a home, which reveals a copy: a copy must not read or drop the original's slot.

Everything that a home records about its slot is in files, which a copy has too. But a copied or restored
identity file has another inode, or another time of change. On a disk that was moved to another machine, it
has another machine id. A home that was moved (``mv``) within a file system keeps all of them. For a copy, a
person must decide, because only a person knows whether the original is still in use.

The server cannot record the owner of a slot: a slot has no comment, a publication may belong to an
administrator and serve several homes, a replication origin needs a superuser, and the capture role has no
table of its own. But the server reports how far the slot was confirmed. If that is above what this home has
landed, somebody else has read the slot, and no setting repairs that automatically (``SlotMoved``).
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
    """The home is a copy of another, was restored, or was moved to another file system. Whether the slot is
    still its own, only a person knows.

    Fix: ``omnisupport-ingest source adopt --take-over`` if the original is gone for good;
    ``omnisupport-ingest source adopt --new-slot`` if it still captures.
    """

    exit_code = 6


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """Facts of the identity file that no copy shares. ``changed``: its ctime in nanoseconds, which no program
    can set."""

    machine: str
    device: int
    inode: int
    changed: int

    @classmethod
    def of(cls, file: Path) -> Self:
        status = file.stat()
        return cls(_machine(), status.st_dev, status.st_ino, status.st_ctime_ns)

    def same_file(self, other: _FileFacts) -> bool:
        """Whether both are facts of the same file.

        The device number may change when the machine restarts, and the ctime when the owner changes. If both
        have changed, it is another file, even with the same inode.
        """
        moved = self.device != other.device and self.changed != other.changed
        return (self.machine, self.inode) == (other.machine, other.inode) and not moved


@dataclass(frozen=True, slots=True)
class _IdentityRecord:
    """The record of an identity. ``facts``: of the identity file; None if there was none. ``disowned``: see
    ``HomeIdentity.disowned``."""

    id: str
    facts: _FileFacts | None = None
    disowned: dict[str, int] = field(default_factory=dict)


_NOTHING = _IdentityRecord("")
_ID = re.compile(r"[0-9a-f]{32}")


class HomeIdentity:
    """The identity of one home: a random id, facts of its identity file, and slots that it does not own."""

    def __init__(self, home: Home) -> None:
        """Prepare access to the identity of ``home``; reads and writes nothing yet."""
        self._home = home
        self._record_file = home.path / "identity.json"

    @property
    def id(self) -> str:
        """The id, in hexadecimal digits; empty before the first ``require_original``."""
        return self._record().id

    def require_original(self) -> None:
        """Raise ``HomeCopied`` if the home is a copy. If the home has no identity, make one.

        A home without an identity is new, or was made by an older version. Only the holder of the source's
        lease may call this.
        """
        if not self._record_file.exists():
            self._make({})
        self.look()

    def look(self) -> None:
        """Check as ``require_original`` does, but never make an identity."""
        if not self._record_file.exists():
            return
        recorded = self._record()
        try:
            same = recorded.facts is not None and recorded.facts.same_file(
                _FileFacts.of(self._file(recorded.id))
            )
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

        ``disowned``: for each source, the last epoch whose slot belongs to the home that this one was copied
        from.
        """
        self._make(self.disowned() | disowned)

    def disowned(self) -> dict[str, int]:
        """Return, for each source, the last epoch whose slot belongs to another home."""
        return self._record().disowned

    def owns(self, source: str, epoch: int) -> bool:
        """Return whether the slot of ``epoch`` of ``source`` belongs to this home."""
        return epoch > self.disowned().get(source, 0)

    def _make(self, disowned: dict[str, int]) -> None:
        before, new_id = self.id, secrets.token_hex(16)
        file = self._file(new_id)
        with failpoint("home.identity"):
            create_exclusively(file, b"")
            # In one step: a crash before it leaves the home as it was.
            record = _IdentityRecord(new_id, _FileFacts.of(file), disowned)
            try:
                replace(self._record_file, encode(record))
            except IsADirectoryError:
                file.unlink()
                raise IngestError(
                    f"{self._record_file} is a folder, so the identity of the home cannot be written.",
                    fix=f"Move {self._record_file} away.",
                ) from None
            if before:
                self._file(before).unlink(missing_ok=True)

    def _file(self, id_: str) -> Path:
        """Return the path of the identity file with that id. The file is empty and never written again."""
        return self._home.path / f"identity-{id_}"

    def _record(self) -> _IdentityRecord:
        try:
            recorded = read_note(_IdentityRecord, self._record_file)
        except (OSError, Unreadable):
            # A record that cannot be read proves nothing, so a person must decide.
            return _NOTHING
        # Accept only a valid id: it is part of the name of a file that is removed.
        return recorded if _ID.fullmatch(recorded.id) else _NOTHING


def _machine() -> str:
    try:
        return sha256(_MACHINE_ID.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
