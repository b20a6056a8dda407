"""Finds the events of a subject's rows from the time when their tables had another key.

Such an event may not name its subject: its image is of a time before the table had the column, or has the
columns of the former key alone. So it is found by that key (``former_rows.FormerKeys``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pyarrow.compute as pc

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.subject_values import Of, emptied
from omnisupport_ingest.contracts.at_rest import SubjectTable
from omnisupport_ingest.contracts.encrypted_images import MARK, key_id
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.former_rows import FormerKeys, KeySpan
from omnisupport_ingest.read.holdings import Holding, holdings_of, landed_events
from omnisupport_ingest.read.row_cells import ErasedRow, cells_of_row, cells_of_row_left_over

_IMAGES = ("before", "after")
_COLUMNS = ("source_schema", "source_table", "key", "epoch", "commit_lsn", "ordinal", *_IMAGES)


@dataclass(frozen=True, slots=True)
class FormerOfTable:
    """What a table has by former keys of a subject's rows.

    ``texts``: how the subject column names it. ``spans``: keys and their events that are taken for the
    subject's. ``mixed``: those under which rows of other subjects landed too. ``named``: hashes of those keys
    in ``spans`` that events linked to the subject.
    """

    contract: TableContract
    texts: frozenset[str]
    spans: tuple[KeySpan, ...]
    mixed: tuple[KeySpan, ...]
    named: frozenset[str]

    @property
    def row(self) -> ErasedRow:
        return ErasedRow.of(self.contract, self.spans)


def former_of_subject(
    workspace: Workspace, source: str, subjects: Collection[Of], named: Collection[str]
) -> list[FormerOfTable]:
    """Return what the tables of ``source`` have by former keys of rows of ``subjects``.

    ``named``: hashes of former keys that an earlier command found. Once the subject's key is destroyed, what
    linked them may not be readable any more.
    """
    files, found = EventFiles.newest(workspace, source), []
    for each in workspace.contracts.of_source(source) if files is not None else ():
        if each.subject is None or not each.key_since:
            continue
        texts = frozenset(text for kind, text in subjects if kind == each.subject.name)
        if not texts:
            continue
        assert files is not None, "it was looked for"
        keys = FormerKeys(workspace, files, each)
        spans, mixed = keys.spans_of_subject(each.subject.column, texts, named)
        whole = frozenset(each for each in starmap(keys.hash_of, spans) if each is not None)
        found.append(FormerOfTable(each, texts, tuple(spans), tuple(mixed), whole))
    return [each for each in found if each.spans or each.mixed]


def cells_by_former_keys(
    workspace: Workspace, former: Sequence[FormerOfTable], *, left_over: bool = False
) -> list[Holding]:
    """Return the files above raw with cells by former keys; ``left_over``: those that no version holds."""
    cells_of = cells_of_row_left_over if left_over else cells_of_row
    return [holding for each in former if each.spans for holding in cells_of(workspace, each.row)]


def images_by_former_keys(
    workspace: Workspace, former: Sequence[FormerOfTable], ids: Collection[bytes], *, mixed: bool
) -> list[Holding]:
    """Return the files of landing and raw with readable personal values by former keys, in images that do not
    name the subject. ``ids``: of its own keys. ``mixed``: by those keys that rows of other subjects had
    too."""
    counts: dict[tuple[str, Path], int] = {}
    by_key: dict[tuple[str, Path], list[bytes]] = {}
    for each in former:
        for layer, path, text in _images(workspace, each, mixed=mixed):
            if MARK in text:
                if (encrypted_by := key_id(text)) is not None:
                    by_key.setdefault((layer, path), []).append(encrypted_by)
                continue
            table = SubjectTable.of(each.contract)
            said = (read_image(text) or {}).get(table.column)
            if said not in each.texts and emptied(text, table) != text:
                counts[layer, path] = counts.get((layer, path), 0) + 1
    living = workspace.subjects.living({each for found in by_key.values() for each in found})
    for place, found in by_key.items():
        if count := sum(each in living and each not in ids for each in found):
            counts[place] = counts.get(place, 0) + count
    return holdings_of(workspace, counts)


def _images(workspace: Workspace, former: FormerOfTable, *, mixed: bool) -> Iterator[tuple[str, Path, str]]:
    """Yield layer, file and text of each landed image by the former keys."""
    contract = former.contract
    row = ErasedRow.of(contract, former.mixed if mixed else former.spans)
    for layer, path, _, batch in landed_events(workspace, contract.source, _COLUMNS) if row.spans else ():
        of_table = pc.and_(
            pc.equal(batch.column("source_schema"), contract.schema),
            pc.equal(batch.column("source_table"), contract.table),
        )
        events = batch.filter(pc.and_(of_table, pc.is_in(batch.column("key"), row.keys)))
        for event in events.to_pylist():
            if row.holds(event["key"], (event["epoch"], event["commit_lsn"], event["ordinal"])):
                yield from ((layer, path, event[name]) for name in _IMAGES if event[name] is not None)
