"""How far a target is behind, by what the home knows: its dimension, and a note of the last syncs.

Each sync notes in the home what it came to. So ``status``, alarms and metrics need not connect to the target,
and know how far it is behind, and why, while it does not answer. What somebody else does to a target is not
known here before the next sync (``target status`` looks at the target itself).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest import durable
from omnisupport_ingest.contracts.model import TableContract, TargetPolicy
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.log import committed_at
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.records import encode, read_note

_FOLDER = "targets"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastSyncs:
    """What the last syncs of a target came to.

    ``target``: connection, schema and table, as the contract named them. ``table_id``, ``version``: the
    dimension that the target has since ``synced_at``; None before its first sync. ``problem``, ``fix``: why
    the last sync, at ``failed_at``, failed; empty if it did not. ``failing_since``: the first failure since
    a sync succeeded.
    """

    target: str
    table_id: str = ""
    version: int | None = None
    synced_at: datetime | None = None
    problem: str = ""
    fix: str = ""
    failed_at: datetime | None = None
    failing_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a target is behind its dimension. ``last``: None if no sync of it is noted in this home.

    ``lake_version``: the version of the dimension; None if there is none yet. ``versions``: how many of them
    the target lacks; None if it is not known, or the dimension was made anew. ``behind_since``: when the
    first one that it lacks was committed; None if it lacks none, or if nothing is known.
    """

    target: str
    lake_version: int | None
    versions: int | None
    behind_since: datetime | None
    last: LastSyncs | None


def note_synced(home: Home, contract: TableContract, table_id: str, version: int) -> None:
    """Note that the target of ``contract`` has ``version`` of the dimension ``table_id``."""
    _write(home, contract, LastSyncs(_identity(contract), table_id, version, datetime.now(UTC)))


def note_failed(home: Home, contract: TableContract, error: Exception) -> None:
    """Note that a sync of the target of ``contract`` has failed; what it has is as before."""
    now = datetime.now(UTC)
    before = last_syncs(home, contract) or LastSyncs(_identity(contract))
    # The message of any other error may have values of rows.
    problem, fix = f"{type(error).__name__} in a sync.", "omnisupport-ingest logs --errors"
    if isinstance(error, IngestError):
        problem, fix = error.problem, error.fix
    since = before.failing_since or now
    _write(home, contract, replace(before, problem=problem, fix=fix, failed_at=now, failing_since=since))


def standing_of(workspace: Workspace, contract: TableContract) -> Standing:
    """Return how far the target of ``contract`` is behind. Does not connect to it.

    Raises ``IngestError`` and ``DeltaError`` if the dimension cannot be read.
    """
    policy = _policy(contract)
    name, last = f"{policy.schema}.{policy.table}", last_syncs(workspace.home, contract)
    snapshot = workspace.dimension(contract).look()
    if snapshot is None:
        return Standing(name, None, None, None, last)
    if last is None:
        return Standing(name, snapshot.version, None, None, None)
    if last.version is None:
        return Standing(name, snapshot.version, None, last.failing_since, last)
    if last.table_id != snapshot.table_id:
        return Standing(name, snapshot.version, None, _first_commit(snapshot, 0), last)
    versions = max(0, snapshot.version - last.version)
    since = _first_commit(snapshot, last.version + 1) if versions else None
    return Standing(name, snapshot.version, versions, since, last)


def _first_commit(snapshot: TableSnapshot, version: int) -> datetime | None:
    """Return when ``version`` was committed, or the newest one if the entry of the other cannot be read."""
    for each in (version, snapshot.version):
        with suppress(OSError, ValueError):
            return committed_at(snapshot.table, each)
    return None


def _identity(contract: TableContract) -> str:
    policy = _policy(contract)
    return f"{policy.connection_env or policy.connection_file} {policy.schema}.{policy.table}"


def _policy(contract: TableContract) -> TargetPolicy:
    assert contract.target is not None
    return contract.target


def _file(home: Home, contract: TableContract) -> Path:
    return home.run / _FOLDER / f"{contract.source}.{contract.name}.json"


def last_syncs(home: Home, contract: TableContract) -> LastSyncs | None:
    """Return the note about the target of ``contract``; None if there is none, or it is about another."""
    try:
        found = read_note(LastSyncs, _file(home, contract))
    except (OSError, Unreadable):
        # The next sync writes it again.
        return None
    return found if found.target == _identity(contract) else None


def _write(home: Home, contract: TableContract, note: LastSyncs) -> None:
    path = _file(home, contract)
    try:
        # No failpoint: a note for people. If the process dies before it, the note is that of the sync before
        # until the next one, which the sensor requests within minutes.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        durable.replace(path, encode(note))
    except OSError as error:
        # The target has what it has, and an error of the sync says more than this one.
        _log.warning("%s was not written: %s", path, error.strerror)
