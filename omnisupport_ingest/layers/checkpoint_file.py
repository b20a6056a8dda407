"""A file of checkpoints: how far every source has landed, and every window of the lake is complete.

The truth is landing's chain and the tables' own logs; a file beside them cannot restore what they have lost.
But it can prove that a home restored from a backup holds at least what the file says. If not, every
difference is named. The file has no row and no key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest import foreign
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import from_note
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.records import Format, NewerFormat
from omnisupport_ingest.storage import has_landed

FORMAT_VERSION = 1
"""Version of the file; raised when older code could not read a newer one."""

_SHOWN = 5


class CheckpointFileUnreadable(IngestError):
    """The file for ``checkpoint import`` cannot be read, is no file of checkpoints, or is of a newer version.

    Fix: Name a file that ``omnisupport-ingest checkpoint export`` wrote.
    """


class HomeContradicts(IngestError):
    """The home does not hold all that a file of checkpoints says: it is older than the file, or has another
    history. Nothing was changed.

    Fix: Restore landing and lake from a backup that is as new as the file.
    """


@dataclass(frozen=True, slots=True)
class _SaidIdentity:
    system_identifier: str
    timeline: int
    slot: str
    consistent_point: Lsn


@dataclass(frozen=True, slots=True)
class _SaidOfSource:
    epochs: dict[str, _SaidIdentity | None]
    last_batch_id: str | None
    stream_epoch: int | None
    stream_end: Lsn | None
    batches: int = 0
    watermark: datetime | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """What has landed of each source, and the checkpoints of all tables and windows."""

    window: str
    first_window: str
    sources: dict[str, _SaidOfSource]
    checkpoints: tuple[Checkpoint, ...]
    made_at: datetime | None = None
    format_version: int = FORMAT_VERSION


_FORMAT = Format(CheckpointFile, FORMAT_VERSION, strict=False)


@dataclass(frozen=True, slots=True)
class _Contradiction:
    about: str
    """``home``, the name of a source, or table and window."""
    problem: str


def describe(workspace: Workspace) -> CheckpointFile:
    """Return the content of a file of checkpoints for this home."""
    return CheckpointFile(
        str(workspace.grid.size),
        workspace.grid.first.isoformat(),
        {source: _landed(workspace.landing(source)) for source in _landed_sources(workspace)},
        tuple(state.checkpoint for state in _states(workspace).values()),
        datetime.now(UTC).replace(microsecond=0),
    )


def read_file(path: Path) -> CheckpointFile:
    """Return the content of a file that was written from ``describe``. Raises
    ``CheckpointFileUnreadable``."""
    try:
        record = _FORMAT.decode(foreign.read_file(path))
        for number, each in enumerate(record.checkpoints):
            if each.cursor:
                from_note(Position, each.cursor, f"checkpoints[{number}].cursor")
        return record
    except NewerFormat as newer:
        raise CheckpointFileUnreadable(
            f"{path} {newer}.", fix="Use the newer omnisupport_ingest that wrote it."
        ) from None
    except OSError as error:
        raise CheckpointFileUnreadable(
            f"{path} cannot be read: {error.strerror}.", fix="Name a file of `checkpoint export`."
        ) from None
    except Unreadable as error:
        raise CheckpointFileUnreadable(
            f"{path} is not a file of checkpoints: {error}.",
            fix="Name a file that `omnisupport-ingest checkpoint export` wrote.",
        ) from None


def require_held(workspace: Workspace, record: CheckpointFile, path: Path) -> None:
    """Return if the home holds all that ``record``, read from ``path``, says; it may hold more.

    Raises ``HomeContradicts``, which names every difference, the first few in full.
    """
    found = list(_contradictions(workspace, record))
    if not found:
        return
    shown = "\n".join(f"  {each.about}: {each.problem}" for each in found[:_SHOWN])
    more = f"\n  … and {len(found) - _SHOWN} more." if len(found) > _SHOWN else ""
    raise HomeContradicts(
        f"{workspace.home.path} does not hold what {path} says:\n{shown}{more}\nNothing was changed.",
        fix="Restore landing/ and lake/ of the home from a backup that is as new as the file. If there is "
        "none, the file is of no use here: what landing still holds is taken in again by `omnisupport-ingest "
        "up`, and what it has lost is found by capture, which stops there and says what to do.",
    )


def _contradictions(workspace: Workspace, record: CheckpointFile) -> Iterator[_Contradiction]:
    for name, here, there in (
        ("window", str(workspace.grid.size), record.window),
        ("first_window", workspace.grid.first.isoformat(), record.first_window),
    ):
        if there != here:
            yield _Contradiction("home", f"its {name} is {here}, in the file it is {there}.")
    for source, said in record.sources.items():
        yield from _in_landing(workspace, source, said)
    states = _states(workspace)
    for said_of_window in record.checkpoints:
        problem = _in_lake(said_of_window, states.get((said_of_window.table, said_of_window.window)))
        if problem is not None:
            window = f", window {said_of_window.window}" if said_of_window.window else ""
            yield _Contradiction(f"{said_of_window.table}{window}", problem)


def _in_landing(workspace: Workspace, source: str, said: _SaidOfSource) -> Iterator[_Contradiction]:
    if source not in _landed_sources(workspace):
        yield _Contradiction(source, "nothing of it has landed here; the file is ahead.")
        return
    store = workspace.landing(source)
    for number, identity in said.epochs.items():
        here = {str(each.number): _identity(each) for each in store.epochs()}
        if number not in here:
            yield _Contradiction(source, f"epoch {number} has not begun here; the file is ahead.")
        elif here[number] != identity:
            yield _Contradiction(source, f"epoch {number} is of another server or slot than in the file.")
    last = said.last_batch_id
    if last is not None and not store.exists(last):
        yield _Contradiction(source, f"its last batch in the file, {last}, is not in landing.")
    ends = {manifest.epoch: manifest.stream.end_lsn for manifest in _streams(store) if manifest.stream}
    if said.stream_end is not None:
        epoch, end = said.stream_epoch, said.stream_end
        landed = None if epoch is None else ends.get(epoch)
        if landed is None or landed < end:
            yield _Contradiction(
                source,
                f"the file is ahead: the stream of epoch {epoch} ends at {landed or 'nothing'} here, "
                f"at {end} in it.",
            )


def _in_lake(said: Checkpoint, state: WindowState | None) -> str | None:
    """Return what the lake lacks of a checkpoint in the file; None if it holds it or is further."""
    if state is None:
        return "has no checkpoint here; the file is ahead."
    here = state.checkpoint
    if said.idempotency_key == here.idempotency_key:
        if said.content_hash != here.content_hash or said.rows != here.rows:
            return (
                f"was made from the same inputs, but has {here.rows} rows here and {said.rows} in the file."
            )
        return None
    if said.cursor and (not here.cursor or Position.parse(here.cursor) < Position.parse(said.cursor)):
        return (
            f"the file is ahead: it is complete to {here.cursor or 'nothing'} here, to {said.cursor} in it."
        )
    if here.committed_at < said.committed_at:
        return f"was last committed at {here.committed_at:%Y-%m-%d %H:%M:%S} here, later in the file."
    return None


def _landed(store: LandingStore) -> _SaidOfSource:
    streams = _streams(store)
    newest = streams[-1] if streams else None
    manifests = store.manifests()
    last = manifests[-1] if manifests else None
    return _SaidOfSource(
        epochs={str(each.number): _identity(each) for each in store.epochs()},
        last_batch_id=last.batch_id if last else None,
        stream_epoch=newest.epoch if newest else None,
        stream_end=newest.stream.end_lsn if newest and newest.stream else None,
        batches=len(manifests),
        watermark=last.arrival.watermark if last else None,
    )


def _streams(store: LandingStore) -> Sequence[Manifest]:
    """The stream batches that downstream may take, by epoch and position."""
    return [batch for batch in store.landed().batches if batch.stream is not None]


def _identity(epoch: EpochRecord) -> _SaidIdentity | None:
    facts = epoch.facts
    if facts is None:
        return None
    return _SaidIdentity(facts.system_identifier, facts.timeline, facts.slot, facts.consistent_point)


def _landed_sources(workspace: Workspace) -> list[str]:
    return [name for name in workspace.contracts.sources() if has_landed(workspace.home.path, name)]


def _states(workspace: Workspace) -> dict[tuple[str, str], WindowState]:
    """The state of every window of every table, by table and window."""
    found = {}
    for table in workspace.tables():
        snapshot = table.look()
        for window in snapshot.windows() if snapshot else ():
            state = snapshot.state(window) if snapshot else None
            if state is not None:
                found[table.spec.path, window] = state
    return found
