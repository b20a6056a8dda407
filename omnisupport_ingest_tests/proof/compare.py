"""Every layer of a home against what it must hold, read from the tables' files without Spark."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow.parquet as pq

from omnisupport_ingest.lake.contenthash import content_hash
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest_tests.cdc.lanes import scope_text
from omnisupport_ingest_tests.oracle.judging import ACCEPTED, DUPLICATE, QUARANTINED, Verdict, ledger
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape
from omnisupport_ingest_tests.proof.expected import Expected, KeyInWindow, Published
from omnisupport_ingest_tests.proof.tables import KEY, SHAPES, SOURCE
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
    yield from _raw(workspace, expected)
    yield from _deduped(workspace, expected)
    yield from _quarantine(workspace, expected)
    yield from _ledger(workspace, expected)
    for shape in SHAPES:
        yield from _dimension(workspace, expected, shape)
        yield from _published(workspace, expected, shape)
        yield from _history(workspace, expected, shape)
    yield from _hashes(workspace)


def quarantined(workspace: Workspace) -> Rows:
    """The quarantine: the files that the states of ``deduped_events`` name."""
    deduped = workspace.deduped(SOURCE).open()
    states = (deduped.state(window) for window in deduped.windows())
    named = {path for state in states if state is not None for path in state.companions}
    files = workspace.quarantine(SOURCE).open().all_files()
    return _read(file for file in files if file.path in named)


def _rows(table: LakeTable) -> Rows:
    return _read(table.open().all_files()) if table.exists else []


def _read(files: Iterable[LakeFile]) -> Rows:
    found: Rows = []
    for file in files:
        of_partition = dict(file.partition)
        rows = pq.read_table(file.uri, partitioning=None).to_pylist(maps_as_pydicts="strict")
        found += [{**row, **of_partition} for row in rows]
    return found


def _raw(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    held = {row["lsn"]: (*_fact(row), row["landed_at"]) for row in _rows(workspace.raw(SOURCE))}
    wanted = {
        number: (*_told(each), each.delivery.arrival.landed_at) for number, each in expected.verdicts.items()
    }
    for number in sorted(held.keys() | wanted.keys()):
        if held.get(number) != wanted.get(number):
            verdict = expected.verdicts.get(number)
            key = verdict.delivery.event.key if verdict is not None else None
            found, due = held.get(number), wanted.get(number)
            yield Difference("raw_cdc_staging", f"copy {number}", found, due, _lane(key))


def _deduped(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    held = Counter(_fact(row) for row in _rows(workspace.deduped(SOURCE)))
    wanted = Counter(_told(each) for each in expected.of(ACCEPTED).values())
    yield from _unequal("deduped_events", held, wanted)


def _quarantine(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    held = Counter(
        (
            *_fact(row),
            row["reason"],
            row["detector"],
            row["review_state"],
            tuple(sorted(row["rules"] or ())),
        )
        for row in quarantined(workspace)
    )
    found_by = {name: each.detected_by for name, each in workspace.decisions.decisions.items()}
    wanted = Counter(
        (*_told(each), each.reason, found_by[str(each.reason)], each.state, tuple(sorted(each.rules)))
        for each in expected.of(QUARANTINED).values()
    )
    yield from _unequal("quarantine", held, wanted)


def _fact(row: Mapping[str, Any]) -> tuple[object, ...]:
    """A row as it must have landed, with the facts that were frozen then and bear on its verdict.

    Of copies that agree in all of that, any may stand for the others.
    """
    return (
        row["window"],
        (row["epoch"], row["commit_lsn"], row["ordinal"]),
        row["op"],
        row["source_table"],
        row["source_ts"],
        row["key"] and tuple(json.loads(row["key"])),
        row["identity"],
        _payload(row["before"]),
        row["after"] if _is_no_image(row) else _payload(row["after"]),
        tuple(row["unchanged"] or ()),
        row["watermark_before"],
        row["newest_epoch_before"],
    )


def _told(verdict: Verdict) -> tuple[object, ...]:
    delivery = verdict.delivery
    event, arrival = delivery.event, delivery.arrival
    return (
        delivery.window,
        tuple(event.at),
        event.op,
        event.table,
        event.source_ts,
        event.key,
        event.identity,
        _image(event.before, event.moved_from or event.key),
        delivery.unreadable or _after(event),
        tuple(sorted(event.unchanged)),
        arrival.watermark_before,
        arrival.newest_epoch_before,
    )


def _is_no_image(row: Mapping[str, Any]) -> bool:
    """Whether what stands for the new row cannot be read as one, or is the range of a boundary."""
    return row["op"] == "b" or (row["after"] is not None and not row["after"].endswith("}"))


def _after(event: Event) -> object:
    return _image(event.after, event.key) if event.scope is None else scope_text(event.scope)


def _payload(text: str | None) -> object:
    return None if text is None else frozenset(json.loads(text).items())


def _image(image: Image | None, key: Key | None) -> object:
    if image is None:
        return None
    return frozenset({**dict(zip(KEY, key or (), strict=False)), **image}.items())


def _ledger(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """The counts that the checkpoints of ``deduped_events`` say, by verdict and by scenario."""
    table = workspace.deduped(SOURCE)
    snapshot = table.open()
    held = {}
    for window in snapshot.windows():
        state = snapshot.state(window)
        if state is not None and state.checkpoint.raw:
            point = state.checkpoint
            counts = (point.raw, point.deduped, point.duplicates, point.quarantined)
            held[window] = counts, dict(sorted(point.scenarios.items()))
    wanted = {
        window: (
            (verdicts.total(), verdicts[ACCEPTED], verdicts[DUPLICATE], verdicts[QUARANTINED]),
            dict(sorted(scenarios.items())),
        )
        for window, (verdicts, scenarios) in ledger(expected.verdicts.values()).items()
    }
    for window in sorted(held.keys() | wanted.keys()):
        if held.get(window) != wanted.get(window):
            yield Difference("counts", window, held.get(window), wanted.get(window))


def _dimension(workspace: Workspace, expected: Expected, shape: TableShape) -> Iterator[Difference]:
    layer = f"dim_{shape.name}"
    keyed: dict[tuple[str, Key], KeyInWindow] = {}
    ended, whole = set(), set()
    wanted = expected.dimension(shape)
    for row in _rows(workspace.dimension(_contract(workspace, shape))):
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
    alive = _position(row["_cdc_alive"])
    deletes = [_position(each["position"]) for each in row["_cdc_deletes"] or ()]
    above = [each for each in deletes if each is not None and (alive is None or each > alive)]
    first, last = _position(row["_cdc_first"]), _position(row["_cdc_position"])
    assert first is not None and last is not None, "a row of a key has events"
    hidden = wanted is not None and wanted.values is None
    return KeyInWindow(
        first=first,
        last=last,
        alive=alive,
        tombstone=min(above, default=None),
        doubt=_position(row["_cdc_doubt"]),
        values=None if hidden else _values(row, shape),
    )


def _published(workspace: Workspace, expected: Expected, shape: TableShape) -> Iterator[Difference]:
    layer = f"published/{shape.name}"
    wanted, moved = expected.published(shape), expected.moved(shape)
    rows = _rows(workspace.published(_contract(workspace, shape)))
    held = {_key(row): _published_row(row, shape, wanted.get(_key(row))) for row in rows}
    if len(held) != len(rows):
        yield Difference(layer, "rows", len(rows), len(held))
    for key in sorted(held.keys() | wanted.keys()):
        found, due = held.get(key), wanted.get(key)
        if found == due:
            continue
        # A window that folded events of the old key from both sides of a key change that stands in
        # another no longer holds the earlier ones. It must then say that it does not know.
        if key in moved and found and due and found.is_part_of(due, shape.soft_delete_column):
            continue
        yield Difference(layer, str(key), found, due, _lane(key))


def _published_row(row: Mapping[str, Any], shape: TableShape, wanted: Published | None) -> Published:
    softly = shape.soft_delete_column is not None and row[shape.soft_delete_column] is not None
    ended = row["_cdc_is_deleted"] and (not softly or (wanted is not None and wanted.ended_at is not None))
    hidden = wanted is not None and wanted.values is None
    return Published(
        deleted=row["_cdc_is_deleted"],
        ended_at=_utc(row["_cdc_deleted_at"]) if ended else None,
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
    for table in workspace.tables():
        if not table.exists:
            continue
        column = "event_hash" if "event_hash" in table.spec.schema.names else "_cdc_row_hash"
        snapshot = table.open()
        for window in snapshot.windows():
            state = snapshot.state(window)
            held = content_hash((file.uri for file in snapshot.files(window)), column)
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


def _values(row: Mapping[str, Any], shape: TableShape) -> tuple[tuple[str, str | None], ...]:
    unresolved = set(row["_cdc_unresolved"] or ())
    return tuple(sorted((name, row[name]) for name in shape.columns if name not in unresolved))


def _key(row: Mapping[str, Any]) -> Key:
    return tuple(json.loads(row["_cdc_key"]))


def _position(value: Mapping[str, int] | None) -> Position | None:
    return None if value is None else Position(value["epoch"], value["commit_lsn"], value["ordinal"])


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)


def _lane(key: Key | None) -> int | None:
    return int(key[0]) if key is not None and len(key) > 1 else None
