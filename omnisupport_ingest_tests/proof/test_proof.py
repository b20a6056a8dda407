"""Small homes, of a stream and of files, as ``make prove`` runs many with a hundred histories each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest_tests.oracle.model import Event, Position
from omnisupport_ingest_tests.proof import compare
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.cut import Cut
from omnisupport_ingest_tests.proof.delivery import Batch, Gap
from omnisupport_ingest_tests.proof.erasing import in_the_home
from omnisupport_ingest_tests.proof.history import Told, lane
from omnisupport_ingest_tests.proof.landed import Landed
from omnisupport_ingest_tests.proof.policies import PROTECTIONS
from omnisupport_ingest_tests.proof.privacy import Sought, exposed_files, hidden_by
from omnisupport_ingest_tests.proof.run import Proved, prove
from omnisupport_ingest_tests.proof.story import ERASE_SUBJECTS, LOOSEN, Story, draw, rejecting_nothing
from omnisupport_ingest_tests.proof.subjects import Left
from omnisupport_ingest_tests.proof.tables import NO_VALUE, TICKETS, TWO_DIMENSIONS, shapes_of
from omnisupport_ingest_tests.proof.tables import VERSIONS as CONTRACTS
from omnisupport_ingest_tests.proof.versions import versions

FILES, STREAM = range(4108, 4120), range(1149, 1159)
STEPS = (
    "stop between layers",
    "overlapping replays",
    "two writers",
    "other contracts",
    "another decision table",
    "run some windows",
    "other policies",
    "learn a column",
    LOOSEN,
)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def a_stream(seeds: range, slots: int, steps: int) -> Story:
    """The story of a stream in whose home nothing is replayed but what is late, so its windows are folded."""
    return draw(seeds, slots, steps, late_steps=0, kinds=("run some windows",))


@pytest.fixture(scope="module")
def followed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """The home of a stream, proved; its layers are there to be read."""
    story = a_stream(STREAM, 3, 1)
    story = replace(story, gaps=(), protecting=0, versions=rejecting_nothing(story.versions))
    return prove(story, tmp_path_factory.mktemp("proved") / "stream", spark, say=lambda _: None)


@pytest.mark.slow
def test_a_stream_and_files_agree_and_nothing_that_the_proof_is_about_never_happened(
    followed: Proved, spark: SparkSession, tmp_path: Path
) -> None:
    story = replace(draw(FILES, slots=3, steps=2, kinds=STEPS), protecting=2)
    seen = prove(story, tmp_path / "files", spark, say=lambda _: None).tally
    assert followed.tally.comparisons >= 4
    seen.add(followed.tally)
    # The stream once more, with a gap in its chain for a while: windows wait that are folded without it.
    # Its contracts say encrypted, so subjects are erased there.
    story = replace(a_stream(STREAM, 3, 1), gaps=(Gap(lost=3, back=6),), cut=Cut(400, 5, few=0), protecting=3)
    story = replace(story, kinds=("run some windows", ERASE_SUBJECTS))
    seen.add(prove(story, tmp_path / "gap", spark, say=lambda _: None).tally)
    assert seen.never == []


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("start", range(6000, 6100, 10))
def test_schemas_and_policies_may_change_at_any_moment(
    start: int, spark: SparkSession, tmp_path: Path
) -> None:
    """Each home begins with other policies, and goes on with others: old and new events are alike then."""
    kinds = ("run some windows", "replay some windows", "other policies", "learn a column", ERASE_SUBJECTS)
    story = draw(range(start, start + 4), slots=2, steps=2, late_steps=1, kinds=kinds)
    story = replace(story, protecting=start // 10 % len(PROTECTIONS))
    seen = prove(story, tmp_path / "home", spark, say=lambda _: None).tally
    assert seen.things["policy changes"] + seen.things["columns that contracts learned"] > 0


Row = dict[str, Any]
Read = Callable[[Iterable[LakeFile]], list[Row]]


@pytest.fixture(scope="module")
def read() -> Read:
    """Reads the rows of files as comparing does, each once."""
    kept: dict[str, list[Row]] = {}
    as_always = compare._read

    def once(files: Iterable[LakeFile]) -> list[Row]:
        rows: list[Row] = []
        for file in files:
            rows += kept.setdefault(file.uri, as_always([file]))
        return rows

    return once


@dataclass(frozen=True)
class Spoiling:
    """What is done to one row of ``layer`` (a table's folder): the first one that ``of`` takes. ``by``
    changes the row and returns what stands in its place."""

    layer: str
    of: Callable[[Row], object]
    by: Callable[[Row], list[Row]]

    def done(self, rows: list[Row]) -> list[Row]:
        number = next(number for number, row in enumerate(rows) if self.of(row))
        return [*rows[:number], *self.by(deepcopy(rows[number])), *rows[number + 1 :]]


def anything(_: Row) -> bool:
    return True


def with_(**columns: object) -> Callable[[Row], list[Row]]:
    return lambda row: [{**row, **columns}]


def later(column: str) -> Callable[[Row], list[Row]]:
    return lambda row: [{**row, column: row[column] + timedelta(microseconds=1)}]


def higher(column: str) -> Callable[[Row], list[Row]]:
    """The same at a higher ordinal; of the deletes, the last one."""

    def change(row: Row) -> list[Row]:
        held = row[column]
        place = held[-1]["position"] if isinstance(held, list) else held
        place["ordinal"] += 1
        return [row]

    return change


def other_text(row: Row) -> list[Row]:
    row["_cdc_exact"] = {name: f"{text}0" for name, text in dict(row["_cdc_exact"]).items()}
    return [row]


def one_more_unresolved(row: Row) -> list[Row]:
    """A value that is there is said not to be known."""
    row["_cdc_unresolved"] = [*(row["_cdc_unresolved"] or ()), "body"]
    return [row]


def gone(_: Row) -> list[Row]:
    return []


def twice(row: Row) -> list[Row]:
    return [row, row]


def moved(row: Row) -> bool:
    return row["moved_from_key"] is not None


def plainly_alive(row: Row) -> bool:
    """Whether people may rely on the row's values, and it has a text in ``body``."""
    known = row.get("_cdc_doubt") is None and not row.get("_cdc_is_deleted")
    of_key = row.get("_cdc_kind", "key") == "key" and row.get("_cdc_alive", True)
    return bool(known and of_key and row.get("_cdc_op") != "d" and not row["_cdc_unresolved"] and row["body"])


def exact(row: Row) -> bool:
    """Whether a value of the row is an exact text, and people may rely on it; others may be unresolved."""
    known = row.get("_cdc_doubt") is None and not row.get("_cdc_is_deleted")
    there = "*" not in (row["_cdc_unresolved"] or ()) and row.get("_cdc_op") != "d"
    return bool(known and there and row.get("_cdc_kind", "key") == "key" and row["_cdc_exact"])


EVENTS = {
    "the operation": (anything, with_(op="x")),
    "the position": (anything, lambda row: [{**row, "ordinal": row["ordinal"] + 1}]),
    "the commit time": (anything, later("source_ts")),
    "the transaction": (anything, lambda row: [{**row, "tx_id": row["tx_id"] + 1}]),
    "the batch": (anything, with_(batch_id="another")),
    "the landing time": (anything, later("landed_at")),
    "the key": (lambda row: row["key"] is not None, with_(key='["1","99"]')),
    "the key that it had": (moved, with_(moved_from_key='["1","99"]')),
    "a value of the image": (lambda row: row["op"] == "c" and row["after"], with_(after='{"id":"1"}')),
    "what was not sent": (lambda row: row["unchanged"], with_(unchanged=["status"])),
    "a row too few": (anything, gone),
    "a row too many": (anything, twice),
}
QUARANTINED = {
    "the reason": (anything, with_(reason="another")),
    "what found it": (anything, with_(detector="another")),
    "the state of its review": (anything, with_(review_state="another")),
    "the rules it breaks": (lambda row: row["rules"], with_(rules=["note:type"])),
}
STATE = {
    "the operation": (plainly_alive, with_(_cdc_op="x")),
    "the commit time": (plainly_alive, later("_cdc_source_ts")),
    "when it was updated": (plainly_alive, later("_cdc_updated_at")),
    "a value": (plainly_alive, with_(body="another")),
    "an exact text": (exact, other_text),
    "an exact text lost": (exact, with_(_cdc_exact={})),
    "an unresolved column too many": (plainly_alive, one_more_unresolved),
    "a row too few": (plainly_alive, gone),
}
FOLDED = {
    "the position": (plainly_alive, higher("_cdc_position")),
    "the first position": (plainly_alive, higher("_cdc_first")),
    "where its life began": (lambda row: row["_cdc_life_start"], higher("_cdc_life_start")),
    "where it was deleted": (lambda row: row["_cdc_deletes"], higher("_cdc_deletes")),
    "a doubt": (plainly_alive, lambda row: [{**row, "_cdc_doubt": row["_cdc_first"]}]),
    "a life that a key change ended": (lambda row: row["_cdc_kind"] == "ended", gone),
    "a truncate": (lambda row: row["_cdc_kind"] == "truncate", gone),
}
CURRENT = {
    "the position": (anything, lambda row: [{**row, "_cdc_commit_lsn": row["_cdc_commit_lsn"] + 1}]),
    "whether it is deleted": (plainly_alive, with_(_cdc_is_deleted=True)),
    "when it was deleted": (lambda row: row["_cdc_deleted_at"], later("_cdc_deleted_at")),
    "when it was marked as deleted": (
        lambda row: row["_cdc_is_deleted"] and row["_cdc_op"] in "cru" and row["_cdc_deleted_at"],
        later("_cdc_deleted_at"),
    ),
    "a column of no contract": (plainly_alive, with_(surplus="1")),
    "a row too many": (plainly_alive, twice),
}
VERSIONS = {
    "where it begins": (anything, higher("_cdc_valid_from_position")),
    "where it ends": (lambda row: row["_cdc_valid_to_position"], higher("_cdc_valid_to_position")),
    "when it begins": (anything, later("_cdc_valid_from")),
    "when it ends": (lambda row: row["_cdc_valid_to"], later("_cdc_valid_to")),
    "what opened it": (anything, with_(_cdc_opened_by="x")),
    "what closed it": (lambda row: row["_cdc_closed_by"], with_(_cdc_closed_by="x")),
    "a value": (plainly_alive, with_(body="another")),
    "an exact text": (exact, other_text),
    "an unresolved column too many": (plainly_alive, one_more_unresolved),
    "a version too few": (anything, gone),
}
LAYERS = {
    "raw_cdc_staging": EVENTS,
    "deduped_events": EVENTS,
    "quarantine": EVENTS | QUARANTINED,
    "net_changes/tickets": STATE | FOLDED,
    "dim_tickets": STATE | CURRENT,
    "history": VERSIONS,
}


def _tickets(look: Callable[..., Iterator[Difference]]) -> Callable[..., Iterator[Difference]]:
    return lambda workspace, expected: look(workspace, expected, expected.shapes[0])


_LOOKS: Mapping[str, Callable[..., Iterator[Difference]]] = {
    "raw_cdc_staging": compare._raw,
    "deduped_events": compare._deduped,
    "quarantine": compare._quarantine,
    "net_changes/tickets": _tickets(compare._net_changes),
    "dim_tickets": _tickets(compare._dimension),
    "history": _tickets(compare._history),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_right_is_said_to_be_right(layer: str, followed: Proved) -> None:
    assert list(_LOOKS[layer](followed.workspace, followed.expected)) == []


def test_a_quarantine_file_that_no_state_names_is_found(
    followed: Proved, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = compare._named_files(followed.workspace)
    forgotten = min(named)
    monkeypatch.setattr(compare, "_named_files", lambda _: named - {forgotten})
    told = [
        each for each in compare._quarantine(followed.workspace, followed.expected) if "file" in each.subject
    ]
    assert any(each.found == [forgotten] for each in told)
    monkeypatch.setattr(compare, "_named_files", lambda _: named | {"not/there.parquet"})
    told = list(compare._files_of_nobody(followed.workspace))
    assert any(each.expected == ["not/there.parquet"] for each in told)


@pytest.mark.parametrize(
    "spoiling",
    [
        pytest.param(Spoiling(layer, *how), id=f"{layer}: {what}")
        for layer, cases in LAYERS.items()
        for what, how in cases.items()
    ],
)
def test_whatever_is_wrong_with_a_row_is_found(
    spoiling: Spoiling, followed: Proved, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are right; then one thing of one row is not what it was."""
    looked: list[str] = []

    def spoilt(files: Iterable[LakeFile]) -> list[Row]:
        here = list(files)
        rows = read(here)
        if not here or f"/{spoiling.layer}" not in here[0].uri:
            return rows
        looked.append(spoiling.layer)
        return spoiling.done(rows)

    monkeypatch.setattr(compare, "_read", spoilt)
    found = next(_LOOKS[spoiling.layer](followed.workspace, followed.expected), None)
    assert looked and found is not None


def test_a_value_that_a_policy_hides_is_found_wherever_it_stands(followed: Proved) -> None:
    """The home shows all values; then its contracts are said to hide some of them."""
    terms = {table: each.under(PROTECTIONS[1], table, {}) for table, each in CONTRACTS[0].items()}
    expected = copy(followed.expected)
    vars(expected).pop("under_policies", None)
    expected.hidden = hidden_by(terms, shapes_of(terms))
    found = {each.layer for each in compare._exposed(followed.workspace, expected)}
    assert found >= {
        "desk/deduped_events, tickets",
        "desk/quarantine, tickets",
        "desk/net_changes/tickets",
        "desk/dim_tickets",
        "desk/history/dim_tickets_history",
        "desk/dim_agents",
    }
    assert list(exposed_files(followed.workspace, expected.under_policies))


def test_a_value_of_an_erased_subject_is_found_in_any_file_of_the_home(followed: Proved) -> None:
    """The home shows all values; then those of one table are said to be of somebody who was erased."""
    values = followed.expected.hidden.values(
        (each.delivery.event, each.delivery.unreadable) for each in followed.expected.verdicts.values()
    )
    lost = {"tickets": Sought(hidden=values["tickets"].shown, shown=values["agents"].shown)}
    found = {each.layer.split("/")[0] for each in in_the_home(followed.workspace, lost)}
    assert found >= {"landing", "lake"}
    assert not list(in_the_home(followed.workspace, {"tickets": Sought({"no such value"}, set())}))


def test_what_is_left_of_an_erased_subject_is_what_landed_readable() -> None:
    terms = {table: each.under(PROTECTIONS[2], table, {}) for table, each in CONTRACTS[0].items()}
    told = [
        Told(
            Event(
                Position(1, lsn, 0), "c", "tickets", (whose, "7"), NOON, after={"status": "new", "left": mark}
            )
        )
        for lsn, (whose, mark) in enumerate([("1", None), ("2", None), ("1", "infinity")], start=1)
    ]
    landed = Landed()
    landed.take(Batch("stream", 1, NOON, tuple(told)), "a batch", terms)
    assert landed.keys_made([("tickets", "1"), ("tickets", "2"), ("tickets", "3")]) == 2
    left = Left(landed, {("tickets", "1")}, terms)
    erased, other, marked = left.deliveries
    assert (other.event, other.landed) == (told[1].event, None)
    assert erased.judged is not None and erased.judged.after == {"left": None}
    # Every column of the contract reads as NULL, also one that was not there: nobody can say.
    assert erased.event.after == dict.fromkeys(("status", "note", "body", "cost", "left"))
    assert marked.event.after == {**(erased.event.after or {}), "left": "infinity"}
    assert erased.key == Left(landed, (), terms).deliveries[0].key
    assert left.lost_values["tickets"].hidden >= {"new"}
    assert not Left(landed, (), terms).lost_values


def test_copies_of_an_erased_subject_are_compared_by_what_is_readable() -> None:
    terms = {table: each.under(PROTECTIONS[2], table, {}) for table, each in CONTRACTS[0].items()}
    event = Event(Position(1, 1, 0), "c", "tickets", ("1", "7"), NOON, after={"status": "new", "left": None})
    others = [{"status": "old", "left": None}, {"status": "new", "left": "infinity"}]
    told = [Told(each) for each in (event, *(replace(event, after=image) for image in others))]
    landed = Landed()
    landed.take(Batch("stream", 1, NOON, tuple(told)), "a batch", terms)
    assert len({each.alike for each in Left(landed, (), terms).deliveries}) == 3
    # The third shows another value in a column that lands readable.
    assert len({each.alike for each in Left(landed, {("tickets", "1")}, terms).deliveries}) == 2


def test_an_event_whose_hash_is_of_its_values_is_found() -> None:
    def hashed(note: str) -> list[Row]:
        row = {"epoch": 1, "commit_lsn": 7, "ordinal": 0, "op": "c", "source_schema": "public", "lsn": 3}
        image = {"source_ts": NOON, "after": f'{{"note":"{note}"}}'}
        rows = [row | image | {"source_table": name} for name in ("tickets", "agents", "drafts")]
        own = event_hashes(pa.Table.from_pylist(rows, schema=arrow_schema(RAW_TYPE, without=())))
        return [row | {"event_hash": each} for row, each in zip(rows, own.to_pylist(), strict=True)]

    terms = {table: each.under(PROTECTIONS[2], table, {}) for table, each in CONTRACTS[0].items()}
    hidden, left = hidden_by(terms, shapes_of(terms)), hashed("***")
    assert not list(compare.hashed_otherwise(left, hidden))
    spoilt = [
        row | {"event_hash": other["event_hash"]} for row, other in zip(left, hashed("value"), strict=True)
    ]
    found = compare.hashed_otherwise(spoilt, hidden)
    # Events of agents are as they landed, so whatever their hash is of, it is no secret.
    assert [each.expected for each in found] == [left[0]["event_hash"], left[2]["event_hash"]]


def test_what_lands_readable_though_a_contract_encrypts_it_is_found(followed: Proved) -> None:
    rows = [*compare.landed_rows(followed.workspace)]
    assert list(compare.at_rest("landing", rows, lambda _: None)) == []
    found = list(compare.at_rest("landing", rows, lambda _: frozenset(("lane", "id", "status"))))
    assert len(found) > 10


def test_versions_hold_from_one_event_to_the_next_and_none_while_the_row_is_gone() -> None:
    def event(lsn: int, op: str, after: dict[str, str | None] | None = None) -> Event:
        at = NOON + timedelta(minutes=lsn)
        return Event(Position(1, lsn, 0), op, "tickets", ("1", "1"), at, after=after)

    told = [event(1, "c", {"status": "new"}), event(3, "u", {"note": "n"}), event(5, "d"), event(8, "u", {})]
    found = list(versions(told, TICKETS))
    assert [(each.opened_at.commit_lsn, each.closed_at and each.closed_at.commit_lsn) for each in found] == [
        (1, 3),
        (3, 5),
        (8, None),
    ]
    assert [each.values for each in found] == [
        (("status", "new"),),
        (("note", "n"), ("status", "new")),
        (),
    ]
    assert [(each.opened_by, each.closed_by) for each in found] == [("c", "u"), ("u", "d"), ("u", None)]


def test_a_lane_is_the_same_whenever_it_is_drawn() -> None:
    assert lane(7, epochs=2, sure_order=False) == lane(7, epochs=2, sure_order=False)


def test_the_histories_hold_what_they_are_meant_to() -> None:
    told = [each for seed in range(200) for each in lane(seed, epochs=3, sure_order=False)]
    events = [each.event for each in told]
    assert {event.op for event in events} == set("crudtbm")
    assert {event.at.epoch for event in events} == {1, 2, 3}
    assert any(each.unreadable for each in told)
    assert any(each.misplaced for each in told)
    assert any(event.identity for event in events)
    assert any(event.moved_from and event.unchanged for event in events)
    assert any(event.after and None in event.after.values() for event in events)
    assert any(event.key is None and event.op in "crud" for event in events)
    assert any(event.key and None in event.key for event in events)
    values = {text for event in events for text in (event.after or {}).values() if text is not None}
    assert {"NaN", "infinity", TWO_DIMENSIONS, NO_VALUE} <= values
    assert max(map(len, values)) > 4096
    assert {character for text in values for character in text} >= set("'\"\\\n\r\té漢🙂\u2028\x01")
    contents = {(event.at, event.identity, event.content) for event in events}
    assert len({(at, identity) for at, identity, _ in contents}) < len(contents)


def test_many_rows_live_again_without_what_their_life_before_knew() -> None:
    """What a fold that forgets where a life begins would leak; a home without it proves nothing of that."""
    leaks = 0
    for seed in range(60):
        told = [each.event for each in lane(seed, epochs=1, sure_order=True)]
        rows = {(event.table, event.key) for event in told if event.key is not None}
        for table, key in rows:
            own = sorted((e for e in told if (e.table, e.key) == (table, key)), key=lambda e: e.at)
            last = next((n for n in range(len(own) - 1, -1, -1) if own[n].op in "crd"), 0)
            leaks += bool(own[last].op == "d" and own[last + 1 :] and own[-1].unchanged)
    assert leaks > 60
