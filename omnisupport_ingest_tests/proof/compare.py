"""Every layer of a home against what it must hold, read from the tables' files without Spark."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.ordinary_fold import fold_ordinary
from omnisupport_ingest.cdc.row_fold import merge_groups
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension.net_changes import content_of
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.cdc.kernels import EVENTS
from omnisupport_ingest_tests.cdc.lanes import scope_text
from omnisupport_ingest_tests.oracle.judging import (
    ACCEPTED,
    DUPLICATE,
    FOUND_BY,
    QUARANTINED,
    Delivery,
    Verdict,
    ledger,
)
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape
from omnisupport_ingest_tests.proof.expected import (
    Current,
    Expected,
    KeyInWindow,
    Latest,
    Values,
)
from omnisupport_ingest_tests.proof.history import tx_id_of
from omnisupport_ingest_tests.proof.landed import Copy
from omnisupport_ingest_tests.proof.privacy import Hidden, as_received, exposed, readable_members
from omnisupport_ingest_tests.proof.tables import KEY, SOURCE, from_lake
from omnisupport_ingest_tests.proof.versions import Version

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it must be; ``lane`` is the seed of the history, null for what all share."""

    layer: str
    subject: str
    found: object
    expected: object
    lane: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}: {self.subject}\n  found    {self.found}\n  expected {self.expected}"


