"""Which events a version of a table was made from, found by the names of the files it took.

A window's state names these files. Since then, closing may have compacted them, or other files may have
replaced them. A replaced file stays on disk until ``sweep`` deletes it, and a compacted file names the files
it replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.dimension.shown_net_changes import made_from, newer_windows
from omnisupport_ingest.layers.events.quarantine_files import WITHHELD, EventsGone
from omnisupport_ingest.layers.plan import InputFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.storage import at_hand


@dataclass(frozen=True, slots=True)
class DimensionVersion:
    """One version of a dimension: its ``files``, and the files of the newer events that it was made from.

    ``accepted``: files of the table's accepted events. ``withheld``: quarantine files of its source, of all
    tables. Files of windows without an event at the LSN or above are left out.
    """

    files: tuple[LakeFile, ...]
    accepted: tuple[str, ...]
    withheld: tuple[str, ...]

    @classmethod
    def newest(cls, workspace: Workspace, contract: TableContract, epoch: int, lsn: Lsn) -> DimensionVersion:
        """Return the newest version, with the events at ``lsn`` of ``epoch`` or above. Raises ``EventsGone``
        if a file of its events is gone."""
        dimension = workspace.dimension(contract).open()
        state = dimension.state(WHOLE_TABLE)
        deduped = workspace.deduped(contract.source).open()
        quarantine = workspace.quarantine(contract.source).folder
        accepted: list[Path] = []
        withheld: list[Path] = []
        for window, inputs in _inputs(workspace, contract, state, (epoch, lsn)):
            names = frozenset(name for name in inputs if not name.startswith(WITHHELD))
            accepted += files_named(deduped, window, names)
            withheld += [at_hand(quarantine / name.removeprefix(WITHHELD)) for name in set(inputs) - names]
        gone = [path for path in withheld if not path.exists()]
        if gone:
            raise _gone(gone[0])
        return cls(
            dimension.all_files(),
            tuple(sorted(map(str, accepted))),
            tuple(sorted(map(str, withheld))),
        )


def files_named(above: TableSnapshot, window: str, names: Collection[str]) -> list[Path]:
    """Return the files in the table ``above`` that hold exactly the rows of ``window`` that files called
    ``names`` held.

    Raises ``EventsGone`` if there are no such files any more.
    """
    folder = above.table.folder
    there = [name for name in names if at_hand(folder / name).exists()]
    gone = frozenset(names) - set(there)
    if not gone:
        return [folder / name for name in sorted(there)]
    files = InputFiles.of((file.path for file in above.files(window)), above.state(window))
    read = files.holding(names)
    if read is None or not gone <= files.names(read):
        raise _gone(folder / min(gone))
    missing = frozenset(names) - files.names(read)
    return [folder / path for path in sorted({*read, *missing})]


def _inputs(
    workspace: Workspace, contract: TableContract, dimension: WindowState | None, since: tuple[int, Lsn]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield for each window with events at ``since`` or above the names of the files whose events are in the
    dimension.

    If the dimension shows the present net changes of a window, these are their present inputs: earlier input
    files may have been compacted. Otherwise they are the inputs of the net changes that it shows.
    """
    newest = workspace.net_changes(contract).open()
    newer, then = newer_windows(dimension, newest), made_from(newest, dimension)
    for window in sorted({*newest.windows(), *(then.windows() if then is not None else ())}):
        snapshot = then if window in newer else newest
        state = snapshot.state(window) if snapshot is not None else None
        if state is not None and _reaches(state, since):
            yield window, state.inputs


def _reaches(state: WindowState, since: tuple[int, Lsn]) -> bool:
    # The cursor is that of everything that landed for the window, withheld events too. Of batches that
    # retention has removed from landing it knows nothing; these are older than any comparison.
    if not state.checkpoint.cursor:
        return True
    last = Position.parse(state.checkpoint.cursor)
    return (last.epoch, last.commit_lsn) >= since


def _gone(path: Path) -> EventsGone:
    return EventsGone(
        f"{path} is not there any more, and a version of a table was made from it.",
        fix="Let the pipeline take in what has landed (omnisupport-ingest up, or materialize), and try "
        "again.",
    )
