"""Records for each table the LSN at which it was equal to its source, and the result of the last check.

The record of a table is a file in the folder ``verified`` of the home. A service level may depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.home import Home
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import encode, read_note

EQUAL, PART_EQUAL, DIFFERS, NOT_COMPARABLE = "equal", "part equal", "differs", "not comparable yet"

_FOLDER = "verified"

RANGES = ".ranges.json"
"""What the file of a table's key ranges is called, behind the table's name (``equality.known_ranges``)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A state of the source: its LSN in an epoch of ours, and its own clock when it was read."""

    epoch: int
    lsn: Lsn
    at: datetime

    def __str__(self) -> str:
        return f"LSN {self.lsn}"


@dataclass(frozen=True, slots=True)
class Verified:
    """The verdict of the last check of one table.

    Attributes:
        state: of the last check.
        rows: rows of the source that were compared.
        left_out: rows that were not, because they changed meanwhile.
        differing: keys that differ, or differed when that was last known.
        why: the state in words, for a person.
        through: the last moment at which the whole table was equal; if its parts were found equal at several
            moments, the oldest of these.
        waits_since: of a table that is not comparable: when it was first found so.
        read: rows of which the server computed checksums; those of the others were known and had not changed.
        differs_since: when a difference was first found that no comparison has found equal since; None if
            there is none.
    """

    table: str
    state: str
    checked_at: datetime
    rows: int = 0
    left_out: int = 0
    differing: int = 0
    why: str = ""
    seconds: float = 0.0
    through: Moment | None = None
    waits_since: datetime | None = None
    read: int = 0
    differs_since: datetime | None = None

    @property
    def differs(self) -> bool:
        """Whether the table is known to differ, even if the last check could not compare what does."""
        return self.state == DIFFERS or self.differs_since is not None

    @property
    def first_known_to_differ(self) -> datetime | None:
        """``differs_since``, also of a note that an earlier version wrote."""
        return self.differs_since or (self.checked_at if self.state == DIFFERS else None)


def verified_of(home: Home, contract: TableContract) -> Verified | None:
    """Return the note of a table; None if it was never checked, or if the note cannot be read: the next
    check makes it again."""
    try:
        return read_note(Verified, _file(home, contract))
    except (OSError, Unreadable):
        return None


def write_verified(home: Home, contract: TableContract, note: Verified) -> None:
    """Replace the note of a table, durable on return."""
    file = _file(home, contract)
    with failpoint("home.verified", contract.name):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(file, encode(note))


def forget_verified(home: Home, contract: TableContract) -> None:
    """Remove what is known of a table's equality: its data is about to be dropped."""
    folder = folder_of(home, contract.source)
    # No failpoint: a note that is left is found by the same call again.
    for each in (_file(home, contract), folder / f"{contract.name}{RANGES}"):
        each.unlink(missing_ok=True)


def folder_of(home: Home, source: str) -> Path:
    """Return the folder of what is known of the tables of a source."""
    return home.path / _FOLDER / source


def _file(home: Home, contract: TableContract) -> Path:
    return folder_of(home, contract.source) / f"{contract.name}.json"
