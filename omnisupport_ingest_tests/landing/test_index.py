"""The landing index says what all manifests say, whatever happened to it and to them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.landing.chain import unbroken
from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord, write_epoch
from omnisupport_ingest.landing.errors import ChainContested
from omnisupport_ingest.landing.index import LandingIndex
from omnisupport_ingest.landing.manifest import (
    ArrivalFacts,
    ChunkSpan,
    DataFile,
    FileSpan,
    Manifest,
)
from omnisupport_ingest.landing.names import batch_id_of
from omnisupport_ingest.landing.store import LandingStore, _landing_order
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.landing.batches import NOON, span

WINDOWS = ("2026-03-02T1100", "2026-03-02T1200", OUT_OF_RANGE)


def named(manifest: Manifest) -> Manifest:
    return replace(manifest, batch_id=batch_id_of(manifest))


def data_file(number: int, epoch: int, low: int, window: str, rows: int = 2) -> DataFile:
    first, last = Position(epoch, Lsn(low), -number), Position(epoch, Lsn(low + number), number)
    return DataFile(
        f"data/b/{number}-{low}.parquet", window, rows, 10, "0" * 64, first, last, True, {"public.t": rows}
    )


@st.composite
def batches(draw: st.DrawFn, *, kinds: str = "scf") -> Manifest:
    """One batch of any kind. Streams are cut from a short log, so that chains, breaks and overlaps form."""
    epoch = draw(st.integers(1, 2))
    low = draw(st.integers(0, 6)) * 10
    files = tuple(
        data_file(draw(st.integers(1, 3)), epoch, low, draw(st.sampled_from(WINDOWS)))
        for _ in range(draw(st.integers(0, 2)))
    )
    mark = draw(st.none() | st.integers(0, 5).map(lambda hours: NOON + timedelta(hours=hours)))
    landed_at = NOON + timedelta(minutes=draw(st.integers(0, 9)))
    arrival = ArrivalFacts(landed_at, None, mark, None, mark, None)
    plain = Manifest("", "desk", epoch, arrival, files=files)
    kind = draw(st.sampled_from(kinds))
    if kind == "s":
        stream = span(low, low + draw(st.sampled_from((10, 10, 10, 20))), NOON)
        return named(
            replace(plain, stream=replace(stream, recovered_from=draw(st.sampled_from((None, Lsn(3))))))
        )
    if kind == "c":
        chunk = ChunkSpan("s1", "t", draw(st.integers(0, 4)), 1, Lsn(1), Lsn(9), NOON)
        return named(replace(plain, chunk=chunk))
    order = draw(st.sampled_from(("transaction", "time", None)))
    content = f"{draw(st.integers(0, 9))}" * 64
    return named(replace(plain, file=FileSpan(content, "a.jsonl", "", order)))


@dataclass(frozen=True)
class Told:
    """All that the readers of landing ask it for."""

    names: list[str]
    accepted: list[str]
    gap: str | None
    count: int
    events: int
    watermark: object
    stream_end: object
    last: str | None
    last_stream: tuple[str | None, ...]
    last_file: tuple[str | None, ...]
    begun: int
    recoveries: int
    sentinel: int
    windows: dict[str, list[tuple[str, str]]]
    reaching: list[tuple[str, str]]


EPOCHS = (1, 2)
REACH = Position(1, Lsn(15), 0), Position(1, Lsn(31), 1)


def name_of(manifest: Manifest | None) -> str | None:
    return None if manifest is None else manifest.batch_id


def by_index(store: LandingStore) -> Told:
    landed = store.landed()
    windows = {
        window: sorted((part.batch_id, part.path) for part in parts)
        for window in store.windows()
        if (parts := landed.parts(window))
    }
    return Told(
        store.batch_ids(),
        [each.batch_id for each in landed.batches],
        None if landed.gap is None else str(landed.gap),
        landed.count,
        sum(each.events for each in landed.epochs),
        landed.watermark,
        landed.stream_end,
        landed.last.batch_id if landed.last else None,
        tuple(name_of(store.last_stream(epoch)) for epoch in EPOCHS),
        tuple(name_of(store.last_file(epoch)) for epoch in EPOCHS),
        store.newest_epoch_begun(),
        sum(each.recoveries for each in landed.epochs),
        sum(each.out_of_range for each in landed.epochs),
        windows,
        sorted((each.batch_id, each.path) for each in store.reaching(1, *REACH)),
    )


def by_manifests(store: LandingStore) -> Told:
    """The same from every manifest, as it was done before there was an index."""
    manifests = sorted(map(store.read, store.names_on_disk()), key=_landing_order)
    starts = {each.number: each.facts.consistent_point for each in store.epochs() if each.facts}
    accepted, gap = list(manifests), None
    for epoch in EPOCHS:
        stream = [each for each in manifests if each.epoch == epoch and each.stream is not None]
        taken, found = unbroken(stream, starts.get(epoch))
        held_back = {each.batch_id for each in stream} - {each.batch_id for each in taken}
        accepted = [each for each in accepted if each.batch_id not in held_back]
        gap = found or gap
    marks = [(each.epoch, each.arrival.watermark) for each in accepted if each.arrival.watermark]
    windows: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for each in accepted:
        for file in each.files:
            windows[file.window].append((each.batch_id, file.path))

    def last_stream(epoch: int) -> str | None:
        return max((each.batch_id for each in manifests if each.stream and each.epoch == epoch), default=None)

    def last_file(epoch: int) -> str | None:
        files = [
            each
            for each in manifests
            if each.file is not None and each.file.order is not None and each.epoch <= epoch
        ]
        never = NOON - timedelta(days=9)
        return name_of(
            max(
                files,
                key=lambda each: (
                    each.epoch,
                    each.arrival.watermark or never,
                    each.arrival.highest_commit_ts or never,
                    each.arrival.landed_at,
                    each.batch_id,
                ),
                default=None,
            )
        )

    return Told(
        sorted(each.batch_id for each in manifests),
        [each.batch_id for each in accepted],
        None if gap is None else str(gap),
        len(accepted),
        sum(each.rows for each in accepted),
        max(marks)[1] if marks else None,
        max((each.stream.end_lsn for each in accepted if each.stream), default=None),
        accepted[-1].batch_id if accepted else None,
        tuple(map(last_stream, EPOCHS)),
        tuple(map(last_file, EPOCHS)),
        max((each.epoch for each in manifests if each.rows), default=0),
        sum(1 for each in accepted if each.stream and each.stream.recovered_from),
        sum(file.rows for each in accepted for file in each.files if file.window == OUT_OF_RANGE),
        {window: sorted(held) for window, held in windows.items()},
        sorted(
            (each.batch_id, file.path)
            for each in manifests
            if each.epoch == 1
            for file in each.files
            if file.first <= REACH[1] and REACH[0] <= file.last
        ),
    )


def index_file(store: LandingStore) -> Path:
    return store.folder / "index" / "index.sqlite"


def manifest_file(store: LandingStore, name: str) -> Path:
    return store.folder / "manifests" / f"{name}.json"


def publish(store: LandingStore, manifest: Manifest) -> bool:
    """Land ``manifest`` past the refusal of a break, as two writers might have."""
    store.data_folder("b").mkdir(exist_ok=True)
    for file in manifest.files:
        store.path_of(file).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LandingStore, "_refuse_break", lambda *_: None)
        try:
            store.publish(manifest)
        except ChainContested:
            return False
    return True


def damage_some_bytes(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    if content:
        for offset in range(at % len(content), len(content), 997):
            content[offset] ^= 0x55
        file.write_bytes(bytes(content))


STEPS = st.one_of(
    st.tuples(st.just("land"), batches()),
    st.tuples(st.just("land"), batches(kinds="s")),
    st.tuples(st.just("die before the index learns of it"), batches()),
    st.tuples(st.just("a manifest is moved away"), st.integers(0, 30)),
    st.tuples(st.just("a manifest comes back"), st.integers(0, 30)),
    st.tuples(st.just("an epoch's record is written"), st.integers(1, 2)),
    st.tuples(st.just("the index is deleted"), st.none()),
    st.tuples(st.just("the index is truncated"), st.integers(0, 50_000)),
    st.tuples(st.just("the index is overwritten"), st.integers(0, 50_000)),
    st.tuples(st.just("the index is kept"), st.none()),
    st.tuples(st.just("the index is an older one"), st.none()),
    st.tuples(st.just("another process"), st.none()),
    st.tuples(st.just("a look"), st.none()),
)


@given(st.lists(STEPS, max_size=25))
def test_the_index_says_what_all_manifests_say(steps: list[tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "landing"
        root.mkdir()
        store, away, kept = LandingStore(root, "desk"), Path(folder) / "away", Path(folder) / "kept.sqlite"
        away.mkdir()
        for step, what in steps:
            names = store.names_on_disk()
            file = index_file(store)
            if step == "land" and isinstance(what, Manifest):
                publish(store, what)
            elif isinstance(what, Manifest):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(LandingIndex, "_add", lambda *_: None)
                    publish(store, what)
            elif step == "a manifest is moved away" and isinstance(what, int) and names:
                path = manifest_file(store, names[what % len(names)])
                # It may have been moved away before, and have landed again.
                path.replace(away / path.name)
            elif step == "a manifest comes back" and isinstance(what, int):
                gone = sorted(away.iterdir())
                if gone and not manifest_file(store, gone[what % len(gone)].stem).exists():
                    shutil.move(gone[what % len(gone)], store.folder / "manifests")
            elif step == "an epoch's record is written" and isinstance(what, int):
                if all(each.number != what for each in store.epochs()):
                    facts = EpochFacts("1", 1, "slot", Lsn(10 * what), "d", "18", {})
                    write_epoch(store.folder / "epochs", EpochRecord(what, "again", NOON, facts))
            elif step == "the index is deleted":
                file.unlink(missing_ok=True)
            elif step == "the index is truncated" and isinstance(what, int) and file.exists():
                store.close()
                os.truncate(file, what % (file.stat().st_size + 1))
            elif step == "the index is overwritten" and isinstance(what, int) and file.exists():
                store.close()
                damage_some_bytes(file, what)
            elif step == "the index is kept" and file.exists():
                store.close()
                shutil.copy2(file, kept)
            elif step == "the index is an older one" and kept.exists() and file.exists():
                store.close()
                shutil.copy2(kept, file)
            elif step == "another process":
                store.close()
                store = LandingStore(root, "desk")
            elif step == "a look":
                assert by_index(store) == by_manifests(store)
        assert by_index(store) == by_manifests(store)
        assert by_index(LandingStore(root, "desk")) == by_manifests(store)
        store.close()


@pytest.fixture
def landed(store: LandingStore) -> LandingStore:
    for begin in range(0, 60, 10):
        file = data_file(1, 1, begin + 1, WINDOWS[0])
        arrival = ArrivalFacts(NOON, None, NOON, None)
        publish(
            store,
            named(Manifest("", store.source, 1, arrival, stream=span(begin, begin + 10), files=(file,))),
        )
    assert len(store.parts(WINDOWS[0])) == 6
    return store


def parses(store: LandingStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    parse: Callable[[LandingStore, str], Manifest] = LandingStore._parse

    def counted(self: LandingStore, batch_id: str) -> Manifest:
        seen.append(batch_id)
        return parse(self, batch_id)

    monkeypatch.setattr(LandingStore, "_parse", counted)
    return seen


def test_a_process_that_starts_parses_nothing_that_is_in_the_index(
    landed: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = parses(landed, monkeypatch)
    again = LandingStore(landed.folder.parent, landed.source)
    assert again.landed().count == 6 and len(again.parts(WINDOWS[0])) == 6
    assert seen == []


def test_only_what_the_index_missed_is_parsed(landed: LandingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = named(Manifest("", landed.source, 1, ArrivalFacts(NOON, None, None, None), stream=span(60, 70)))
    with monkeypatch.context() as patch:
        patch.setattr(LandingIndex, "_add", lambda *_: None)
        publish(landed, missed)
    seen = parses(landed, monkeypatch)
    assert LandingStore(landed.folder.parent, landed.source).landed().count == 7
    assert set(seen) == {missed.batch_id}


def test_a_copy_of_the_home_makes_an_index_of_its_own(
    landed: LandingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(landed.folder, tmp_path / "copy" / landed.source)
    seen = parses(landed, monkeypatch)
    assert LandingStore(tmp_path / "copy", landed.source).landed().count == 6
    assert len(set(seen)) == 6


def test_without_a_place_to_write_the_index_everything_is_answered_all_the_same(
    landed: LandingStore,
) -> None:
    shutil.rmtree(landed.folder / "index")
    (landed.folder / "index").write_text("in the way")
    again = LandingStore(landed.folder.parent, landed.source)
    assert by_index(again) == by_manifests(again)
    publish(again, named(replace(again.manifests()[-1], stream=span(60, 70), files=())))
    assert again.landed().count == 7


def test_a_manifest_that_was_changed_in_its_place_is_seen_after_looking_through(landed: LandingStore) -> None:
    file = manifest_file(landed, landed.names_on_disk()[0])
    file.write_text(file.read_text().replace('"watermark": "2026', '"watermark": "2027'))
    landed.look_again()
    assert by_index(landed) == by_manifests(landed)
    assert landed.landed().watermark == NOON.replace(year=2027)


def test_a_forked_process_opens_the_index_for_itself(landed: LandingStore) -> None:
    child = os.fork()
    if not child:
        right = landed.landed().count == 6 and len(landed.parts(WINDOWS[0])) == 6
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert landed.landed().count == 6
