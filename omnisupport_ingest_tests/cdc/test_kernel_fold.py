"""The kernels of fold, merge and current state equal the oracle on thousands of random histories.

No Spark: a case takes some milliseconds. Columns have several types, with values that a type cannot hold and
texts of every kind. A history is divided into windows, parts, workers and batches of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import columnar, current_rows, event_fold, row_fold
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.late_images import IMAGES, ROW, fold_late
from omnisupport_ingest.cdc.ordinary_fold import integer_keys
from omnisupport_ingest.layers.dimension.fold_tasks import Share, of_share, parts_agree, stretches_of
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut, State, Table
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.histories import KEYS, SHAPE, simulate, soup
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position
from omnisupport_ingest_tests.oracle.oracle import current_state

TABLE = Table(
    SHAPE,
    key=("id", "region"),
    types={
        "note": "numeric",
        "region": "text",
        "status": "text",
        "id": "bigint",
        "body": "timestamptz",
    },
)
"""The key's columns are in another order than in the table, and not the first."""

EXAMPLES = 80
"""Examples of each property."""

_START = datetime(2026, 11, 1, tzinfo=UTC)
_REGIONS = {"0": "", "1": 'a"b\\c', "2": "ü\n\u2028🐘", "3": "[null]", "4": "null"}

randoms = st.integers(0, (1 << 32) - 1).map(Random)
"""By seed: Hypothesis would take longer to draw a history than the kernels take to fold it."""

cuts = st.builds(
    Cut, st.integers(1, 3), st.integers(1, 9), st.integers(0, 1 << 16), st.sampled_from((0, 1000, 1000))
)


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """Kernels return their rows in batches of three, so that most cases have several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(columnar, "_BATCH_ROWS", 3)
        yield


def typed(events: list[Event]) -> list[Event]:
    """``events`` of the oracle's table of texts as events of ``TABLE``."""
    return [
        replace(
            event,
            key=_key(event.key),
            moved_from=_key(event.moved_from),
            before=_image(event.before),
            after=_image(event.after),
        )
        for event in events
    ]


def _key(key: Key | None) -> Key | None:
    return None if key is None else (*key, _REGIONS.get(key[0], "elsewhere"))


def _image(image: Image | None) -> Image | None:
    if image is None:
        return None
    return {
        name: None if text is None else _value(name, int(text.rpartition(" ")[2]))
        for name, text in image.items()
    }


def _value(column: str, number: int) -> str:
    if column == "note":
        return "NaN" if number % 5 == 0 else f"{number}.25"
    if column == "body":
        return "-infinity" if number % 4 == 0 else (_START + timedelta(minutes=number)).isoformat()
    odd = ("plain", 'q"uo\\te', "line\nbreak\u2028", "🐘ü", "x" * 3000, "null", "")
    return f"{odd[number % len(odd)]}{number}"


def neighbours(rng: Random, events: list[Event]) -> list[Event]:
    """Add events at some of the positions, as in a log without an order inside one LSN.

    They differ in key or operation; a delete comes before the creation of the same key.
    """
    found: list[Event] = []
    for event in events:
        if event.op not in "cu" or event.key is None or event.moved_from or rng.random() > 0.4:
            found.append(event)
            continue
        sent = replace(event, identity=f"{event.key} {event.op}")
        other = next(key for key in KEYS if key != event.key)
        found += [sent, replace(sent, key=other, identity=f"{other} {event.op}")]
        if event.op == "c":
            ended = replace(sent, op="d", after=None, unchanged=frozenset(), identity=f"{event.key} d")
            found.append(replace(ended, quarantined=event.quarantined != (rng.random() < 0.3)))
    return found


def drawn(rng: Random, *, withheld: bool = True, moving: bool = False) -> list[Event]:
    """Draw random events: gaps, withheld ones, repeats, key changes, truncates, snapshot ends of key
    ranges."""
    events = soup(rng, withheld=withheld, moving=moving)
    if len({event.at for event in events}) == len(events) and rng.random() < 0.5:
        events = neighbours(rng, events)
    # A commit time of its own for each position, so that times tell what happened when.
    ranks = {at: rank for rank, at in enumerate(sorted({event.at for event in events}))}
    return typed([replace(e, source_ts=_START + timedelta(seconds=ranks[e.at])) for e in events])


