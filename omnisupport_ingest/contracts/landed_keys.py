"""The keys that landed events of a table have, whatever the key of its contract is by now.

An event lands with the values of its table's key, so events from before a change of the key name their rows
differently from those after it. The record says for each table where which key begins (``KeyEra``), and which
key is in force. The fold leaves out events that have another key than that (``other_keys``).

The new key comes into force when the table has been read by it. Until then the lake shows the table by the
former key; nothing with the new one counts. From then on nothing with the former one does.

Only capture writes the record, which lies beside the landed batches. Sources of other kinds have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from omnisupport_ingest.contracts.model import Contracts, KeyEra, TableContract
from omnisupport_ingest.contracts.pii_policies import KEEP
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import decode_note, encode, read_note
from omnisupport_ingest.storage import update

FILE = "keys.json"


class LandedKeysUnreadable(IngestError):
    """The record of the keys that landed events have cannot be read.

    Fix: Restore it from a backup. Without it, events with a former key would count as other rows.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class KeysOfTable:
    """The keys of one table: its ``eras``, in their order, and the key ``in_force``."""

    eras: tuple[KeyEra, ...]
    in_force: tuple[str, ...]

    @classmethod
    def first(cls, key: tuple[str, ...]) -> KeysOfTable:
        """The keys of a table whose events all have ``key``."""
        return cls((KeyEra(key, 0, Lsn(0), 0),), key)

    @property
    def newest(self) -> tuple[str, ...]:
        """The key with which its changes land now."""
        return self.eras[-1].key

    @property
    def settled(self) -> KeysOfTable:
        """The same with the newest key in force."""
        return replace(self, in_force=self.newest)

    def begin(self, era: KeyEra) -> KeysOfTable:
        """Return the same with ``era`` as the newest; the key in force stays."""
        return replace(self, eras=(*self.eras, era))

    def renamed(self, key: tuple[str, ...]) -> KeysOfTable:
        """Return the same where the columns of the newest key are called ``key`` now."""
        in_force = key if self.in_force == self.newest else self.in_force
        return KeysOfTable((*self.eras[:-1], replace(self.eras[-1], key=key)), in_force)


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the file; tables by their full names at the source."""

    tables: dict[str, KeysOfTable]


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
            return read_note(_Record, self._path).tables
        except FileNotFoundError:
            return {}
        except (OSError, Unreadable) as error:
            raise self._unreadable(error) from error

    def update(self, change: Callable[[Mapping[str, KeysOfTable]], Mapping[str, KeysOfTable]]) -> None:
        """Replace the keys of the tables that ``change`` returns, given all; durable on return."""

        def changed(content: bytes | None) -> bytes | None:
            try:
                tables = {} if content is None else decode_note(_Record, content).tables
            except Unreadable as error:
                raise self._unreadable(error) from error
            now = tables | {**change(tables)}
            return None if now == tables else encode(_Record(now))

        with failpoint("source.landed_keys"):
            update(self._path, changed)

    def _unreadable(self, error: Exception) -> LandedKeysUnreadable:
        return LandedKeysUnreadable(
            f"{self._path}, which has the keys that landed events have, cannot be read: {error}.",
            fix="Restore it from a backup. Without it, events with a former key would count as other rows.",
        )


def by_landed_keys(home: Path, contracts: Contracts) -> Contracts:
    """Return ``contracts`` with the keys that are in force for their tables, and with the eras of these keys.

    The key of a contract's file is ``next_key`` then. It counts at once if the lake cannot show the table by
    the former key, because the contract has no such column any more.
    """
    landed = {source: LandedKeys(home / "landing" / source).all() for source in contracts.sources()}
    if not any(landed.values()):
        return contracts
    return Contracts(tuple(_by(each, landed[each.source].get(each.full_name)) for each in contracts))


def _by(contract: TableContract, keys: KeysOfTable | None) -> TableContract:
    if keys is None:
        return contract
    if len(keys.eras) > 1:
        contract = replace(contract, key_eras=keys.eras)
    if keys.in_force == contract.key or not _shows(contract, keys.in_force):
        return contract
    return replace(
        contract,
        key=keys.in_force,
        next_key=contract.key,
        fingerprint=_held(contract.fingerprint, keys.in_force),
        verdicts_by=contract.verdicts_by and _held(contract.verdicts_by, keys.in_force),
    )


def _shows(contract: TableContract, key: tuple[str, ...]) -> bool:
    columns = {each.name: each for each in contract.columns}
    return all(name in columns and columns[name].pii == KEEP and not columns[name].nullable for name in key)


def _held(fingerprint: str, key: tuple[str, ...]) -> str:
    return sha256("\n".join((fingerprint, *key)).encode()).hexdigest()
