"""The keys that landed events of a table have, whatever the key of its contract is by now.

An event lands with the values of its table's key, so events from before a change of the key name their rows
differently from those after it. The record says for each table where which key begins (``KeyEra``), and which
key is in force. The fold leaves out events that have another key than that (``other_keys``).

The new key comes into force when the table has been read by it. Until then the lake shows the table by the
former key; nothing with the new one counts. From then on nothing with the former one does.

Capture and readings by a cursor write the record, which lies beside the landed batches; so does who renames a
key column in the contract. Events and files can be read again by nobody here, so their tables keep the first
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from omnisupport_ingest.contracts.model import Contracts, KeyEra, TableContract
from omnisupport_ingest.contracts.pii_policies import KEEP
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import MAX_NOTE_BYTES, decode_note, encode
from omnisupport_ingest.storage import update

FILE = "keys.json"


class LandedKeysUnreadable(IngestError):
    """The record of the keys that landed events have cannot be read.

    Fix: Restore it from a backup. Without it, events with a former key would count as other rows.
    """

    exit_code = 3


class LandedKeyChanged(IngestError):
    """A contract no longer has the key with which events of its table have landed, and nobody here can read
    them again. Its further events wait where they are; other tables go on.

    Fix: Give the contract its former key, or the table a home of its own.
    """

    exit_code = 2


UNKNOWN, APART, UNDECLARED, LOST = "unknown", "apart", "undeclared", "lost"


@dataclass(frozen=True, slots=True)
class KeysOfTable:
    """The keys of one table.

    Attributes:
        eras: its keys, in the order in which they began.
        in_force: number of the era in force, from 0.
        apart: whether the newest key tells the rows of the source apart, as a reading by a cursor saw last.
            ``UNKNOWN``: none has looked. ``APART``: something unique at the source is within the key.
            ``UNDECLARED``: nothing was, from the first look on. ``LOST``: nothing is any more.
    """

    eras: tuple[KeyEra, ...]
    in_force: int
    apart: str = UNKNOWN

    @classmethod
    def first(cls, key: tuple[str, ...]) -> KeysOfTable:
        """The keys of a table whose events all have ``key``."""
        return cls((KeyEra(key, 0, Lsn(0), 0),), 0)

    @property
    def newest(self) -> tuple[str, ...]:
        """The key with which its changes land now."""
        return self.eras[-1].key

    @property
    def waits(self) -> bool:
        """Whether the table has still to be read by its newest key."""
        return self.in_force < len(self.eras) - 1

    @property
    def settled(self) -> KeysOfTable:
        """The same with the newest key in force."""
        return replace(self, in_force=len(self.eras) - 1)

    def begin(self, era: KeyEra) -> KeysOfTable:
        """Return the same with ``era`` as the newest; the one in force stays."""
        return replace(self, eras=(*self.eras, era))

    def seen(self, *, unique: bool | None) -> KeysOfTable:
        """Return the same after a look. ``unique``: whether something unique at the source is within the
        newest key; None: the source declares nothing of such a table, for example of a view."""
        if unique:
            return replace(self, apart=APART)
        declared = unique is not None and self.apart not in (UNKNOWN, UNDECLARED)
        return replace(self, apart=LOST if declared else UNDECLARED)

    def renamed(self, key: tuple[str, ...]) -> KeysOfTable:
        """Return the same where the columns of the newest key are called ``key`` now, in every era."""
        names = dict(zip(self.newest, key, strict=True))
        eras = (replace(era, key=tuple(names.get(each, each) for each in era.key)) for era in self.eras)
        return replace(self, eras=tuple(eras))


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the file; tables by their full names at the source."""

    tables: dict[str, KeysOfTable]


@lru_cache(8)
def _decoded(content: bytes) -> Mapping[str, KeysOfTable]:
    """Return the tables of the record ``content``. A source of many tables looks at it for each of them."""
    return decode_note(_Record, content).tables