def in_windows(rng: Random, events: list[Event], count: int) -> dict[tuple[int, int], str]:
    """Draw a window for each transaction: windows follow commit time, which may run against the log."""
    return {at: f"w{rng.randrange(count)}" for at in sorted({event.at[:2] for event in events})}


def oracle_states(events: list[Event]) -> dict[Key, State]:
    found = kernels.expected(current_state(events, SHAPE), events)
    doubtful = {key for key in found if found[key].ended_at is None and _both_halves_withheld(key, events)}
    sent = {
        key: replace(state, doubtful=True, last=None, values=()) if key in doubtful else state
        for key, state in found.items()
    }
    return kernels.without_shown(sent, events)


def _both_halves_withheld(key: Key, events: list[Event]) -> bool:
    """Whether a delete and a creation at one position are withheld, and no later event vouches for the row.

    The fold cannot see that they are not two contents of one event, of which one is a delete.
    """
    of_key = [event for event in events if event.key == key]
    at = max((event.at for event in of_key if event.op == "d" and event.quarantined), default=None)
    if at is None or not any(event.at == at and event.op == "c" and event.quarantined for event in of_key):
        return False
    vouched = any(event.op in "cur" and event.at >= at and not event.quarantined for event in of_key)
    return not vouched and not any(event.op in "cr" and event.at > at for event in of_key)


def kernel_states(rows: kernels.Rows, events: list[Event]) -> dict[Key, State]:
    return kernels.without_shown(kernels.states(rows, TABLE), events)


def assert_part(found: dict[Key, State], due: dict[Key, State], events: list[Event]) -> None:
    """Assert equality, but allow a column that came with a key change to be unresolved: its window may have
    kept only the later events of the old key."""
    moved = {event.key for event in events if event.moved_from is not None}
    assert found.keys() == due.keys()
    for key, state in found.items():
        assert state == due[key] or (key in moved and state.is_part_of(due[key])), key


@settings(max_examples=examples(2 * EXAMPLES))
@given(randoms, st.integers(1, 3))
def test_whole_columns_and_single_groups_fold_to_the_very_same_rows(rng: Random, windows: int) -> None:
    events = drawn(rng, withheld=rng.random() < 0.5)
    table = kernels.events_table(events, TABLE, in_windows(rng, events, windows))
    assume(table.num_rows)
    by_columns, by_group = (kernels.fold(table, TABLE, Cut(few=few)) for few in (0, table.num_rows))
    assert kernels.same_rows(by_columns) == kernels.same_rows(by_group)
    assert by_columns.schema == by_group.schema


@settings(max_examples=examples(2 * EXAMPLES))
@given(randoms, st.integers(1, 3), st.sampled_from((1, 2, 5, 1_000)))
def test_images_that_are_read_late_come_to_the_very_same_rows(
    rng: Random, windows: int, most_images: int
) -> None:
    events = drawn(rng, withheld=rng.random() < 0.5)
    table = kernels.events_table(events, TABLE, in_windows(rng, events, windows))
    assume(table.num_rows)
    late = kernels.fold_late(table, TABLE, most_images=most_images)
    assert kernels.same_rows(late) == kernels.same_rows(kernels.fold(table, TABLE, Cut(few=table.num_rows)))


