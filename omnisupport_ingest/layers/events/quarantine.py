"""Events that were not accepted, kept whole with the reason, in step with ``deduped_events``.

The quarantine of a window is the set of files that the state of its deduped window names
(``quarantine_files``). Three commits change it. If a run dies between any two of them, readers still find the
files of one state:

1. ``add``: the new files enter this table; nothing leaves it.
2. The commit of ``deduped_events`` names them, and no longer those of the previous judgement.
3. ``settle``: files that no state names any more leave this table, and named files that this table has lost
   come back. Anybody may do it, at any time, and more than once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import WindowChange, until_first
from omnisupport_ingest.lake.contenthash import ContentHash, hash_of_files
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles, stage_folders
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.layers.batch_facts import BatchFacts
from omnisupport_ingest.layers.checkpoints import Counts, Identity, Outcome, checkpoint_of
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles, Unsettled
from omnisupport_ingest.layers.plan import WindowPlan, Work, idempotency_key
from omnisupport_ingest.storage import at_hand

LAYER = "quarantine"

_NO_FACTS = BatchFacts(None, None, None, None)
_ATTEMPTS = 8


def stage(
    table: LakeTable, folders: Sequence[str], windows: Collection[str], *, unit: str, version: int
) -> StagedFiles:
    """Put the quarantined events that tasks wrote to ``folders`` in their places, for ``add``.

    ``version``: the version of ``deduped_events`` that the commit naming them will make. It becomes part of
    their paths.
    """
    table.open()
    if not folders:
        return StagedFiles(())
    return stage_folders(table, folders, unit=unit, generation=dict.fromkeys(windows, version))


def add(table: LakeTable, staged: StagedFiles, identity: Identity) -> None:
    """Add the files of ``staged`` to the table. A second call changes nothing."""

    def attempt(snapshot: TableSnapshot) -> None:
        changes = []
        for window in staged.windows():
            held = snapshot.files(window)
            known = {file.path for file in held}
            new = tuple(file for file in staged.of(window) if file.path not in known)
            if new:
                changes.append(_change(snapshot, window, new, (), identity))
        if changes:
            snapshot.commit(changes)

    retrying(attempt, table)


def settle(deduped: LakeTable, table: LakeTable, windows: Sequence[str], identity: Identity) -> None:
    """Make the table hold, for ``windows``, the files that states of ``deduped`` name or may still name.

    A named file that is missing on disk is not added: its window has to be judged again.
    """

    def attempt() -> None:
        if table.looks is not None:
            table.looks.begin()
        files = QuarantineFiles.of_tables(deduped, table)
        if files is None:
            return
        changes = []
        for window in dict.fromkeys(windows):
            found = files.unsettled(window)
            damaged = bool(files.quarantine.files(window)) and files.quarantine.state(window) is None
            if found is None and not damaged:
                continue
            new = _lost(table, found) if found is not None else ()
            left = found.left if found is not None else ()
            if new or left or damaged:
                changes.append(_change(files.quarantine, window, new, left, identity))
        if changes:
            files.quarantine.commit(changes)

    until_first(attempt, _ATTEMPTS)


def _lost(table: LakeTable, found: Unsettled) -> tuple[StagedFile, ...]:
    """The missing files that are still on disk."""
    back = []
    for path in found.missing:
        file = at_hand(table.folder / path)
        if file.exists():
            rows, stats = delta_stats(file)
            partition = layout.partition_in(path, table.spec.partition_by)
            back.append(StagedFile(path, found.window, partition, rows, file.stat().st_size, stats))
    return tuple(back)


def _change(
    snapshot: TableSnapshot,
    window: str,
    new: tuple[StagedFile, ...],
    leaving: tuple[LakeFile, ...],
    identity: Identity,
) -> WindowChange:
    gone, before = {file.path for file in leaving}, snapshot.state(window)
    stay = [file.path for file in snapshot.files(window) if file.path not in gone]
    paths = tuple(sorted({*stay, *(file.path for file in new)}))
    folder = snapshot.table.folder
    if before is not None and not gone:
        content = ContentHash.parse(before.checkpoint.content_hash)
        content += hash_of_files((at_hand(folder / file.path) for file in new), "event_hash")
    else:
        content = hash_of_files((at_hand(folder / path) for path in paths), "event_hash")
    key = idempotency_key(layer=LAYER, table=LAYER, window=window, inputs=paths, versions=())
    plan = WindowPlan(window, Work.APPEND, frozenset(paths), 1)
    outcome = Outcome(key, (), _NO_FACTS, Counts(quarantined=content.count))
    checkpoint = checkpoint_of(snapshot, plan, outcome, identity, content)
    return WindowChange(window, new, leaving, WindowState(1, paths, None, checkpoint), False)
