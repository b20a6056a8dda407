"""What landed of a row while its table had another key, without Spark.

Such events count for nothing in net changes, dimension and history, but raw and deduped events keep their
values. Whoever erases a row has to erase those too. An event names its row by the key of its time alone, so
other events have to link the keys (``FormerKeys``). They are read where values are whole: from landing and
raw, decrypted, under the names that columns had then; and from deduped events and quarantine, which have what
landing and raw have forgotten.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from omnisupport_ingest.cdc.decrypting import decrypt
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Span, key_hash
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import PositionTuple, just_below
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.column_names import ColumnNames
from omnisupport_ingest.read.holdings import Holding, holdings_of, landed_events
from omnisupport_ingest.read.row_traces import KeyChange, key_changes, spans_of

_BATCH_ROWS = 4_096
_WITHOUT_END = (1 << 31, 0, 0)
"""A position above every event."""

_POSITION = ("epoch", "commit_lsn", "ordinal")
_COLUMNS = (
    *_POSITION,
    "op",
    "source_schema",
    "source_table",
    "key",
    "before",
    "after",
    "unchanged",
    "envelope",
)
_OF_ROWS = pa.array(["c", "d", "r", "u"])

KeySpan = tuple[str, Span]
"""A key of a row, and which of the key's events belong to the row."""

_Known = dict[int, dict[str, list[Span]]]
"""By era: its keys, each with the spans that belong to what is looked for."""

_Image = Mapping[str, Any]


def of_this_key(contract: TableContract, spans: Iterable[KeySpan]) -> list[KeySpan]:
    """Return ``spans`` cut off where the present key begins: below, their texts are keys of other rows."""
    since = contract.key_since
    if since is None:
        return list(spans)
    begins = just_below((since.epoch, since.commit_lsn.value, since.ordinal))
    return [(key, Span(max(begins, span.after or begins), span.through)) for key, span in spans]


class _Event(NamedTuple):
    """An event of a row. ``era``: the number of the key that it has."""

    era: int
    position: PositionTuple
    key: str
    before: _Image | None
    after: _Image | None
    envelope: bool

    @property
    def images(self) -> list[_Image]:
        return [each for each in (self.before, self.after) if each is not None]