def test_the_image_of_an_event_that_another_of_its_key_follows_is_not_read() -> None:
    plain = {"op": "u", "epoch": 1, "ordinal": 0, "source_ts": _START, "withheld": False, "window": "w1"}
    images = [f'{{"id":"1","region":"r","status":"{n}","note":null,"body":null}}' for n in range(4)]
    rows = [
        plain | {"key": key, "commit_lsn": lsn, "after": after, "op": op}
        for lsn, (key, op, after) in enumerate(
            [
                ('["1","r"]', "c", images[0]),
                ('["1","r"]', "u", images[1]),
                ('["2","r"]', "c", images[2]),
                ('["2","r"]', "d", None),
                ('["1","r"]', "u", images[3]),
            ]
        )
    ]
    numbers_read: list[int] = []
    folded = kernels.fold_late(pa.Table.from_pylist(rows, schema=kernels.EVENTS), TABLE, numbers_read)
    assert numbers_read == [2, 4]
    assert sorted(folded["status"].to_pylist()) == ["2", "3"]
    numbers_read.clear()
    by_parts = kernels.fold_late(
        pa.Table.from_pylist(rows, schema=kernels.EVENTS), TABLE, numbers_read, most_images=1
    )
    # By key: each part holds the images of one.
    assert numbers_read == [4, 2]
    assert kernels.same_rows(by_parts) == kernels.same_rows(folded)


@given(st.lists(st.text("ab\u00fc\U0001f600", max_size=3), min_size=1, unique=True), st.integers(1, 4))
def test_parts_come_in_the_order_of_their_windows_and_keys(texts: list[str], most_images: int) -> None:
    plain = {"op": "c", "epoch": 1, "ordinal": 0, "source_ts": _START, "withheld": False}
    rows = [
        plain
        | {
            "window": f"w{number % 2}",
            "key": json.dumps([text, "r"], ensure_ascii=False),
            "commit_lsn": number,
            "after": json.dumps({"status": "s", "note": None, "body": None}),
        }
        for number, text in enumerate(texts)
    ]
    events = pa.Table.from_pylist(rows, schema=kernels.EVENTS)
    narrow = events.drop_columns(list(IMAGES)).append_column(ROW, pa.array(range(len(events))))
    parts = fold_late(
        narrow.combine_chunks(),
        lambda numbers: events.select(IMAGES).take(pa.array(numbers)).combine_chunks(),
        TABLE.shape,
        most_images=most_images,
    )
    found = [pa.Table.from_batches(part).select(["window", "_cdc_key"]).to_pylist() for part in parts]
    assert max(map(len, found)) <= most_images
    places = [tuple(row.values()) for part in found for row in part]
    assert places == sorted((row["window"], row["key"]) for row in rows)


@pytest.mark.full
def test_ordinary_groups_are_folded_by_whole_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = 0
    monkeypatch.setattr(event_fold, "_folded_by_group", None)
    for seed in range(100):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if each.op in "crud" and not each.moved_from]
        places = [(event.at, event.key) for event in events]
        alone = [event for event, place in zip(events, places, strict=True) if places.count(place) == 1]
        if alone:
            table = kernels.events_table(alone, TABLE, in_windows(rng, alone, 2))
            folded += kernels.fold(table, TABLE).num_rows
    assert folded > 200


@pytest.mark.full
def test_withheld_events_and_key_changes_that_brought_all_are_folded_by_whole_columns_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due = []
    for seed in range(100):
        rng = Random(seed)
        sent = [each for each in drawn(rng) if each.op in "crud"]
        places = [(event.at, event.key) for event in sent]
        alone = [each for each, place in zip(sent, places, strict=True) if places.count(place) == 1]
        alone = [_whole_move(event) for event in alone]
        if alone:
            table = kernels.events_table(alone, TABLE, in_windows(rng, alone, 2))
            due.append((table, kernels.same_rows(kernels.fold(table, TABLE, Cut(few=table.num_rows)))))
    monkeypatch.setattr(event_fold, "_folded_by_group", None)
    for table, rows in due:
        assert kernels.same_rows(kernels.fold(table, TABLE)) == rows
        assert kernels.same_rows(kernels.fold_late(table, TABLE)) == rows
    assert sum(row["_cdc_doubt"] is not None for _, rows in due for row in rows) > 10
    assert sum(pc.sum(pc.equal(table["op"], OLD_KEY_ENDED)).as_py() or 0 for table, _ in due) > 20


