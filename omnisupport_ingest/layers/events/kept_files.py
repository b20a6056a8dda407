"""Which files of a window of deduped events stay when contracts of some of its tables have changed.

No verdict on an event depends on the contract of another table. So where nothing but contracts changed, the
events of the other tables have the verdicts that they had, and their files stay as they are. All raw events
are still judged: a raw file holds events of several tables, and the counts of a window are of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile, unit_of
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.events.event_tasks import Staying
from omnisupport_ingest.layers.events.quarantine_files import named_by
from omnisupport_ingest.layers.plan import InputFiles, Upstream
from omnisupport_ingest.layers.versions import contracts_changed
from omnisupport_ingest.storage import at_hand

_FILES_KEPT = 4_096


@dataclass(frozen=True)
class KeptFiles:
    """The files of one window that stay.

    ``accepted``: files of deduped events. ``withheld``: paths of quarantine files. ``staying``: by path of a
    raw file, the tables whose events in it are in these files. ``made_again``: the other tables, by full
    name.
    """

    accepted: tuple[LakeFile, ...] = ()
    withheld: tuple[str, ...] = ()
    staying: Mapping[str, Staying] = field(default_factory=dict)
    made_again: tuple[str, ...] = ()


NONE_KEPT = KeptFiles()


@dataclass(frozen=True)
class JudgedAgain:
    """A window that is to be judged again, as it was planned.

    ``raw``: its raw files, and ``inputs`` their names. ``tables``: the tables of its events, by full name.
    ``distinct``: whether all events certainly have distinct positions.
    """

    window: str
    upstream: Upstream
    raw: Sequence[LakeFile]
    inputs: InputFiles
    tables: frozenset[str]
    distinct: bool


def kept_files(
    snapshot: TableSnapshot, quarantine: LakeTable, again: JudgedAgain, contracts: Iterable[TableContract]
) -> KeptFiles:
    """Return the files of the window that stay in ``snapshot``, of the deduped events, and in ``quarantine``.

    None stay if anything but contracts changed, if new events may repeat earlier ones, or if another program
    has written to the window. ``contracts``: of the source. Events without a contract are always made again:
    the contracts of the other tables decide whether their values are protected.
    """
    state, upstream = snapshot.state(again.window), again.upstream
    if state is None or snapshot.retyped or state.upstream_table_id != upstream.table_id:
        return NONE_KEPT
    changed = contracts_changed(state.versions, upstream.versions)
    judged = again.inputs.holding(state.inputs)
    if changed is None or judged is None or not frozenset(state.inputs) <= upstream.units:
        return NONE_KEPT
    if not (again.distinct or again.inputs.names(judged) == upstream.units):
        return NONE_KEPT
    held = snapshot.files(again.window)
    rows = sum(file.rows for file in held)
    if rows != state.checkpoint.deduped or not all(unit_of(file.path) for file in held):
        return NONE_KEPT
    unchanged = [each for each in contracts if each.name not in changed]
    names = _names_kept(again.tables, unchanged)
    accepted = tuple(file for file in held if dict(file.partition)["source_table"] in names)
    if not accepted:
        return NONE_KEPT
    withheld = _withheld_kept(quarantine, named_by(state), names)
    staying = Staying(names, frozenset() if withheld is None else names)
    return KeptFiles(
        accepted,
        withheld or (),
        {file.full_path: staying for file in again.raw if file.path in judged},
        tuple(sorted(again.tables - {each.full_name for each in unchanged if each.table in names})),
    )


def _names_kept(tables: Collection[str], unchanged: Iterable[TableContract]) -> frozenset[str]:
    """Return the names, without a schema, that only tables with an ``unchanged`` contract have. Tables of one
    name in two schemas share their files."""
    every = {each.full_name: each.table for each in unchanged}
    others = [each for each in tables if each not in every]
    return frozenset(
        name
        for full_name, name in every.items()
        if full_name in tables and not any(each.endswith(f".{name}") for each in others)
    )


def _withheld_kept(
    quarantine: LakeTable, paths: Iterable[str], names: frozenset[str]
) -> tuple[str, ...] | None:
    """Return those of the quarantine files at ``paths`` that hold events of the tables called ``names``; None
    if one of them holds events of other tables too: then all of them are written anew."""
    kept = []
    for path in paths:
        tables = _tables_in(str(at_hand(quarantine.folder / path)))
        if tables <= names:
            kept.append(path)
        elif tables & names:
            return None
    return tuple(kept)


@lru_cache(maxsize=_FILES_KEPT)
def _tables_in(uri: str) -> frozenset[str | None]:
    """Return the names of the tables with events in a quarantine file. A file never changes."""
    column = pq.read_table(uri, columns=["source_table"], partitioning=None).column(0)
    return frozenset(pc.unique(column).to_pylist())
