"""Spark tasks that take in files of events, judge them, or fold them.

They call the same functions as Spark's shuffles do, so the rows are the same. A task sees only its own files.
What it needs to know about other files is passed to it, or derived from the reports of all tasks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.broken_rules import BrokenRules, RulesLookout
from omnisupport_ingest.cdc.decrypting import has_encrypted
from omnisupport_ingest.cdc.envelope import LANDED_TYPE, QUARANTINE_BY, QUARANTINE_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.erasing import erased_in
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.judging import (
    ACCEPTED,
    ADDED,
    DUPLICATE,
    MARKS,
    JudgingRules,
    judge_unprotected,
    to_store,
)
from omnisupport_ingest.cdc.ordinary import Taken
from omnisupport_ingest.cdc.protecting import Protections
from omnisupport_ingest.cdc.subject_values import images_of_erased
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.lake.file_rows import batches_of
from omnisupport_ingest.lake.file_tasks import Output
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.integrity import verify
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY
from omnisupport_ingest.layers.events.event_copies import Copies, Marks
from omnisupport_ingest.layers.events.scenarios import Group, groups_in
from omnisupport_ingest.storage import at_hand

_RAW = arrow_schema(RAW_TYPE, without=())
_QUARANTINE = arrow_schema(QUARANTINE_TYPE, without=())
_NOT_JUDGED_BY = frozenset({"tx_id", "lsn", "chunk_id", "envelope", "batch_id", "landed_at", "file_name"})
_JUDGED_BY = pa.schema([each for each in _RAW if each.name not in _NOT_JUDGED_BY])
_WITH_BATCH = _JUDGED_BY.append(_RAW.field("batch_id"))


@dataclass(frozen=True)
class LandedFile:
    """A landed file of one window, and the facts of its batch's arrival as columns of raw.

    ``folder``: the source's landing folder. ``file``: the file in it, as its manifest describes it.
    """

    folder: Path
    file: DataFile
    arrival: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return self.file.rows

    @property
    def bytes(self) -> int:
        return self.file.bytes


def take_in(output: Output, files: Sequence[LandedFile]) -> str | None:
    """Write the events of ``files`` as ``RAW_TYPE`` rows.

    Returns None if a file is not what its manifest says; the driver does not check the bytes, this task does.
    """
    for file in files:
        try:
            verify(file.folder, file.file)
        except DamagedBatch:
            return None
        for rows in landed_rows(file):
            output.add(rows)
    return ""


def landed_rows(file: LandedFile) -> Iterator[pa.Table]:
    """Yield the events of ``file`` as ``RAW_TYPE`` rows."""
    place = _RAW.get_field_index("event_hash")
    known = {name: value for name, value in file.arrival.items() if name not in LANDED_TYPE.names}
    for batch in batches_of(str(at_hand(file.folder / file.file.path)), _RAW, known):
        rows = pa.Table.from_batches([batch])
        # Rows of another batch are not among those that the manifest counts.
        counted = pc.equal(rows["batch_id"], file.arrival["batch_id"])
        rows = rows if pc.all(counted).as_py() else rows.filter(counted)
        yield rows.set_column(place, _RAW.field(place), event_hashes(rows))


@dataclass(frozen=True)
class Staying:
    """Tables whose events of a raw file are judged and counted, and not written: files that stay hold them.

    ``accepted``, ``withheld``: the tables whose accepted and whose quarantined events are in such files, by
    name without the schema.
    """

    accepted: frozenset[str] = frozenset()
    withheld: frozenset[str] = frozenset()

    def left_out(self, judged: pa.RecordBatch) -> pa.RecordBatch:
        """Return the ``judged`` events without those that stay."""
        if not self.accepted:
            return judged
        tables, accepted = judged.column("source_table"), pc.equal(judged.column("verdict"), ACCEPTED)
        of_accepted, of_withheld = (
            pc.is_in(tables, pa.array(sorted(names), pa.string())) for names in (self.accepted, self.withheld)
        )
        return judged.filter(pc.invert(pc.if_else(accepted, of_accepted, of_withheld)))


_NOTHING_STAYS = Staying()


def judge(
    output: Output,
    files: Sequence[LakeFile],
    judging_rules: JudgingRules,
    copies: Copies | None = None,
    staying: Mapping[str, Staying] | None = None,
) -> str:
    """Judge the events of the raw ``files`` by ``judging_rules``.

    ``copies``: marks of events that repeat others or collide; None: there are none. ``staying``: by path of a
    file, the events of it that are not written. Accepted events are
    written to the table; quarantined ones are put beside, with the columns of ``quarantine``. A file is
    linked unchanged if all its events are of one table and accepted, none is of an erased row or subject, and
    no policy for personal data changes its values. Returns the text that ``Judged`` parses.
    """
    started = time.perf_counter()
    report, protected = Judged(), _protected_tables(judging_rules)
    marks = (copies or Copies()).of(files)
    lookout = RulesLookout(judging_rules.contracts)
    for file in files:
        name, marked, first = _only_table(file), marks[file.full_path], _First(judging_rules)
        found, stays = None, (staying or {}).get(file.full_path, _NOTHING_STAYS)
        if name is not None and not marked and not protected(name):
            found = _taken_over(file, first, lookout)
            if found is not None and name[1] not in stays.accepted:
                output.link(file, (("window", file.window), ("source_table", name[1])))
        report += found or _judge_rows(_Writing(output, stays), file, marked, first, lookout)
    return replace(report, seconds=time.perf_counter() - started).to_text()


@dataclass(frozen=True)
class Judged:
    """The report of a task of ``judge``: how many events there were, which rules they broke, and how many of
    the refused or late ones are alike. ``seconds``: how long the task took."""

    taken: Taken = field(default_factory=Taken)
    broken: BrokenRules = field(default_factory=BrokenRules)
    groups: Counter[Group] = field(default_factory=Counter)
    seconds: float = 0.0

    def __add__(self, other: Judged) -> Judged:
        return Judged(
            self.taken + other.taken,
            self.broken + other.broken,
            self.groups + other.groups,
            self.seconds + other.seconds,
        )

    @property
    def rules_share(self) -> float | None:
        """The share of the time that went into checking the rules of contracts; None without time."""
        return round(self.taken.rules_seconds / self.seconds, 6) if self.seconds else None

    def to_text(self) -> str:
        """The report as text, for ``parse``."""
        taken = [self.taken.events, self.taken.exactly, self.taken.rules_seconds]
        return json.dumps([taken, self.broken.to_text(), [*self.groups.items()], self.seconds])

    @classmethod
    def parse(cls, text: str) -> Judged:
        taken, broken, groups, seconds = json.loads(text)
        alike = Counter({Group(*group): events for group, events in groups})
        return cls(Taken(*taken), BrokenRules.parse(broken), alike, seconds)


def _protected_tables(judging_rules: JudgingRules) -> Callable[[TableName], bool]:
    """Return a function: are the events of a table changed by protection?

    Once one table of the source is protected, so is what has no contract (``cdc.protecting``). That includes
    a table in another schema with the same name as one with a contract.
    """
    protected = {each.table_name for each in judging_rules.contracts if needs_protection(each)}
    kept = {each.table_name for each in judging_rules.contracts} - protected
    return lambda name: bool(protected) and name not in kept


class _First:
    """The first events of a file, with their verdicts from the check whether all of its events are accepted.

    If one is not, ``_judge_rows`` reuses these verdicts, so that no event is judged twice. ``taken`` counts
    all events of the file.
    """

    def __init__(self, judging_rules: JudgingRules) -> None:
        self.judging_rules, self.taken = judging_rules, Taken()
        self._verdicts: list[pa.RecordBatch] = []

    def judge(self, marked: pa.RecordBatch) -> pa.RecordBatch:
        """Judge the next events of the file. None of them landed encrypted."""
        [judged] = judge_unprotected([marked], self.judging_rules, taken=self.taken, readable=True)
        self._verdicts.append(judged.select(list(ADDED)))
        return judged

    def judged(self, marked: pa.RecordBatch, start: int) -> Iterator[pa.RecordBatch]:
        """Yield the events of the file from number ``start`` on, as ``judge_unprotected`` yields them."""
        count, known = 0, None
        if self._verdicts:
            known = pa.Table.from_batches(self._verdicts).slice(start, len(marked))
            count = len(known)
        if known is not None and count:
            # These have verdicts already, and none of them landed encrypted.
            events = pa.Table.from_batches([marked.slice(0, count)]).drop_columns(list(MARKS))
            for name in ADDED:
                events = events.append_column(name, known[name])
            yield from events.combine_chunks().to_batches()
        if count < len(marked):
            yield from judge_unprotected([marked.slice(count)], self.judging_rules, taken=self.taken)


@dataclass(frozen=True)
class _Writing:
    """Writes judged events, but those that stay."""

    output: Output
    stays: Staying

    def write(self, judged: pa.RecordBatch, judging_rules: JudgingRules, protections: Protections) -> None:
        events = pa.Table.from_batches([self.stays.left_out(judged)])
        accepted, copies = (pc.equal(events["verdict"], each).to_numpy() for each in (ACCEPTED, DUPLICATE))
        store = partial(to_store, judging_rules=judging_rules, protections=protections)
        for stored in store(columnar.filter_slices(events, accepted).combine_chunks().to_batches()):
            self.output.add(pa.Table.from_batches([stored]))
        for stored in store(events.filter(pa.array(~(accepted | copies))).combine_chunks().to_batches()):
            self.output.put_beside(pa.Table.from_batches([stored]), _QUARANTINE, QUARANTINE_BY)


def _judge_rows(
    writing: _Writing, file: LakeFile, marks: Marks, first: _First, lookout: RulesLookout
) -> Judged:
    judging_rules = first.judging_rules
    protections = Protections.of(judging_rules.contracts, judging_rules.secrets)
    start, broken, groups = 0, BrokenRules(), Counter[Group]()
    for batch in batches_of(file.uri, _RAW, dict(file.partition)):
        marked = _marked(batch, *marks.between(start, start + len(batch)))
        for judged in first.judged(marked, start):
            broken += lookout.found(judged)
            groups.update(groups_in(judged))
            writing.write(judged, judging_rules, protections)
        start += len(batch)
    return Judged(first.taken, broken, groups)


def _taken_over(file: LakeFile, first: _First, lookout: RulesLookout) -> Judged | None:
    """Return the report on ``file`` if it can be taken over unchanged: all its events are of one table and
    accepted in time. Else return None.

    It can in the usual case. This reads only the columns that judging needs,
    and the delivered lines while anybody is erased.
    """
    broken = BrokenRules()
    columns = _WITH_BATCH if first.judging_rules.rejected else _JUDGED_BY
    if first.judging_rules.subjects:
        columns = columns.append(_RAW.field("envelope"))
    for batch in batches_of(file.uri, columns, dict(file.partition)):
        marked = _marked(batch, *_distinct(len(batch)))
        if not marked.column("identity").equals(batch.column("identity")):
            return None
        if has_encrypted(batch):
            # The contract does not encrypt any more, so the values must become readable.
            return None
        if any(erased_in(batch, first.judging_rules.erasures)):
            return None
        if len(images_of_erased(batch, first.judging_rules.subjects)["envelope"]):
            return None
        judged = first.judge(marked)
        in_time = pc.and_(pc.equal(judged.column("verdict"), ACCEPTED), pc.invert(judged.column("late")))
        if not pc.all(in_time).as_py():
            return None
        broken += lookout.found(judged)
    return Judged(first.taken, broken)


def _distinct(count: int) -> tuple[pa.Array, pa.Array]:
    """Return the marks of ``count`` events that do not share their position (``dedupe.mark_distinct``)."""
    return pa.repeat(pa.scalar(1, pa.int32()), count), pa.repeat(pa.scalar(False), count)


def _marked(batch: pa.RecordBatch, copies: pa.Array, collisions: pa.Array) -> pa.RecordBatch:
    """Return raw events with their marks, and with the identity that they would land with today
    (``deduped.to_judge``)."""
    place = batch.schema.get_field_index("identity")
    identity = batch.column(place)
    if identity.null_count < len(batch):
        identity = pc.replace_substring_regex(identity, EARLIER_IDENTITY, r"\1]")
    marked = batch.set_column(place, batch.schema.field(place), identity)
    return marked.append_column("copy", copies).append_column("collision", collisions)


def _only_table(file: LakeFile) -> TableName | None:
    """Return the table of all events of a raw file, by its footer; None if they are of several."""
    footer = pq.read_metadata(file.uri)
    schema, table = (_only_value(footer, column) for column in ("source_schema", "source_table"))
    return None if schema is None or table is None else (schema, table)


def _only_value(footer: pq.FileMetaData, name: str) -> str | None:
    """Return the only text in the column ``name``, by the footer; None if there are several or it is
    unknown."""
    found: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = (group.column(place) for place in range(group.num_columns))
        statistics = next(each.statistics for each in columns if each.path_in_schema == name)
        if statistics is None or not statistics.has_min_max:
            return None
        if not statistics.has_null_count or statistics.null_count:
            return None
        found |= {statistics.min, statistics.max}
    return found.pop() if len(found) == 1 else None