def _whole_move(event: Event) -> Event:
    """Return an event that has its unsent columns nowhere else, and a key change that has all of them."""
    if event.moved_from is None or event.quarantined:
        return replace(event, before=None)
    image = _image(dict.fromkeys(SHAPE.columns, "v 1")) or {}
    return replace(event, before=None, after=image | dict(event.after or {}), unchanged=frozenset())


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts, st.sampled_from(("low", None)))
def test_a_life_that_began_before_a_column_was_added_has_its_default(
    rng: Random, cut: Cut, default: str | None
) -> None:
    younger = replace(TABLE, defaults=(("status", default),))
    before = dict[Position, bool]()
    without, written = [], []
    for event in drawn(rng):
        begins = event.op in "cr" and event.after is not None
        if begins and before.setdefault(event.at, rng.random() < 0.6):
            image = {name: text for name, text in (event.after or {}).items() if name != "status"}
            without.append(replace(event, after=image, unchanged=event.unchanged - {"status"}))
            written.append(replace(without[-1], after=image | {"status": default}))
        else:
            unsent = begins and "status" not in (event.after or {})
            without.append(replace(event, unchanged=event.unchanged | {"status"}) if unsent else event)
            written.append(without[-1])
    windows = in_windows(rng, without, 3)
    events = kernels.events_table(without, younger, windows)
    assume(events.num_rows)
    sent = kernels.fold(kernels.events_table(written, TABLE, windows), TABLE, Cut(few=1000))
    for found in (kernels.fold(events, younger, cut), kernels.fold_late(events, younger)):
        assert kernels.same_rows(found) == kernels.same_rows(sent)


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts)
def test_one_fold_of_everything_is_what_the_oracle_says(rng: Random, cut: Cut) -> None:
    events = drawn(rng)
    table = kernels.events_table(events, TABLE, in_windows(rng, events, 1))
    rows = kernels.current(kernels.fold(table, TABLE, cut), TABLE, cut)
    assert kernel_states(rows, events) == oracle_states(events)


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts)
def test_windows_and_parts_in_any_order_come_to_the_same(rng: Random, cut: Cut) -> None:
    events = drawn(rng)
    parts = folded_parts(rng, events, cut)
    due = oracle_states(events)
    together = kernels.merged(parts, TABLE, cut)
    for rows in (together, kernels.merged([together], TABLE, cut)):
        assert_part(kernel_states(kernels.current(rows, TABLE, cut), events), due, events)


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts, st.booleans())
def test_how_the_rows_of_a_window_are_split_changes_nothing(rng: Random, cut: Cut, moving: bool) -> None:
    """Parts as runs append them, the same merged, and the window folded again from all its events."""
    events = drawn(rng, moving=moving)
    windows = in_windows(rng, events, 3)
    parts = appended_parts(rng, events, cut, windows)
    apart = kernels.current(pa.concat_tables(parts), TABLE, cut)
    states = kernels.states(apart, TABLE)
    assert_part(kernel_states(apart, events), oracle_states(events), events)
    again = kernels.fold(kernels.events_table(events, TABLE, windows), TABLE, cut)
    for rows in (kernels.merged(parts, TABLE, cut), again):
        assert kernels.states(kernels.current(rows, TABLE, cut), TABLE) == states


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_column_along_key_changes_is_unresolved_where_a_window_may_hide_events_of_an_old_key(
    withheld: bool, several: bool
) -> None:
    """A row goes from 3 to 1 to 2, its columns sent under the first key alone. An old window has events of
    key 1 from below, and one from above the second change: what it held between the two is not known.

    ``several``: the window has it from above in another part. It hides nothing, so the oracle knows more.
    """
    three, one, two = KEYS[2], KEYS[0], KEYS[1]
    image: Image = {"status": "v 1", "note": "v 2", "body": "v 3"}
    unsent = frozenset({"note", "body"})

    def event(lsn: int, op: str, key: Key, after: Image | None, ordinal: int = 0, **more: object) -> Event:
        return Event(
            Position(1, lsn, ordinal),
            op,
            SHAPE.name,
            key,
            _START + timedelta(seconds=lsn),
            after=after,
            **more,  # type: ignore[arg-type]
        )

    moved: Image = {"status": "v 6"}
    told = [
        event(14, "c", one, image),
        event(43, "c", three, {"status": "v 5", "note": "v 6", "body": "v 7"}),
        event(47, "d", three, None),
        event(47, "c", one, moved, 1, moved_from=three, unchanged=unsent),
        event(60, "d", one, None),
        event(60, "c", two, moved, 1, moved_from=one, unchanged=unsent),
        event(101, "u", one, image, quarantined=withheld),
    ]
    events = typed(told)
    windows = {each.at[:2]: "old" if each.at[1] in (14, 101) else f"w{each.at[1]}" for each in events}
    parts = [
        kernels.fold(kernels.events_table(part, TABLE, windows), TABLE)
        for part in ((events[:-1], events[-1:]) if several else (events,))
    ]
    found = kernel_states(kernels.current(pa.concat_tables(parts), TABLE), events)
    due = oracle_states(events)
    key = _key(two)
    assert key is not None
    assert dict(due[key].values).keys() == {"status", "note", "body"}
    assert found[key] == replace(due[key], values=(("status", dict(due[key].values)["status"]),))
    assert {each: state for each, state in found.items() if each != key} == {
        each: state for each, state in due.items() if each != key
    }


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts)
def test_merging_is_associative_commutative_and_idempotent(rng: Random, cut: Cut) -> None:
    one, two, three = folded_parts(rng, drawn(rng), cut)
    left = kernels.merged([kernels.merged([one, two], TABLE, cut), three], TABLE, cut)
    right = kernels.merged([two, kernels.merged([three, one], TABLE, cut)], TABLE, cut)
    again = kernels.merged([left, one, left, three], TABLE, cut)
    rows = kernels.same_rows(left)
    assert kernels.same_rows(right) == rows
    assert kernels.same_rows(again) == rows


