"""Finds where the values of a subject are: images in landing and raw, and cells in tables downstream.

An encrypted image names its encryption key, so the images of a subject are found in every table of the source
without decrypting one. Images that landed plain say whose they are (``plain_images``). An image also names
its row and subject. By these the subject's rows are found in the tables that hold readable values, even if
landing and raw no longer have the events. Every file of the source is read.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.subject_values import Of
from omnisupport_ingest.contracts.at_rest import maybe_encrypted_columns, rows_in_line
from omnisupport_ingest.contracts.encrypted_images import MARK, key_id
from omnisupport_ingest.contracts.model import Subject, TableContract
from omnisupport_ingest.contracts.names import row_subject
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind
from omnisupport_ingest.contracts.pii_policies import KEEP
from omnisupport_ingest.contracts.recent_keys import ID_BYTES
from omnisupport_ingest.contracts.withdrawn import withdrawn_contracts
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.holdings import (
    Holding,
    count_cells,
    files_of_table,
    former_raw_events,
    held_files,
    holdings_of,
    landed_events,
    left_over_files,
)
from omnisupport_ingest.read.plain_images import Row, Sought, plain_images

_IMAGES = ("before", "after")
_MOVED = "moved_from_key"
_DELIVERED = "envelope"
_READ = ["source_schema", "source_table", "key", *_IMAGES, _DELIVERED, _MOVED]

_EXACT = "_cdc_exact"
"""Column of the texts of values that their column cannot hold, by the name of the column."""

_NO_TABLE = "?.?"
"""Name of the table of a line that could not be assigned to a table."""

_KEY_ID = "key_id"
_NAMES_KEY = rf"{re.escape(MARK)}(?P<id>[A-Za-z0-9+/]{{{len(binascii.b2a_base64(bytes(ID_BYTES))) - 1}}})"
"""Regular expression that finds the id of the key in an encrypted image."""


@dataclass
class Traced:
    """The files in landing and raw with images of a subject.

    Attributes:
        encrypted: files with images that its keys encrypted.
        plain: files with images that landed plain and have personal values.
        windows: the windows with encrypted images, by the id of their key.
        plain_windows: the windows with images that landed plain.
        rows: the rows of these images.
        subjects: what the subject columns of these images say.
        unnamed: the rows of those images whose subject column says nothing.
        contracts: those in force of the source, and withdrawn ones, whose events may be there still.
        images: how many images its keys encrypted; one that both landing and raw have counts once.
        plain_images: how many images landed plain and have personal values, counted likewise.
    """

    contracts: tuple[TableContract, ...]
    encrypted: list[Holding] = field(default_factory=list)
    plain: list[Holding] = field(default_factory=list)
    windows: dict[bytes, set[str]] = field(default_factory=dict)
    plain_windows: set[str] = field(default_factory=set)
    rows: set[Row] = field(default_factory=set)
    subjects: set[str] = field(default_factory=set)
    unnamed: set[Row] = field(default_factory=set)
    images: int = 0
    plain_images: int = 0


@dataclass(frozen=True, slots=True)
class Subjects:
    """Whom an erasure is of: ``ids`` of keys that encrypted images of subjects of one ``kind``, and
    ``named``, kinds and values of subjects."""

    kind: str
    ids: frozenset[bytes]
    named: frozenset[Of]

    def triples(self, source: str) -> list[tuple[str, str, str]]:
        """Return ``named`` in ``source`` as ``SubjectKeys`` takes them."""
        return [(source, *each) for each in sorted(self.named)]

    def all_ids(self, workspace: Workspace, source: str) -> frozenset[bytes]:
        """Return the ids of all of them; only of ``ids`` if the home has no file of keys."""
        return self.ids.union(workspace.subjects.ids_of(self.triples(source)))


def key_ids_of_row(workspace: Workspace, contract: TableContract, key: str) -> set[bytes]:
    """Return the ids of the keys that encrypted images of the row with ``key`` in the table.

    Where the table had another key, that text was the key of another row.
    """
    ids, positions = set(), ("epoch", "commit_lsn", "ordinal")
    for _, _, _, batch in landed_events(workspace, contract.source, [*_READ, *positions]):
        of_row = batch.filter(_mask_of_rows(batch, {(contract.schema, contract.table, key)}))
        if contract.other_keys:
            at = columnar.position_column(*(of_row.column(name) for name in positions))
            of_row = of_row.filter(pa.array(~columnar.within(at, contract.other_keys)))
        for name in (*_IMAGES, _DELIVERED):
            images = of_row.column(name)
            for image in images.filter(pc.match_substring(images, MARK)).to_pylist():
                ids.add(key_id(image))
    return {each for each in ids if each is not None}


def traced(workspace: Workspace, source: str, subjects: Subjects) -> Traced:
    """Return the images in landing and raw of ``source`` that are of ``subjects``, encrypted or plain."""
    of_subject = Traced(contracts_with_events(workspace, source))
    ids = subjects.all_ids(workspace, source)
    columns = {
        each.table_name: each.subject.column for each in of_subject.contracts if each.subject is not None
    }
    counts: dict[tuple[str, Path], int] = {}
    by_window: dict[str, dict[str, int]] = {}
    for layer, path, window, name, events in _encrypted_by(workspace, source, ids):
        counts[layer, path] = counts.get((layer, path), 0) + events.num_rows
        in_window = by_window.setdefault(window, {})
        in_window[layer] = in_window.get(layer, 0) + events.num_rows
        for each in events.column(_KEY_ID).unique().to_pylist():
            of_subject.windows.setdefault(binascii.a2b_base64(each), set()).add(window)
        for row, image in zip(_rows(events), events.column(name).to_pylist(), strict=True):
            if row is None:
                continue
            of_subject.rows.add(row)
            text = (read_image(image) or {}).get(columns.get(row[:2], ""))
            if text is None:
                of_subject.unnamed.add(row)
            else:
                of_subject.subjects.add(text)
    # Raw takes what landed; retention removes it from landing first.
    of_subject.images = sum(max(each.values()) for each in by_window.values())
    of_subject.encrypted = holdings_of(workspace, counts)
    _trace_plain(workspace, source, subjects, of_subject)
    return of_subject


def _trace_plain(workspace: Workspace, source: str, subjects: Subjects, of_subject: Traced) -> None:
    """Add the images of ``subjects`` that landed plain."""
    names = {each.table_name: each.full_name for each in of_subject.contracts}
    said = [(row_subject(names[row[:2]]), row[2]) for row in of_subject.unnamed if row[:2] in names]
    said += [(subjects.kind, text) for text in of_subject.subjects]
    # By another contract an image may have been of another subject than it says now.
    ids, of_said = subjects.all_ids(workspace, source), [(source, *each) for each in said]
    known = zip(said, workspace.subjects.ids_of(of_said), strict=False)
    theirs = {each for each, key_id in known if key_id in ids}
    sought = Sought(subjects.named | theirs)
    counts: dict[tuple[str, Path], int] = {}
    by_window: dict[str, dict[str, int]] = {}
    for image in plain_images(workspace, source, of_subject.contracts, sought):
        if image.window:
            of_subject.plain_windows.add(image.window)
        if image.personal:
            counts[image.layer, image.path] = counts.get((image.layer, image.path), 0) + 1
        if image.personal and image.window:
            in_window = by_window.setdefault(image.window, {})
            in_window[image.layer] = in_window.get(image.layer, 0) + 1
        if image.row is None:
            continue
        of_subject.rows.add(image.row)
        if image.of == (row_subject(names[image.row[:2]]), image.row[2]):
            of_subject.unnamed.add(image.row)
        else:
            of_subject.subjects.add(image.of[1])
    of_subject.plain_images = sum(max(each.values()) for each in by_window.values())
    of_subject.plain = holdings_of(workspace, counts)


def of_others(
    workspace: Workspace, contract: TableContract, of_subject: Traced, subjects: Subjects
) -> list[Holding]:
    """Return the files with images of the subject's rows that are of others than ``subjects``: that other
    keys encrypted, or that landed plain.

    Erased subjects do not count. Such images landed while a row did not name its subject, or belong to a
    former or later key of a row whose key is the subject.
    """
    wanted: list[tuple[str, str, str]] = []
    for each in of_subject.contracts:
        keys = {key for schema, table, key in of_subject.rows if (schema, table) == each.table_name}
        if each.subject is not None and each.key == (each.subject.column,):
            keys |= (moved := _moved(workspace, each, keys))
            wanted += [(each.source, each.subject.name, text) for key in moved for text in json.loads(key)]
        wanted += [(each.source, row_subject(each.full_name), key) for key in keys]
    ids = workspace.subjects.ids_of(wanted)
    others = workspace.subjects.living({*ids} - subjects.all_ids(workspace, contract.source))
    counts: dict[tuple[str, Path], int] = {}
    for layer, path, _, _, events in _encrypted_by(workspace, contract.source, others, former=True):
        counts[layer, path] = counts.get((layer, path), 0) + events.num_rows
    erased = workspace.subjects.destroyed(ids)
    gone = {each[1:] for each, key_id in zip(wanted, ids, strict=False) if key_id in erased}
    sought = Sought({each[1:] for each in wanted} - gone - subjects.named)
    for image in plain_images(workspace, contract.source, of_subject.contracts, sought):
        if image.personal:
            counts[image.layer, image.path] = counts.get((image.layer, image.path), 0) + 1
    return holdings_of(workspace, counts)


def of_nobody(workspace: Workspace, source: str) -> list[Holding]:
    """Return the files with encrypted lines that name neither a subject nor a row: they could not be read,
    and landed as they were delivered.

    One key encrypts all such lines of a table, so it is not destroyed with a subject.
    """
    names = [_NO_TABLE, *dict.fromkeys(each.full_name for each in contracts_with_events(workspace, source))]
    ids = workspace.subjects.ids_of([(source, row_subject(each), "") for each in names])
    counts: dict[tuple[str, Path], int] = {}
    for layer, path, _, _, events in _encrypted_by(workspace, source, workspace.subjects.living(ids)):
        counts[layer, path] = counts.get((layer, path), 0) + events.num_rows
    return holdings_of(workspace, counts)


def cells_above_raw(
    workspace: Workspace, contract: TableContract, of_subject: Traced, *, whole_rows: bool
) -> list[Holding]:
    """Return the files of the newest versions of the tables above raw that hold personal values of the
    subject.

    ``contract``: of a table of the subject. ``whole_rows``: count all values of the rows in ``of_subject``,
    even if a row names another subject now. Needed while windows wait to be judged again.
    """
    return _cells_in(workspace, contract, of_subject, whole_rows=whole_rows, left_over=False)


def cells_left_over(workspace: Workspace, contract: TableContract, of_subject: Traced) -> list[Holding]:
    """Return the same of files that no version of these tables holds: a run has written and not committed
    them.

    The run may be in progress or dead. A file that is still being written counts as one cell, because nobody
    can say how many it has.
    """
    return _cells_in(workspace, contract, of_subject, whole_rows=True, left_over=True)


def _cells_in(
    workspace: Workspace, contract: TableContract, of_subject: Traced, *, whole_rows: bool, left_over: bool
) -> list[Holding]:
    holding, files_of = [], left_over_files if left_over else held_files
    tables = (workspace.deduped(contract.source), workspace.quarantine(contract.source))
    of_events = [(table, [*files_of(table)]) for table in tables]
    for each in of_subject.contracts:
        wanted = Wanted.of(each, contract.subject, of_subject, whole_rows=whole_rows)
        if not wanted.columns or not (wanted.keys or wanted.named):
            continue
        count_in = partial(_event_cells, contract=each, wanted=wanted)
        for table, files in of_events:
            holding += count_cells(
                workspace, table, files_of_table(files, each), count_in, may_vanish=left_over
            )
        count_in = partial(_row_cells, wanted=wanted)
        # The certificate names the tables of withdrawn contracts whole; only their events are among others.
        for table in workspace.tables_of(each) if each in workspace.contracts.all else ():
            holding += count_cells(workspace, table, files_of(table), count_in, may_vanish=left_over)
    return holding


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which cells of a table are looked for: those of ``columns``, in three kinds of rows.

    These are rows whose column ``named`` has one of ``subjects``; rows with a key in ``unnamed`` whose column
    ``named`` is empty; and rows with a key in ``keys``, whatever they name.
    """

    columns: frozenset[str]
    named: str | None
    subjects: Collection[str]
    unnamed: Collection[str]
    keys: Collection[str]

    @classmethod
    def of(
        cls, contract: TableContract, subject: Subject | None, of_subject: Traced, *, whole_rows: bool
    ) -> Wanted:
        """Return what is looked for in the table of ``contract``. ``whole_rows``: as of
        ``cells_above_raw``."""
        rows, unnamed = (
            {key for *of, key in named if tuple(of) == contract.table_name}
            for named in (of_subject.rows, of_subject.unnamed)
        )
        column = subject_column_in_lake(contract, subject)
        if column is not None and contract.key == (column,):
            # An image that cannot be read is of whom its key names.
            unnamed = unnamed | {compact([text]) for text in of_subject.subjects}
        # A table of ``found_by_keys_alone``: its rows are known by the keys that landing and raw name.
        keys = rows if whole_rows or column is None else set()
        columns = frozenset(maybe_encrypted_columns(contract))
        return cls(columns, column, of_subject.subjects, unnamed, keys)

    def of_rows(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return which of ``rows`` (``_cdc_key``, and the column ``named``) are looked for."""
        matching = pc.is_in(rows["_cdc_key"], pa.array(sorted(self.keys), pa.string()))
        if self.named is None:
            return matching
        subjects = rows[self.named].cast(pa.string())
        unnamed = pc.is_in(rows["_cdc_key"], pa.array(sorted(self.unnamed), pa.string()))
        matching = pc.or_(matching, pc.and_(unnamed, subjects.is_null()))
        return pc.or_(matching, pc.is_in(subjects, pa.array(sorted(self.subjects), pa.string())))

    def of_image(self, key: str | None, image: Mapping[str, Any]) -> bool:
        """Whether an ``image`` of the row ``key`` is looked for."""
        subject = image.get(self.named) if self.named is not None else None
        return key in self.keys or (key in self.unnamed if subject is None else subject in self.subjects)

    def of_line(self, key: str | None, line: str) -> bool:
        """Whether a delivered ``line`` of the row ``key`` is looked for: a row in it names a subject, or none
        does and the key is that of such a row."""
        said = (
            {row.get(self.named) for row in rows_in_line(line)} - {None} if self.named is not None else set()
        )
        return key in self.keys or (not said.isdisjoint(self.subjects) if said else key in self.unnamed)

    def may_have(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return which of the events ``rows`` may have an image that is looked for."""
        matching = pc.is_in(rows["key"], pa.array(sorted({*self.keys, *self.unnamed}), pa.string()))
        for subject in self.subjects if self.named is not None else ():
            member = f"{json.dumps(self.named, ensure_ascii=False)}:{json.dumps(subject, ensure_ascii=False)}"
            for name in _IMAGES:
                matching = pc.or_(matching, pc.fill_null(pc.match_substring(rows[name], member), False))
        # A line has other spaces, and numbers without quotes.
        for part in ("\\", *self.subjects) if self.named is not None else ():
            matching = pc.or_(matching, pc.fill_null(pc.match_substring(rows[_DELIVERED], part), False))
        return matching


def wanted_images(path: Path, contract: TableContract, wanted: Wanted) -> Iterator[Mapping[str, Any] | None]:
    """Yield the images in the file of events at ``path`` that are looked for in the table of ``contract``;
    None for one that cannot be read, and for a delivered line."""
    names = pq.read_schema(path).names
    rows = pq.read_table(path, columns=[each for each in _READ if each in names], partitioning=None)
    if _DELIVERED not in names:
        rows = rows.append_column(_DELIVERED, pa.nulls(rows.num_rows, pa.string()))
    matching = pc.and_(wanted.may_have(rows), pc.equal(rows["source_schema"], contract.schema))
    if "source_table" in names:
        matching = pc.and_(matching, pc.equal(rows["source_table"], contract.table))
    rows = rows.filter(matching)
    keys = rows["key"].to_pylist()
    for name in _IMAGES:
        for key, text in zip(keys, rows[name].to_pylist(), strict=True):
            image = read_image(text)
            if wanted.of_image(key, image or {}):
                yield {} if text is None else image
    for key, line in zip(keys, rows[_DELIVERED].to_pylist(), strict=True):
        if line is not None and MARK not in line and wanted.of_line(key, line):
            yield None


def _event_cells(path: Path, contract: TableContract, wanted: Wanted) -> int:
    """Return how many cells are looked for; an image that cannot be read is one, and so is a line."""
    return sum(
        1 if image is None else sum(image[each] is not None for each in wanted.columns & image.keys())
        for image in wanted_images(path, contract, wanted)
    )


def _row_cells(path: Path, wanted: Wanted) -> int:
    present = frozenset(pq.read_schema(path).names)
    columns = sorted(wanted.columns & present)
    named = [wanted.named] if wanted.named is not None else []
    exact = [_EXACT] if _EXACT in present else []
    rows = pq.read_table(path, columns=["_cdc_key", *columns, *named, *exact], partitioning=None)
    rows = rows.filter(wanted.of_rows(rows))
    texts = [name for each in rows[_EXACT].to_pylist() for name, _ in each or ()] if exact else []
    in_exact = sum(name in wanted.columns for name in texts)
    in_columns: int = sum(rows.num_rows - rows[name].null_count for name in columns)
    return in_exact + in_columns


def found_by_keys_alone(contracts: Collection[TableContract], subject: Subject | None) -> list[TableContract]:
    """Return those of ``contracts`` that share ``subject``, and whose rows in the lake do not name it as the
    source does.

    Of these tables only rows with an image in landing or raw are found, by their keys. Rows of sealed windows
    are not.
    """
    return [
        each
        for each in contracts
        if subject is not None
        and each.subject is not None
        and each.subject.name == subject.name
        and subject_column_in_lake(each, subject) is None
    ]


def named_in_lake(workspace: Workspace, contract: TableContract, ids: Collection[bytes]) -> frozenset[Of]:
    """Return the subjects with keys ``ids`` that rows above raw name, in the tables that share the subject of
    ``contract``: where landing and raw no longer say who they are."""
    found = set[Of]()
    for each in workspace.contracts.of_source(contract.source):
        column = subject_column_in_lake(each, contract.subject)
        if column is None or each.subject is None:
            continue
        for table in workspace.tables_of(each):
            for _, path in held_files(table):
                if column in pq.read_schema(path).names:
                    rows = pq.read_table(path, columns=[column], partitioning=None)
                    texts = rows[column].cast(pa.string()).unique().drop_null().to_pylist()
                    of = [(each.source, each.subject.name, text) for text in texts]
                    known = zip(of, workspace.subjects.ids_of(of), strict=False)
                    found |= {(name, text) for (_, name, text), key_id in known if key_id in ids}
    return frozenset(found)


def contracts_with_events(workspace: Workspace, source: str) -> tuple[TableContract, ...]:
    """Return the contracts of ``source`` in force, and the withdrawn ones of other tables. Raises
    ``ContractError`` if the file of one is no contract."""
    in_force = workspace.contracts.of_source(source)
    names = {each.table_name for each in in_force}
    withdrawn = withdrawn_contracts(workspace.settings, workspace.contracts, source)
    return (*in_force, *(each for each in withdrawn if each.table_name not in names))


def subject_column_in_lake(contract: TableContract, subject: Subject | None) -> str | None:
    """Return the column in which the lake's rows name ``subject`` as the source does; None if they do not."""
    if contract.subject is None or subject is None or contract.subject.name != subject.name:
        return None
    column = next(each for each in contract.source_columns if each.name == contract.subject.column)
    same = column.pii == KEEP and column.type.kind in INTEGERS | {Kind.TEXT}
    return column.name if same else None


def _encrypted_by(
    workspace: Workspace, source: str, ids: Collection[bytes], *, former: bool = False
) -> Iterator[tuple[str, Path, str, str, pa.RecordBatch]]:
    """Yield landed events with an image that one of the keys ``ids`` encrypted: layer, file, window, which
    image it is, and the events with the key's id in the column ``_KEY_ID``. ``former``: of former files of
    raw too."""
    wanted = pa.array([binascii.b2a_base64(each, newline=False).decode() for each in ids], pa.string())
    if not len(wanted):
        return
    of_former = former_raw_events(workspace, source, _READ) if former else ()
    for layer, path, window, batch in chain(landed_events(workspace, source, _READ), of_former):
        for name in (*_IMAGES, _DELIVERED):
            key_ids = pc.struct_field(pc.extract_regex(batch.column(name), _NAMES_KEY), 0)
            matching = pc.is_in(key_ids, wanted)
            if matching.true_count:
                yield layer, path, window, name, batch.append_column(_KEY_ID, key_ids).filter(matching)


def _moved(workspace: Workspace, contract: TableContract, keys: Collection[str]) -> set[str]:
    """Return the former and later keys of the rows with ``keys``, as far as landing and raw know them."""
    ways: dict[str, set[str]] = {}
    for _, _, _, batch in landed_events(workspace, contract.source, _READ):
        of_table = pc.and_(
            pc.equal(batch.column("source_schema"), contract.schema),
            pc.equal(batch.column("source_table"), contract.table),
        )
        moves = batch.filter(pc.and_(of_table, batch.column(_MOVED).is_valid()))
        for key, former in zip(
            moves.column("key").to_pylist(), moves.column(_MOVED).to_pylist(), strict=True
        ):
            if key is not None:
                ways.setdefault(key, set()).add(former)
                ways.setdefault(former, set()).add(key)
    moved, pending = set[str](), [*keys]
    while pending:
        new = ways.get(pending.pop(), set()) - moved - {*keys}
        moved |= new
        pending += new
    return moved


def _rows(events: pa.RecordBatch) -> Iterator[Row | None]:
    """Yield the row of each event; None for one without a key."""
    columns = (events.column(name).to_pylist() for name in _READ[:3])
    for schema, table, key in zip(*columns, strict=True):
        yield None if key is None else (schema, table, key)


def _mask_of_rows(events: pa.RecordBatch, rows: Collection[Row]) -> pa.BooleanArray:
    """Return a mask of the ``events`` of ``rows``."""
    keys = pc.is_in(events.column("key"), pa.array(sorted({key for *_, key in rows}), pa.string()))
    if not keys.true_count:
        return keys
    wanted = set(rows)
    columns = (events.column(name).to_pylist() for name in _READ[:3])
    return pa.array([each in wanted for each in zip(*columns, strict=True)], pa.bool_())