class LandedKeys:
    """The keys of the tables of one source."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing of the source."""
        self._path = folder / FILE

    def of(self, table: str) -> KeysOfTable | None:
        """Return the keys of ``table`` (its full name); None if nothing is recorded of it."""
        return self.all().get(table)

    def all(self) -> dict[str, KeysOfTable]:
        """Return the keys of every table, by full name. Raises ``LandedKeysUnreadable``."""
        try:
            return {**_decoded(read_file(self._path, limit=MAX_NOTE_BYTES))}
        except FileNotFoundError:
            return {}
        except (OSError, Unreadable) as error:
            raise self._unreadable(error) from error

    def note(self, tables: Iterable[TableContract]) -> None:
        """Record that each of ``tables`` of which nothing is recorded lands with the key of its contract."""
        new = {each.full_name: KeysOfTable.first(each.key) for each in tables}
        if not new.keys() <= self.all().keys():
            self.update(lambda recorded: new | {**recorded})

    def changed(self, tables: Iterable[TableContract]) -> dict[str, LandedKeyChanged]:
        """Return, by the names of their contracts, which of ``tables`` have another key than what has landed
        of them. No event of such a table may land if nobody can read its rows again."""
        recorded = self.all()
        return {
            each.name: _changed(each, recorded[each.full_name].newest)
            for each in tables
            if each.full_name in recorded and recorded[each.full_name].newest != each.key
        }

    def require(self, tables: Sequence[TableContract]) -> None:
        """Raise ``LandedKeyChanged`` if one of ``tables``, whose rows nobody can read again, has another key
        than what has landed of it. The key with which a table lands first is recorded, and stays."""
        self.note(tables)
        for changed in self.changed(tables).values():
            raise changed

    def update(self, change: Callable[[Mapping[str, KeysOfTable]], Mapping[str, KeysOfTable]]) -> None:
        """Replace the keys of the tables that ``change`` returns, given all; durable on return."""

        def changed(content: bytes | None) -> bytes | None:
            try:
                tables = {} if content is None else _decoded(content)
            except Unreadable as error:
                raise self._unreadable(error) from error
            now = {**tables, **change(tables)}
            return None if now == tables else encode(_Record(now))

        # Who lands a file holds the lock of the source's own folder.
        with locked_folder(self._path.parent.parent), failpoint("source.landed_keys"):
            update(self._path, changed)

    def _unreadable(self, error: Exception) -> LandedKeysUnreadable:
        return LandedKeysUnreadable(
            f"{self._path}, which has the keys that landed events have, cannot be read: {error}.",
            fix="Restore it from a backup. Without it, events with a former key would count as other rows.",
        )


def _changed(contract: TableContract, landed: tuple[str, ...]) -> LandedKeyChanged:
    return LandedKeyChanged(
        f"{contract.path} gives {contract.full_name} the key ({', '.join(contract.key)}), and what has "
        f"landed of it has the key ({', '.join(landed)}).",
        fix="Give the contract that key again: x-cdc.key, with its columns readable and in required. Or let "
        "a home of its own take the table in.",
    )


def by_landed_keys(home: Path, contracts: Contracts) -> Contracts:
    """Return ``contracts`` with the keys that are in force for their tables, and with the eras of these keys.

    ``next_key`` is the key of the contract's file while the table waits to be read by it. It counts at once
    if the lake cannot show the table by the former key, because the contract has no such column any more:
    then the table is empty until that read.
    """
    landed = {source: LandedKeys(home / "landing" / source).all() for source in contracts.sources()}
    if not any(landed.values()):
        return contracts
    return Contracts(tuple(_by(each, landed[each.source].get(each.full_name)) for each in contracts))


def _by(contract: TableContract, keys: KeysOfTable | None) -> TableContract:
    if keys is None:
        return contract
    asked, in_force = contract.key, keys.eras[keys.in_force].key
    if asked == in_force and not keys.waits:
        if not keys.in_force:
            return contract
        return _of_era(contract, asked, keys, keys.in_force)
    if _shows(contract, in_force):
        held = _of_era(contract, in_force, keys, keys.in_force)
    else:
        begun = len(keys.eras) - 1 if keys.newest == asked else len(keys.eras)
        held = _of_era(contract, asked, keys, begun)
    return replace(held, next_key=asked)


def _of_era(contract: TableContract, key: tuple[str, ...], keys: KeysOfTable, era: int) -> TableContract:
    """Return ``contract`` with ``key``, which events have that lie in the era of number ``era``; if there is
    no such era yet, no event has it."""
    found = replace(contract, key=key, key_eras=keys.eras, key_era=era)
    if key == contract.key and not era:
        return found
    # Another fingerprint is another contract: everything of the table is made again.
    starts = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in keys.eras[era : era + 1]]
    parts = (*key, *map(str, starts), str(era))
    return replace(
        found,
        fingerprint=_with(contract.fingerprint, parts),
        verdicts_by=contract.verdicts_by and _with(contract.verdicts_by, parts),
    )


def _shows(contract: TableContract, key: tuple[str, ...]) -> bool:
    columns = {each.name: each for each in contract.columns}
    return all(name in columns and columns[name].pii == KEEP and not columns[name].nullable for name in key)


def _with(fingerprint: str, parts: Sequence[str]) -> str:
    return sha256("\n".join((fingerprint, *parts)).encode()).hexdigest()