class FormerKeys:
    """The keys that rows of a table had in other eras of its key (``contracts.landed_keys``).

    Eras are taken in order, the one nearest to the present key first. What a row was called in an era is
    known by the columns of its present key, where they have all of the former one. Elsewhere two kinds of
    events link the keys: those of that era with the columns of the present key in an image, whatever they are
    called there; and those of nearer eras, of the row, with the columns of the former key. Of these the one
    next to the era counts, since later the columns may have got other values. All events of that
    former key in the era are taken for the row's; so are those of the keys from which it came by key changes.
    """

    def __init__(self, workspace: Workspace, files: EventFiles, contract: TableContract) -> None:
        self._workspace, self._files, self._contract = workspace, files, contract
        eras = contract.key_eras
        self._starts = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in eras]
        farther = [*range(min(contract.key_era, len(eras)) - 1, -1, -1)]
        self._others = [*farther, *range(contract.key_era + 1, len(eras))]

    def spans(self, spans: Sequence[KeySpan]) -> list[KeySpan]:
        """Return the spans of other eras that belong to the row which has ``spans`` of the present key."""
        rows = [dict(zip(self._contract.key, json.loads(key), strict=True)) for key, _ in spans]
        known: _Known = {self._contract.key_era: {}}
        for key, span in spans:
            known[self._contract.key_era].setdefault(key, []).append(span)

        def of_row(event: _Event) -> bool | None:
            return any(self._shows(event, row) for row in rows) or None

        for era in self._others:
            columns = self._columns_of_present_key(era)
            if columns is not None:
                names = {compact([row[each] for each in columns]) for row in rows}
            else:
                names, _ = self._linked(era, known, of_row)
            known[era] = self._with_changes(era, names)
        return _listed(known, self._others)

    def hash_of(self, key: str, span: Span) -> str | None:
        """Return the hash that stands for ``key`` in the era that ``span`` covers; None if it covers none
        whole."""
        return next((_hash(era, key) for era in self._others if self._span(era) == span), None)

    def spans_of_subject(
        self, column: str, texts: Collection[str], named: Collection[str] = ()
    ) -> tuple[list[KeySpan], list[KeySpan]]:
        """Return the spans of earlier eras that belong to the rows of a subject, which ``column`` names by
        one of ``texts``; and those in which rows of another subject landed by the same key too.

        ``named``: hashes (``hash_of``) of former keys that are known to be of such rows.
        """
        known: _Known = {self._contract.key_era: {}}
        mixed: _Known = {}

        def of_subject(event: _Event) -> bool | None:
            values = (self._names.value(each, column, event.position) for each in event.images)
            said = {each for each in values if each is not None}
            if said:
                return said <= {*texts}
            former = bool(named) and event.era < self._contract.key_era
            return (former and _hash(event.era, event.key) in named) or None

        earlier = [each for each in self._others if each < self._contract.key_era]
        for era in earlier:
            names, of_others = self._linked(era, known, of_subject)
            mixed[era] = {name: [self._span(era)] for name in sorted(names & of_others)}
            known[era] = self._with_changes(era, names - of_others)
        return _listed(known, earlier), _listed(mixed, earlier)

    def unlinked(self) -> list[Holding]:
        """Return the files with values of events of which nothing says what their row is called now: neither
        an image has the columns of the present key, nor does an event of a nearer era have those of the
        former key.
        """
        linked: dict[int, npt.NDArray[np.int64]] = {}
        searched = [each for each in self._others if self._columns_of_present_key(each) is None]
        for era in searched:
            found = array("q")
            for _, _, events in self._batches():
                sure = self._are_linked(events, linked)
                for event, is_linked in zip(events, sure.tolist(), strict=True):
                    if event.era == era and self._key(event, self._contract.key, event.images) is not None:
                        found.append(hash(event.key))
                    elif is_linked and event.era in self._nearer(era):
                        columns = self._columns(era)
                        names = [self._key(event, columns, [each]) for each in event.images]
                        found.extend(hash(name) for name in names if name is not None)
            linked[era] = np.unique(np.frombuffer(found, np.int64)) if found else np.zeros(0, np.int64)
            known = self._names_in(era, linked[era])
            came = [hash(name) for name, _ in self._came_from(era, known)]
            linked[era] = np.union1d(linked[era], np.array(came, np.int64))
        counts: dict[tuple[str, Path], int] = {}
        for place, path, events in self._batches() if searched else ():
            sure = self._are_linked(events, linked)
            of_nobody = (each for each, known in zip(events, sure.tolist(), strict=True) if not known)
            if count := sum(self._has_values(each) for each in of_nobody):
                counts[place, path] = counts.get((place, path), 0) + count
        return holdings_of(self._workspace, counts)

    def _linked(
        self, era: int, known: _Known, is_of_it: Callable[[_Event], bool | None]
    ) -> tuple[set[str], set[str]]:
        """Return the keys in ``era`` of what is looked for, and those of what is not.

        ``is_of_it``: whether an event says by its images that it is of that; None: it says nothing.
        ``known``: by nearer era, its keys.
        """
        found, others, backward = set[str](), set[str](), era < self._contract.key_era
        nearer, columns = self._nearer(era), self._columns(era)
        # Of a row the present keys are known; a subject is known by what events say.
        by_key = bool(known[self._contract.key_era])
        beside: dict[tuple[int, str], tuple[PositionTuple, str]] = {}
        for event in chain.from_iterable(events for _, _, events in self._batches()):
            if event.era == era and event.key not in found & others:
                said = is_of_it(event)
                if said is not None:
                    (found if said else others).add(event.key)
            if event.era not in nearer:
                continue
            of_key = any(each.holds(event.position) for each in known[event.era].get(event.key, ()))
            if not (of_key or (not by_key and is_of_it(event))):
                continue
            name = self._key(event, columns, event.images[:: 1 if backward else -1])
            best = beside.get((event.era, event.key))
            if name is not None and (best is None or (event.position < best[0]) == backward):
                beside[event.era, event.key] = event.position, name
        return found | {name for _, name in beside.values()}, others

    def _with_changes(self, era: int, names: Collection[str]) -> dict[str, list[Span]]:
        """Return the spans of the keys ``names`` of ``era``, and of the keys from which their rows came."""
        found = {name: [self._span(era)] for name in sorted(names)}
        for name, span in self._came_from(era, names):
            found.setdefault(name, []).append(span)
        return found

    def _came_from(self, era: int, names: Collection[str]) -> Iterator[KeySpan]:
        """Yield the keys from which rows came, by key changes in ``era``, to one of its keys ``names``, each
        with the events that belong to such a row."""
        of_era = self._span(era)
        changes = [each for each in self._changes if of_era.holds(each.began)]
        for name in sorted(names) if changes else ():
            ends = {each.left for each in changes if each.old == name} | {of_era.through}
            for end in sorted(ends):
                for former, span in spans_of(name, end, changes):
                    if former not in names:
                        yield former, Span(span.after or of_era.after, span.through)

    def _names_in(self, era: int, hashes: npt.NDArray[np.int64]) -> set[str]:
        """Return the keys of ``era`` to which some row changed its key, if they are among ``hashes``."""
        of_era = self._span(era)
        names = [each.new for each in self._changes if each.new is not None and of_era.holds(each.began)]
        known = np.isin(np.array([hash(each) for each in names], np.int64), hashes)
        return {name for name, is_known in zip(names, known.tolist(), strict=True) if is_known}

    def _are_linked(
        self, events: Sequence[_Event], linked: Mapping[int, npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.bool_]:
        """Return which of ``events`` are of rows whose present key is known. ``linked``: by era, the hashes
        of the keys of such rows."""
        hashes = np.array([hash(each.key) for each in events], np.int64)
        eras = np.array([each.era for each in events], np.int64)
        sure = np.ones(len(events), np.bool_)
        for era in self._others:
            if self._columns_of_present_key(era) is None:
                of_era = eras == era
                sure[of_era] = np.isin(hashes[of_era], linked.get(era, ()))
        return sure

    def _has_values(self, event: _Event) -> bool:
        """Return whether ``event`` has values beside those of its key."""
        names = {*self._columns(event.era), *self._contract.key}
        images = (value for each in event.images for name, value in each.items() if name not in names)
        return event.envelope or any(value is not None for value in images)

    def _shows(self, event: _Event, row: Mapping[str, str]) -> bool:
        """Return whether an image of ``event`` has the values of ``row``."""
        return any(
            all(self._names.value(image, column, event.position) == text for column, text in row.items())
            for image in event.images
        )

    def _key(self, event: _Event, columns: Sequence[str], images: Iterable[_Image]) -> str | None:
        """Return the text that a key of ``columns`` has by the first of ``images`` that shows them all."""
        for image in images:
            texts = [self._names.value(image, each, event.position) for each in columns]
            if all(isinstance(text, str) for text in texts):
                return compact(texts)
        return None

    def _columns(self, era: int) -> tuple[str, ...]:
        return self._contract.key_eras[era].key

    def _columns_of_present_key(self, era: int) -> list[str] | None:
        """Return the columns of the key of ``era`` by their names in the present key; None if that lacks
        one."""
        present = {self._names.now(each): each for each in self._contract.key}
        columns = [self._names.now(each) for each in self._columns(era)]
        return [present[each] for each in columns] if present.keys() >= {*columns} else None

    def _nearer(self, era: int) -> range:
        """Return the eras from ``era`` to the present one, without itself."""
        present = self._contract.key_era
        return range(era + 1, present + 1) if era < present else range(present, era)

    def _span(self, era: int) -> Span:
        starts = [*self._starts, _WITHOUT_END]
        return Span(just_below(starts[era]) if era else None, just_below(starts[era + 1]))

    @cached_property
    def _changes(self) -> list[KeyChange]:
        return key_changes(self._files, self._contract)

    @cached_property
    def _names(self) -> ColumnNames:
        recorded = SchemaChanges(self._workspace.landing(self._contract.source).folder).read()
        return ColumnNames.of(recorded, self._contract.name)

    def _batches(self) -> Iterator[tuple[str, Path, list[_Event]]]:
        """Yield place, file and events of rows of the table, some thousand in memory at once."""
        source = self._contract.source
        for place, path, _, batch in landed_events(self._workspace, source, _COLUMNS):
            of_table = pc.and_(
                pc.equal(batch.column("source_schema"), self._contract.schema),
                pc.equal(batch.column("source_table"), self._contract.table),
            )
            events = batch.filter(of_table)
            if events.num_rows:
                readable, _ = decrypt(events, [self._contract], self._workspace.subjects)
                yield place, path, self._events(readable)
        tables = (self._files.deduped, self._files.quarantine)
        of_tables = (self._files.accepted(self._contract), self._files.withheld)
        for snapshot, files in zip(tables, of_tables, strict=True):
            for file in files:
                for batch in _scanned(file, self._contract):
                    yield snapshot.table.spec.path, Path(file.stored), self._events(batch)

    def _events(self, batch: pa.RecordBatch) -> list[_Event]:
        rows = batch.filter(pc.and_(pc.is_in(batch.column("op"), _OF_ROWS), batch.column("key").is_valid()))
        found = []
        for each in rows.to_pylist():
            position = each["epoch"], each["commit_lsn"], each["ordinal"]
            before, after = read_image(each["before"]), read_image(each["after"])
            line = each["envelope"] is not None
            found.append(_Event(self._era_of(position), position, each["key"], before, after, line))
        return found

    def _era_of(self, position: PositionTuple) -> int:
        return max((number for number, start in enumerate(self._starts) if position >= start), default=0)


def _hash(era: int, key: str) -> str:
    # In another era the same text is the key of another row.
    return key_hash(f"{era} {key}")


def _listed(known: _Known, eras: Sequence[int]) -> list[KeySpan]:
    return [(name, span) for era in eras for name, spans in known[era].items() for span in spans]


def _scanned(file: LakeFile, contract: TableContract) -> Iterator[pa.RecordBatch]:
    """Yield the events of the table in ``file``."""
    in_path = [name for name, _ in file.partition]
    names = [name for name in _COLUMNS if name not in in_path]
    where = pc.field("source_schema") == contract.schema
    if "source_table" in names:
        where &= pc.field("source_table") == contract.table
    schema = arrow_schema(RAW_TYPE, without=(WINDOW, *in_path))
    yield from (
        ds.dataset(file.uri, schema=schema, format="parquet")
        .scanner(columns=names, filter=where, batch_size=_BATCH_ROWS, use_threads=False)
        .to_batches()
    )