def differences(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """Layer by layer, in the order the data takes."""
    yield from differences_of_events(workspace, expected)
    for shape in expected.shapes:
        yield from _net_changes(workspace, expected, shape)
        yield from _dimension(workspace, expected, shape)
        yield from _history(workspace, expected, shape)
    yield from _hashes(workspace)
    yield from _exposed(workspace, expected)


def differences_of_events(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """Of the layers of events alone."""
    yield from _landing(workspace, expected)
    yield from _raw(workspace, expected)
    yield from _deduped(workspace, expected)
    yield from _quarantine(workspace, expected)
    yield from _ledger(workspace, expected)


def quarantined(workspace: Workspace) -> Rows:
    """The quarantine: the files that the states of ``deduped_events`` name."""
    named = _named_files(workspace)
    files = workspace.quarantine(SOURCE).open().all_files()
    return _read(file for file in files if file.path in named)


def _named_files(workspace: Workspace) -> set[str]:
    deduped = workspace.deduped(SOURCE).open()
    states = (deduped.state(window) for window in deduped.windows())
    return {path for state in states if state is not None for path in state.companions}


def folded_by_columns(workspace: Workspace, shape: TableShape) -> int:
    """How many groups of the events of a table the kernel of whole columns folds, if it is asked."""
    accepted, withheld = _rows(workspace.deduped(SOURCE)), quarantined(workspace)
    told = [{**row, "withheld": False} for row in accepted] + [{**row, "withheld": True} for row in withheld]
    events = [row for row in told if row["source_table"] == shape.name]
    if not events:
        return 0
    table = pa.Table.from_pylist(events, schema=EVENTS).combine_chunks()
    folded, _ = fold_ordinary(table, (*KEY, *shape.columns), KEY)
    return 0 if folded is None else folded.num_rows


def _rows(table: LakeTable) -> Rows:
    return _read(table.open().all_files()) if table.exists else []


def _read(files: Iterable[LakeFile]) -> Rows:
    found: Rows = []
    for file in files:
        of_partition = dict(file.partition)
        rows = pq.read_table(file.uri, partitioning=None).to_pylist(maps_as_pydicts="strict")
        found += [{**row, **of_partition} for row in rows]
    return found


def _folded_rows(workspace: Workspace, contract: TableContract) -> Rows:
    """The net changes of ``contract``: of an open window with its parts merged, as who reads it does."""
    table = workspace.net_changes(contract)
    if not table.exists:
        return []
    snapshot = table.open()
    whole: list[LakeFile] = []
    found: Rows = []
    for window in snapshot.windows():
        files, state = snapshot.files(window), snapshot.state(window)
        if len(files) < 2 or state is None or state.closed:
            whole += files
            continue
        parts = pa.concat_tables(pq.read_table(file.uri, partitioning=None) for file in files)
        parts = parts.append_column(WINDOW, pa.repeat(window, parts.num_rows))
        parts = parts.cast(pa.schema([field.with_nullable(True) for field in parts.schema]))
        for merged in merge_groups(parts.to_batches(), table_columns_of(contract)):
            found += merged.to_pylist(maps_as_pydicts="strict")
    return [*_read(whole), *found]


def _raw(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    rows = _rows(workspace.raw(SOURCE))
    yield from at_rest("raw_cdc_staging", rows, expected.readable)
    rows = as_received(rows, workspace.subjects)
    held: dict[int, object] = {row["lsn"]: (*_fact(row), *_of_copy(row)) for row in rows}
    if len(held) != len(rows):
        yield Difference("raw_cdc_staging", "copies", len(rows), len(held))
    wanted = {number: _raw_row(expected, number) for number in expected.verdicts}
    for number in sorted(held.keys() | wanted.keys()):
        if held.get(number) != wanted.get(number):
            verdict = expected.verdicts.get(number)
            key = verdict.delivery.event.key if verdict is not None else None
            found, due = held.get(number), wanted.get(number)
            yield Difference("raw_cdc_staging", f"copy {number}", found, due, _lane(key))


ReadableOf = Callable[[Mapping[str, Any]], frozenset[str] | None]
"""The columns of a landed row that land as they are; null: all of them."""


def at_rest(layer: str, rows: Iterable[Mapping[str, Any]], readable: ReadableOf) -> Iterator[Difference]:
    """Rows as they landed that show what is to be encrypted."""
    for row in rows:
        allowed = readable(row)
        if allowed is not None and not (shown := readable_members(row)) <= allowed:
            place = row["source_table"], row["key"], row["commit_lsn"], row["ordinal"]
            yield Difference(layer, f"{place} at rest", sorted(shown), sorted(allowed))


def landed_rows(workspace: Workspace) -> Iterator[dict[str, Any]]:
    """The rows of the files of landing, each with its batch."""
    store = workspace.landing(SOURCE)
    for batch in store.landed().batches:
        for file in batch.files:
            for row in pq.read_table(store.path_of(file), partitioning=None).to_pylist():
                yield {**row, "batch_id": batch.batch_id}


def _landing(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    yield from at_rest("landing", landed_rows(workspace), expected.readable)


def _exposed(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """Values above raw that a policy hides, wherever they stand in a row."""
    for table, found in exposed(workspace, expected.under_policies, _rows):
        yield Difference(table, "values that a policy hides", found, [])
    for table, found in exposed(workspace, expected.of_erased_subjects, _rows):
        yield Difference(table, "values of erased subjects", found, [])


def _raw_row(expected: Expected, number: int) -> tuple[object, ...]:
    delivery = expected.verdicts[number].delivery
    as_landed = _told(delivery, delivery.judged or delivery.event, delivery.unreadable)
    return (*as_landed, *_of_landing(expected.copies[number], number))


def _kept_row(expected: Expected, number: int) -> tuple[object, ...]:
    """As ``_raw_row``, without the values that were erased or that policies hide; raw keeps them."""
    verdict, copy = expected.verdicts[number], expected.copies[number]
    return (*_stored(expected, verdict), *_of_landing(copy, number, whole=_is_whole(expected, verdict)))


def _stored(expected: Expected, verdict: Verdict) -> tuple[object, ...]:
    unreadable = verdict.delivery.unreadable if _is_whole(expected, verdict) else None
    return _told(verdict.delivery, expected.stored(verdict), unreadable)


def _is_whole(expected: Expected, verdict: Verdict) -> bool:
    """Whether texts that cannot be told apart into values are kept of a copy."""
    return not verdict.erased and not expected.hidden.images_of(verdict.delivery.event.table)


def _deduped(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    rows = _rows(workspace.deduped(SOURCE))
    wanted = expected.of(ACCEPTED)
    yield from _unequal(
        "deduped_events",
        Counter(map(_fact, rows)),
        Counter(_stored(expected, each) for each in wanted.values()),
    )
    yield from _other_copies("deduped_events", rows, expected, _first_copies(expected, wanted.values()))
    yield from hashed_otherwise(rows, expected.hidden)


def hashed_otherwise(rows: Rows, hidden: Hidden) -> Iterator[Difference]:
    """Accepted events whose hash is of something else than what policies left of them: of the values, say."""
    changed = [row for row in rows if hidden.images_of(row["source_table"])]
    if not changed:
        return
    own = event_hashes(pa.Table.from_pylist(changed, schema=arrow_schema(RAW_TYPE, without=())))
    for row, due in zip(changed, own.to_pylist(), strict=True):
        if row["event_hash"] != due:
            yield Difference("deduped_events", f"hash of copy {row['lsn']}", row["event_hash"], due)


def _quarantine(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    rows = quarantined(workspace)
    held = Counter(
        (
            *_fact(row),
            row["reason"],
            row["detector"],
            row["review_state"],
            tuple(sorted(row["rules"] or ())),
        )
        for row in rows
    )
    wanted = expected.of(QUARANTINED)
    yield from _unequal(
        "quarantine",
        held,
        Counter(
            (
                *_stored(expected, each),
                each.reason,
                FOUND_BY[str(each.reason)],
                each.state,
                tuple(sorted(each.rules)),
            )
            for each in wanted.values()
        ),
    )
    firsts = _first_copies(expected, (e for e in wanted.values() if e.reason != "duplicate_position"))
    repeated = [row for row in rows if row["reason"] == "duplicate_position"]
    yield from _other_copies("quarantine", [row for row in rows if row not in repeated], expected, firsts)
    yield from _other_copies("quarantine", repeated, expected, set(expected.verdicts))
    yield from _files_of_nobody(workspace)


def _files_of_nobody(workspace: Workspace) -> Iterator[Difference]:
    """Files of the quarantine that no state names, and files that a state names and that are not there."""
    table = workspace.quarantine(SOURCE)
    named = _named_files(workspace)
    held = {file.path for file in table.open().all_files()} if table.exists else set()
    if held != named:
        yield Difference("quarantine", "files that no state names", sorted(held - named), [])
        yield Difference("quarantine", "files that a state names", "missing", sorted(named - held))


def _first_copies(expected: Expected, firsts: Iterable[Verdict]) -> set[int]:
    """The copies that may stand for their events: of those that agree in the frozen facts, the first.

    Where not even time, batch and line tell copies apart, any of them.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for number, each in expected.verdicts.items():
        alike[_of_event(each.delivery)].append(number)
    found = set()
    for each in firsts:
        numbers = alike[_of_event(each.delivery)]
        rank = min(_rank(expected.copies[number]) for number in numbers)
        found |= {number for number in numbers if _rank(expected.copies[number]) == rank}
    return found


def _of_event(delivery: Delivery) -> tuple[object, ...]:
    arrival = delivery.arrival
    return delivery.window, delivery.alike, arrival.watermark_before, arrival.newest_epoch_before


def _rank(copy: Copy) -> tuple[object, ...]:
    return copy.landed_at, copy.batch_id, copy.file_row or 0


def _other_copies(layer: str, rows: Rows, expected: Expected, allowed: set[int]) -> Iterator[Difference]:
    """Rows that are not what landed, column by column, or stand where another copy of their event should."""
    seen: set[int] = set()
    for row in rows:
        number = row["lsn"]
        found = (*_fact(row), *_of_copy(row))
        due = _kept_row(expected, number) if number in expected.verdicts else None
        if found != due:
            yield Difference(layer, f"copy {number}", found, due)
        elif number not in allowed or number in seen:
            yield Difference(layer, f"copy {number} stands for its event", found, "another copy, once")
        seen.add(number)


def _fact(row: Mapping[str, Any]) -> tuple[object, ...]:
    """A row as it must have landed, with the facts that were frozen then and bear on its verdict.

    Of copies that agree in all of that, any may stand for the others.
    """
    return (
        row["window"],
        (row["epoch"], row["commit_lsn"], row["ordinal"]),
        row["op"],
        row["source_schema"],
        row["source_table"],
        row["key"] and tuple(json.loads(row["key"])),
        row["source_ts"],
        row["tx_id"],
        row["identity"],
        _payload(row["before"]),
        row["after"] if _is_no_image(row) else _payload(row["after"]),
        tuple(row["unchanged"] or ()),
        row["moved_from_key"] and tuple(json.loads(row["moved_from_key"])),
        bool(row["misplaced"]),
        row["watermark_before"],
        row["newest_epoch_before"],
    )


def _of_copy(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What a row has of the one copy that it is, and of the batch that brought it."""
    names = ("lsn", "batch_id", "landed_at", "chunk_id", "file_row", "envelope", "file_name")
    return tuple(row[name] for name in names)


def _of_landing(copy: Copy, number: int, *, whole: bool = True) -> tuple[object, ...]:
    from_file = copy.file_row is not None
    delivered = from_file and whole and copy.readable is None
    return (
        number,
        copy.batch_id,
        copy.landed_at,
        None,
        copy.file_row,
        f"line {number}" if delivered else None,
        f"{copy.batch_id}.jsonl" if from_file else None,
    )


def _told(delivery: Delivery, event: Event, unreadable: str | None) -> tuple[object, ...]:
    """A delivery as a layer has it that has ``event`` of it, and ``unreadable`` in place of an image."""
    arrival = delivery.arrival
    return (
        delivery.window,
        tuple(event.at),
        event.op,
        "public",
        event.table,
        event.key,
        event.source_ts,
        tx_id_of(event),
        event.identity,
        _image(event.before, event.moved_from or event.key),
        unreadable or _after(event, None if delivery.was_unreadable else event.key),
        tuple(sorted(event.unchanged)),
        event.moved_from,
        delivery.misplaced,
        arrival.watermark_before,
        arrival.newest_epoch_before,
    )


def _is_no_image(row: Mapping[str, Any]) -> bool:
    """Whether what stands for the new row cannot be read as one, or is the range of a boundary."""
    return row["op"] == "b" or (row["after"] is not None and not row["after"].endswith("}"))


def _after(event: Event, key: Key | None) -> object:
    return _image(event.after, key) if event.scope is None else scope_text(event.scope)


def _payload(text: str | None) -> object:
    return None if text is None else frozenset(json.loads(text).items())


def _image(image: Image | None, key: Key | None) -> object:
    if image is None:
        return None
    return frozenset({**dict(zip(KEY, key or (), strict=False)), **image}.items())


def _ledger(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """The counts that the checkpoints of ``deduped_events`` say, by verdict, by broken rule and by scenario,
    and by what the scenarios of events were found."""
    table = workspace.deduped(SOURCE)
    snapshot = table.open()
    held, broken = {}, expected.broken_rules
    for window in snapshot.windows():
        state = snapshot.state(window)
        if state is not None and state.checkpoint.raw:
            point = state.checkpoint
            counts = (point.raw, point.deduped, point.duplicates, point.quarantined)
            # How often a window was made again depends on its runs, not on what it holds.
            of_events = {name: each for name, each in point.scenarios.items() if name in FOUND_BY}
            found_by = {name: point.detectors.get(name) for name in of_events}
            held[window] = counts, of_events, found_by
            found = Counter(point.rules.broken if point.rules is not None else {})
            if found != broken.get(window, Counter()):
                yield Difference("counts", f"broken rules of {window}", found, broken.get(window))
    wanted = {
        window: (
            (verdicts.total(), verdicts[ACCEPTED], verdicts[DUPLICATE], verdicts[QUARANTINED]),
            dict(scenarios),
            {name: FOUND_BY[name] for name in scenarios},
        )
        for window, (verdicts, scenarios) in ledger(expected.verdicts.values()).items()
    }
    for window in sorted(held.keys() | wanted.keys()):
        if held.get(window) != wanted.get(window):
            yield Difference("counts", window, held.get(window), wanted.get(window))


def _net_changes(workspace: Workspace, expected: Expected, shape: TableShape) -> Iterator[Difference]:
    layer = f"net_changes/{shape.name}"
    keyed: dict[tuple[str, Key], KeyInWindow] = {}
    ended, whole = set(), set()
    wanted = expected.net_changes(shape)
    for row in _folded_rows(workspace, _contract(workspace, shape)):
        window, kind = row["window"], row["_cdc_kind"]
        if kind == "key":
            place = window, _key(row)
            if place in keyed:
                yield Difference(layer, f"a second row of {place}", row, None, _lane(place[1]))
            keyed[place] = _key_row(row, shape, wanted.get(place))
        elif kind == "ended":
            ended.add((window, _key(row), _position(row["_cdc_ended_at"])))
        else:
            place = _position(row["_cdc_position"])
            whole.add((window, kind[0], place, row["_cdc_doubt"] is not None, row["_cdc_scope"] or ""))
    for place in sorted(keyed.keys() | wanted.keys()):
        if keyed.get(place) != wanted.get(place):
            yield Difference(layer, str(place), keyed.get(place), wanted.get(place), _lane(place[1]))
    for what, held, due in (
        ("lives that key changes ended", ended, expected.ended_lives(shape)),
        ("truncates and boundaries", whole, expected.keyless(shape)),
    ):
        if held != due:
            yield Difference(layer, what, sorted(held - due)[:3], sorted(due - held)[:3])


def _key_row(row: Mapping[str, Any], shape: TableShape, wanted: KeyInWindow | None) -> KeyInWindow:
    first, last = _position(row["_cdc_first"]), _position(row["_cdc_position"])
    assert first is not None and last is not None, "a row of a key has events"
    deletes = [_position(each["position"]) for each in row["_cdc_deletes"] or ()]
    hidden = wanted is not None and wanted.values is None
    return KeyInWindow(
        latest=_latest(row, last),
        first=first,
        alive=_position(row["_cdc_alive"]),
        vouched=_position(row["_cdc_vouched"]),
        life_start=_position(row["_cdc_life_start"]),
        deletes=tuple(each for each in deletes if each is not None),
        doubt=_position(row["_cdc_doubt"]),
        values=None if hidden else _values(row, shape),
    )


def _latest(row: Mapping[str, Any], last: Position) -> Latest:
    return Latest(last, row["_cdc_op"], row["_cdc_source_ts"].astimezone(UTC), _utc(row["_cdc_updated_at"]))


def _dimension(workspace: Workspace, expected: Expected, shape: TableShape) -> Iterator[Difference]:
    layer = f"dim_{shape.name}"
    wanted = expected.dimension(shape)
    rows = _rows(workspace.dimension(_contract(workspace, shape)))
    held = {_key(row): _dimension_row(row, shape, wanted.get(_key(row))) for row in rows}
    if len(held) != len(rows):
        yield Difference(layer, "rows", len(rows), len(held))
    for key in sorted(held.keys() | wanted.keys()):
        if held.get(key) != wanted.get(key):
            yield Difference(layer, str(key), held.get(key), wanted.get(key), _lane(key))


def _dimension_row(row: Mapping[str, Any], shape: TableShape, wanted: Current | None) -> Current:
    hidden = wanted is not None and wanted.values is None
    last = Position(row["_cdc_epoch"], row["_cdc_commit_lsn"], row["_cdc_ordinal"])
    return Current(
        latest=_latest(row, last),
        deleted=row["_cdc_is_deleted"],
        deleted_at=_utc(row["_cdc_deleted_at"]),
        doubtful="*" in row["_cdc_unresolved"],
        values=None if hidden else _values(row, shape),
    )


def _history(workspace: Workspace, expected: Expected, shape: TableShape) -> Iterator[Difference]:
    """The open versions against the current state, then every version against those of the oracle."""
    layer = f"history/{shape.name}"
    held = Counter(_version(row, shape) for row in _rows(workspace.history(_contract(workspace, shape))))
    standing = expected.standing(shape)
    last = {each.key: (each.doubtful, each.values) for each in held if each.closed_at is None}
    for key in sorted(last.keys() | standing.keys()):
        if last.get(key) != standing.get(key):
            yield Difference(layer, f"{key} now", last.get(key), standing.get(key), _lane(key))
    wanted = Counter(expected.versions(shape))
    unknown, missing = held - wanted, wanted - held
    for version in sorted([*unknown, *missing], key=lambda each: (each.key, each.opened_at)):
        found, due = (version, None) if version in unknown else (None, version)
        yield Difference(layer, f"version of {version.key}", found, due, _lane(version.key))


def _version(row: Mapping[str, Any], shape: TableShape) -> Version:
    opened_at = _position(row["_cdc_valid_from_position"])
    assert opened_at is not None, "a version begins somewhere"
    return Version(
        key=_key(row),
        opened_at=opened_at,
        closed_at=_position(row["_cdc_valid_to_position"]),
        opened=row["_cdc_valid_from"].astimezone(UTC),
        closed=_utc(row["_cdc_valid_to"]),
        opened_by=row["_cdc_opened_by"],
        closed_by=row["_cdc_closed_by"],
        deleted=row["_cdc_is_deleted"],
        doubtful="*" in row["_cdc_unresolved"],
        values=_values(row, shape),
    )


def _hashes(workspace: Workspace) -> Iterator[Difference]:
    """The content hashes that checkpoints name are those of the rows that are there."""
    files = EventFiles.newest(workspace, SOURCE)
    folds = {workspace.net_changes(each).spec.path: each for each in workspace.contracts.of_source(SOURCE)}
    for table in workspace.tables():
        if not table.exists:
            continue
        column = "event_hash" if "event_hash" in table.spec.schema.names else "_cdc_row_hash"
        snapshot = table.open()
        for window in snapshot.windows():
            state = snapshot.state(window)
            contract = folds.get(table.spec.path)
            if contract is not None and files is not None:
                # The content of a fold is the events folded, in however many parts.
                held = str(content_of(contract, files.accepted(contract, window), files.withheld_in(window)))
            else:
                held = str(hash_of_files((file.uri for file in snapshot.files(window)), column))
            if state is None or state.checkpoint.content_hash != held:
                said = None if state is None else state.checkpoint.content_hash
                yield Difference(table.spec.path, f"content hash of {window}", said, held)


def _unequal(
    layer: str, held: Counter[tuple[object, ...]], wanted: Counter[tuple[object, ...]]
) -> Iterator[Difference]:
    """By event: what of it stands in the layer, and what should."""
    places: dict[object, tuple[list[object], list[object]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((held - wanted, wanted - held)):
        for row in rows.elements():
            places[row[1]][side].append(row)
    for position, (found, due) in sorted(places.items(), key=repr):
        key = next((row[5] for row in (*found, *due)), None)  # type: ignore[index]
        yield Difference(layer, str(position), found, due, _lane(key))


def _contract(workspace: Workspace, shape: TableShape) -> Any:
    contract = workspace.contracts.find(SOURCE, "public", shape.name)
    assert contract is not None, f"{shape.name} has a contract"
    return contract


def _values(row: Mapping[str, Any], shape: TableShape) -> Values:
    """The known values; a value or exact text where there should be none shows as one too many."""
    unresolved = set(row["_cdc_unresolved"] or ())
    exact = dict(row["_cdc_exact"] or ())
    known = [name for name in shape.columns if name not in unresolved]
    values = [(name, from_lake(row[name], exact.pop(name, None))) for name in known]
    others = row.keys() - {*shape.columns, *KEY, WINDOW}
    values += [(f"a column {n}", row[n]) for n in others if not n.startswith("_cdc_") and row[n] is not None]
    values += [(f"exact text of {name}", text) for name, text in exact.items()]
    return tuple(sorted(values))


def _key(row: Mapping[str, Any]) -> Key:
    return tuple(json.loads(row["_cdc_key"]))


def _position(value: Mapping[str, int] | None) -> Position | None:
    return None if value is None else Position(value["epoch"], value["commit_lsn"], value["ordinal"])


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)


def _lane(key: Key | None) -> int | None:
    return int(key[0]) if key is not None and len(key) > 1 else None