@settings(max_examples=examples(EXAMPLES // 2))
@given(randoms, cuts)
def test_a_fold_in_parts_gives_the_very_rows_that_one_fold_gives(rng: Random, cut: Cut) -> None:
    """Within a window and without key changes, which a part may not know yet."""
    events = [event for event in drawn(rng) if event.moved_from is None]
    assume(events)
    windows = in_windows(rng, events, 2)
    whole = kernels.fold(kernels.events_table(events, TABLE, windows), TABLE)
    parts = folded_parts(rng, events, cut, windows)
    assert _without_batch(kernels.merged(parts, TABLE, cut)) == _without_batch(kernels.merged([whole], TABLE))


@settings(max_examples=examples(EXAMPLES // 2))
@given(randoms, cuts)
def test_copies_of_events_change_nothing(rng: Random, cut: Cut) -> None:
    events = drawn(rng)
    more = [*events, *(event for event in events if rng.random() < 0.5)]
    rng.shuffle(more)
    windows = in_windows(rng, events, 2)
    once, twice = (
        kernel_states(
            kernels.current(kernels.fold(kernels.events_table(sent, TABLE, windows), TABLE, cut), TABLE, cut),
            events,
        )
        for sent in (events, more)
    )
    assert once == twice


@settings(max_examples=examples(EXAMPLES // 4))
@given(randoms, cuts)
def test_a_database_history_ends_as_the_database_did(rng: Random, cut: Cut) -> None:
    """Chains and swaps of keys, key ranges read again, two epochs; windows in log order, as servers fill
    them."""
    history = simulate(rng, exact=True)
    events = typed(history.events)
    transactions = sorted({event.at[:2] for event in events})
    windows = {at: f"w{4 * number // len(transactions)}" for number, at in enumerate(transactions)}
    rows = kernels.current(kernels.fold(kernels.events_table(events, TABLE, windows), TABLE, cut), TABLE, cut)
    living = {key: dict(s.values) for key, s in kernels.states(rows, TABLE).items() if s.ended_at is None}
    assert living == {_key(key): _image(image) for key, image in history.final.items()}


@settings(max_examples=examples(10))
@given(randoms)
def test_a_hot_key_with_hundreds_of_events_in_many_batches(rng: Random) -> None:
    sent = [
        Event(
            Position(1, number // 3, 2 * (number % 3)),
            rng.choice("cuuuuuuuud"),
            SHAPE.name,
            KEYS[0],
            _START + timedelta(seconds=number // 3),
            after={name: f"v {number}" for name in SHAPE.columns if rng.random() < 0.4},
            quarantined=rng.random() < 0.02,
        )
        for number in range(400)
    ]
    events = typed([replace(each, after=None) if each.op == "d" else each for each in sent])
    rng.shuffle(events)
    cut = Cut(2, 7, 1)
    due = oracle_states(events)
    for count in (1, 5):
        table = kernels.events_table(events, TABLE, in_windows(rng, events, count))
        rows = kernels.current(kernels.fold(table, TABLE, cut), TABLE, cut)
        found = kernel_states(rows, events)
        assert {key: replace(s, ended_at=None) for key, s in found.items()} == {
            key: replace(s, ended_at=None) for key, s in due.items()
        }


def test_the_cases_hold_every_situation_they_are_meant_to() -> None:
    events = [event for seed in range(400) for event in drawn(Random(seed))]
    assert {event.op for event in events} == set("crudtb")
    assert {event.at.epoch for event in events} == {1, 2}
    assert sum(event.quarantined for event in events) > 50
    assert sum(event.scope is not None for event in events) > 50
    assert sum(event.identity is not None for event in events) > 100
    assert any(event.moved_from and event.unchanged and not event.before for event in events)
    values = {value for event in events for value in (event.after or {}).values()}
    assert {None, "NaN", "-infinity"} < values
    for odd in ('"', "\\", "\n", "🐘", "x" * 3000):
        assert any(odd in value for value in values if value is not None)


def folded_parts(
    rng: Random, events: list[Event], cut: Cut, windows: dict[tuple[int, int], str] | None = None
) -> list[kernels.pa.Table]:
    """Divide the history by transaction in three parts and fold each alone."""
    windows = windows or in_windows(rng, events, 3)
    part_of = {at: rng.randrange(3) for at in windows}
    sent = [[event for event in events if part_of[event.at[:2]] == part] for part in range(3)]
    # Where one has no events another one comes twice.
    some = next(part for part in sent if part)
    tables = [kernels.events_table(part or some, TABLE, windows) for part in sent]
    return [kernels.fold(table, TABLE, cut) for table in tables]


def appended_parts(
    rng: Random, events: list[Event], cut: Cut, windows: dict[tuple[int, int], str]
) -> list[kernels.pa.Table]:
    """Up to three parts of the history, each above the one before in log order, each folded by itself."""
    transactions = sorted(windows)
    bounds = sorted(rng.randrange(len(transactions) + 1) for _ in range(2))
    part_of = {at: sum(number >= bound for bound in bounds) for number, at in enumerate(transactions)}
    told = [[event for event in events if part_of[event.at[:2]] == part] for part in range(3)]
    return [kernels.fold(kernels.events_table(part, TABLE, windows), TABLE, cut) for part in told if part]


def _without_batch(table: kernels.pa.Table) -> kernels.Rows:
    return kernels.same_rows(table.drop_columns(["_cdc_batch_id"]))


@pytest.mark.parametrize("withheld", ["", "c", "d", "cd"])
@pytest.mark.parametrize("later", [False, True])
def test_a_delete_and_a_creation_of_one_key_at_one_lsn(withheld: str, later: bool) -> None:
    """A key change whose halves have one key by the contract: the delete comes first. Each half is accepted
    or withheld; they are folded together or apart, with an event above them or none."""
    made = Event(Position(1, 3, 0), "c", SHAPE.name, KEYS[0], _START, after={"status": "v 1", "note": "v 2"})
    at, then = Position(1, 5, 0), _START + timedelta(seconds=5)
    events = [
        made,
        Event(at, "d", SHAPE.name, KEYS[0], then, identity="d", quarantined="d" in withheld),
        Event(
            at,
            "c",
            SHAPE.name,
            KEYS[0],
            then,
            None,
            {"body": "v 3"},
            identity="c",
            quarantined="c" in withheld,
        ),
    ]
    if later:
        above = _START + timedelta(seconds=9)
        events.append(Event(Position(1, 9, 0), "u", SHAPE.name, KEYS[0], above, after={"note": "v 6"}))
    events = typed(events)
    due = oracle_states(events)
    (state,) = due.values()
    assert (state.ended_at, state.doubtful) == (None, withheld == "cd" and not later)
    windows = {event.at[:2]: "w" for event in events}
    whole = kernels.fold(kernels.events_table(events, TABLE, windows), TABLE)
    parts = [kernels.fold(kernels.events_table([event], TABLE, windows), TABLE) for event in events]
    assert kernel_states(kernels.current(whole, TABLE), events) == due
    for rows in (kernels.merged(parts, TABLE), kernels.merged(parts[::-1], TABLE)):
        assert kernel_states(kernels.current(rows, TABLE), events) == due
        assert _without_batch(rows) == _without_batch(kernels.merged([whole], TABLE))


@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.booleans())
def test_parts_merged_by_whole_columns_and_one_by_one_are_the_very_same_rows(
    rng: Random, withheld: bool
) -> None:
    events = drawn(rng, withheld=withheld)
    parts = folded_parts(rng, events, Cut())
    by_columns, by_group = (kernels.merged(parts, TABLE, Cut(few=few)) for few in (0, 1 << 20))
    assert kernels.same_rows(by_columns) == kernels.same_rows(by_group)


@pytest.mark.full
def test_ordinary_parts_are_merged_by_whole_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = 0
    monkeypatch.setattr(row_fold, "_merge_key", None)
    for seed in range(100):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if each.op in "crud" and not each.moved_from]
        places = [(event.at, event.key) for event in events]
        alone = [event for event, place in zip(events, places, strict=True) if places.count(place) == 1]
        # An exact text beside its typed column is left to the other path.
        sent = [replace(each, after=_fitting(each.after), before=None) for each in alone]
        windows = in_windows(rng, sent, 1)
        halves = [part for part in (sent[::2], sent[1::2]) if part]
        if halves:
            tables = [kernels.fold(kernels.events_table(part, TABLE, windows), TABLE) for part in halves]
            merged += kernels.merged(tables, TABLE).num_rows
    assert merged > 150


def _fitting(image: Image | None) -> Image | None:
    if image is None:
        return None
    return {
        name: "1.25" if name == "note" else None if name == "body" else text for name, text in image.items()
    }


@pytest.mark.full
def test_rows_that_live_or_ended_plainly_are_passed_on_by_whole_columns_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current_rows, "_Lives", None)
    ended = alive = 0
    for seed in range(100):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if each.op in "crud" and not each.moved_from]
        places = [(event.at, event.key) for event in events]
        alone = [event for event, place in zip(events, places, strict=True) if places.count(place) == 1]
        if alone:
            table = kernels.events_table(alone, TABLE, in_windows(rng, alone, 1))
            rows = kernels.current(kernels.fold(table, TABLE), TABLE)
            assert kernel_states(rows, alone) == oracle_states(alone)
            ended += sum(row["_ended"] for row in rows)
            alive += sum(not row["_ended"] for row in rows)
    assert ended > 50 and alive > 50


@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.integers(1, 2))
def test_rows_passed_on_by_whole_columns_are_what_the_exact_kernel_makes_of_them(
    rng: Random, windows: int
) -> None:
    events = drawn(rng, withheld=rng.random() < 0.5)
    table = kernels.events_table(events, TABLE, in_windows(rng, events, windows))
    assume(table.num_rows)
    rows = kernels.merged([kernels.fold(table, TABLE)], TABLE)
    with pytest.MonkeyPatch.context() as patched:
        passed_on = kernels.current(rows, TABLE)
        patched.setattr(current_rows, "_OF_ROWS", pa.array([], pa.string()))
        exactly = kernels.current(rows, TABLE)
    assert _by_key(passed_on) == _by_key(exactly)


def _by_key(rows: kernels.Rows) -> dict[str, dict[str, object]]:
    """Open columns matter only to a key that took its row from another one."""
    return {
        row["_cdc_key"]: {name: value for name, value in row.items() if name != "_open" or row["_from_key"]}
        for row in rows
    }


class TestTasksWithSharesOfTheEvents:
    """A task folds only the files of its share. Whether that equals one fold of all events is decided from
    what the tasks report of their events."""

    @settings(max_examples=examples(EXAMPLES))
    @given(randoms, st.booleans(), cuts)
    def test_parts_that_agree_come_to_what_the_oracle_comes_to(
        self, rng: Random, in_order: bool, cut: Cut
    ) -> None:
        events = drawn(rng, withheld=False)
        windows = in_windows(rng, events, 1)
        transactions = sorted(windows)
        part_of = {at: rng.randrange(3) for at in transactions}
        if in_order:
            part_of = {at: place * 3 // len(transactions) for place, at in enumerate(transactions)}
        shares = [
            kernels.events_table([e for e in events if part_of[e.at[:2]] == part], TABLE, windows)
            for part in range(3)
        ]
        agree = parts_agree(json.dumps(stretches_of(share)) for share in shares)
        assert agree or not in_order
        assume(agree)
        folded = [kernels.fold(share, TABLE, cut) for share in shares if share.num_rows]
        assume(folded)
        together = kernels.merged(folded, TABLE, cut)
        assert kernel_states(kernels.current(together, TABLE, cut), events) == oracle_states(events)

    @settings(max_examples=examples(EXAMPLES))
    @given(randoms, st.integers(1, 3), cuts)
    def test_shares_of_the_keys_come_to_what_the_oracle_comes_to(
        self, rng: Random, count: int, cut: Cut
    ) -> None:
        events = drawn(rng, withheld=False)
        table = kernels.events_table(events, TABLE, in_windows(rng, events, 1))
        shares = [of_share(table, Share((), number, count)) for number in range(count)]
        assert sum(share.num_rows for share in shares) == table.num_rows
        folded = [kernels.fold(share, TABLE, cut) for share in shares if share.num_rows]
        assume(folded)
        together = kernels.merged(folded, TABLE, cut)
        assert together.num_rows == kernels.fold(table, TABLE, cut).num_rows
        assert kernel_states(kernels.current(together, TABLE, cut), events) == oracle_states(events)

    def test_a_key_change_among_the_positions_of_another_part_is_told(self) -> None:
        moved = [(2, '["1"]')]
        assert parts_agree([_told([(1, None)]), _told([(3, None)])])
        assert parts_agree([_told([(1, None), (3, None)]), _told([(2, None)])])
        assert not parts_agree([_told([(1, None), (3, None)]), _told(moved)])
        assert not parts_agree([_told([(2, None)]), _told(moved)])
        assert parts_agree([_told([(1, None)]), _told(moved), _told([(3, None)])])
        assert parts_agree([_told([(1, None), (3, None)], "w2"), _told(moved)])


def _told(events: list[tuple[int, str | None]], window: str = "w1") -> str:
    rows = [
        {"window": window, "epoch": 1, "commit_lsn": lsn, "moved_from_key": moved_from}
        for lsn, moved_from in events
    ]
    return json.dumps(stretches_of(pa.Table.from_pylist(rows, schema=kernels.EVENTS)))


def test_keys_are_whole_numbers_only_where_no_two_texts_are_one_number() -> None:
    found = integer_keys(pa.array(['["10"]', '["-5"]', None, '["0"]']))
    assert found is not None
    assert found.tolist() == [10, -5, -(2**63), 0]
    for other in ('["01"]', '["-0"]', '["1","2"]', '["a"]', '["9999999999999999999"]', "[null]", '["1"]\n'):
        assert integer_keys(pa.array(['["1"]', other])) is None
