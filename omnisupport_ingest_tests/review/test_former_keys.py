"""Erasing a row of a table that had a key of other columns before: what landed by that key goes too."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.landed_keys import KeysOfTable, LandedKeys
from omnisupport_ingest.contracts.model import KeyEra
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.schema_changes import Difference, Look, SchemaChanges, SeenColumn, SeenTable
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.erasures import ErasureLedger
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.review.erasing import key_text
from omnisupport_ingest.review.row_certificate import erase_row
from omnisupport_ingest.review.subject_erasure import erase_subject, look_up_subject
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, SOURCE, START, THIRD, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace
from omnisupport_ingest_tests.review.test_erasure import content_of, everything, queried, run

PERSON = "Ada Lovelace"
"""In every value of the row that is to be erased, in whatever event."""

OTHER = "Grace Hopper"
"""In every value of a row that lives."""

WINDOWS = (FIRST, SECOND, THIRD)
UNLINKED = "events with a former key that no event links to a present one"

BY_ID = KeysOfTable.first(("id",))
BY_N = BY_ID.begin(KeyEra(("n",), 1, Lsn(100), 0)).settled
"""The key was ``id`` below the LSN 100, and is ``n`` from there on."""


def document(**policy: Any) -> dict[str, Any]:
    found = copy.deepcopy(CONTRACT)
    number = {"type": ["integer", "null"], "x-pg-type": "bigint", "description": "A number."}
    found["properties"] |= {"id": number, "m": number, "n": {**number, "type": "integer"}}
    found["required"] = ["n"]
    found["x-cdc"] |= {"key": ["n"], **policy}
    return found


def event(
    op: str, lsn: int, key: int | None, image: dict[str, Any] | None = None, **more: Any
) -> LandedEvent:
    """An event at ``lsn``, in a window by it: below 50, below 100, or above. Its ``image`` is ``before`` of a
    delete; a number in it is written as PostgreSQL prints it."""
    text = None
    if image is not None:
        text = json.dumps(
            {name: None if each is None else str(each) for name, each in image.items()},
            separators=(",", ":"),
        )
    moved = more.get("moved")
    return LandedEvent(
        epoch=1,
        commit_lsn=lsn,
        ordinal=more.get("ordinal", 0),
        op=op,
        source_ts=START + timedelta(seconds=lsn if lsn < 50 else lsn + 11),
        tx_id=lsn,
        lsn=lsn,
        source_schema="public",
        source_table="notes",
        key=None if key is None else key_text([str(key)]),
        before=text if op == "d" else None,
        after=text if op != "d" else None,
        unchanged=more.get("unchanged"),
        moved_from_key=None if moved is None else key_text([str(moved)]),
        chunk_id=None,
    )


def told(
    folder: Path, keys: KeysOfTable, *landed: LandedEvent, contract: dict[str, Any] | None = None
) -> Story:
    """A home in which ``landed`` has landed, with ``keys`` on record."""
    story = Story(folder)
    story.write_contract(document() if contract is None else contract)
    LandedKeys(story.store.folder).update(lambda _: {"public.notes": keys})
    story.workspace = open_workspace(folder)
    if story.contract.encrypted_subject is not None:
        home = story.workspace.home
        landing = EncryptedLanding(SOURCE, SubjectKeys(home.path / FILE), lambda: [story.contract])
        store = LandingStore(home.landing, SOURCE, as_landed=landing, divisions_as_landed=landing.divisions)
        story.store = store
    land(story, landed)
    return story


def land(story: Story, landed: Sequence[LandedEvent]) -> None:
    ends, times = Lsn(landed[-1].commit_lsn), [each.source_ts for each in landed]
    start = Lsn(landed[0].commit_lsn)
    story._seal(list(landed), StreamSpan(story._end, ends, start, ends, ends.value, min(times), max(times)))


def erased(story: Story, spark: SparkSession, key: int = 11) -> dict[str, Any]:
    """Erase the row ``n`` = ``key`` until its certificate is whole, and return that."""
    paths = set()
    for _ in range(2):
        _, certificate = erase_row(
            story.workspace, story.contract, key_text([str(key)]), erased_by="ana", why="request 7"
        )
        paths.add(certificate.path)
        run(story, spark, WINDOWS)
    _, certificate = erase_row(
        story.workspace, story.contract, key_text([str(key)]), erased_by="ana", why="request 7"
    )
    assert paths == {certificate.path}, "the same row has the same certificate"
    found: dict[str, Any] = json.loads(certificate.path.read_text())
    return found


def readable(story: Story, text: str) -> set[str]:
    """The places above landing and raw of which a file has ``text``; every byte of the home is looked at."""
    home = story.workspace.home.path
    found = (path.relative_to(home) for path in everything(home) if text.encode() in content_of(path))
    return {
        str(Path(*each.parts[:3])) for each in found if not {"landing", "raw_cdc_staging"} & {*each.parts}
    }


def remains(certificate: dict[str, Any]) -> set[str]:
    return {each["what"] for each in certificate["remains"]}


PRESENT = (
    # The table was read by its new key; then the row was deleted.
    event("c", 100, 11, {"n": 11, "id": 2, "title": PERSON}),
    event("c", 101, 12, {"n": 12, "id": 3, "title": OTHER}),
    event("d", 110, 11),
)

STORIES: dict[str, tuple[KeysOfTable, tuple[LandedEvent, ...]]] = {
    # The column of the new key was added, and filled by the server, just before the key changed.
    "images from before the column was there": (
        BY_N,
        (
            event("c", 1, 2, {"id": 2, "title": PERSON}),
            event("c", 2, 3, {"id": 3, "title": OTHER}),
            event("d", 60, 2, {"id": 2, "body": PERSON}),
            *PRESENT,
        ),
    ),
    "a delete that has its former key alone beside an image": (
        BY_N,
        (
            event("c", 1, 2, {"id": 2, "n": 11, "title": PERSON}),
            event("c", 2, 3, {"id": 3, "n": 12, "title": OTHER}),
            event("d", 60, 2, {"id": 2, "title": PERSON}),
            *PRESENT,
        ),
    ),
    "a column that got the former key of a living row later": (
        BY_N,
        (
            event("c", 1, 2, {"id": 2, "title": PERSON}),
            event("c", 2, 9, {"id": 9, "title": OTHER}),
            event("c", 100, 11, {"n": 11, "id": 2, "title": PERSON}),
            event("c", 101, 12, {"n": 12, "id": 9, "title": OTHER}),
            event("u", 105, 11, {"n": 11, "id": 9, "title": PERSON}),
            event("d", 110, 11),
        ),
    ),
    # The former key changed together with the column that is the key now.
    "a chain of former keys": (
        BY_N,
        (
            event("c", 1, 7, {"id": 7, "n": 5, "title": PERSON}),
            event("c", 2, 3, {"id": 3, "n": 12, "title": OTHER}),
            event("d", 60, 7),
            event("c", 60, 2, {"id": 2, "n": 11, "body": PERSON}, ordinal=1, moved=7),
            *PRESENT,
        ),
    ),
    "two former keys, each known by the next": (
        BY_ID.begin(KeyEra(("m",), 1, Lsn(50), 0)).begin(KeyEra(("n",), 1, Lsn(100), 0)).settled,
        (
            event("c", 1, 2, {"id": 2, "title": PERSON}),
            event("c", 2, 3, {"id": 3, "title": OTHER}),
            event("c", 50, 22, {"m": 22, "id": 2, "title": PERSON}),
            event("c", 51, 33, {"m": 33, "id": 3, "title": OTHER}),
            event("c", 100, 11, {"n": 11, "m": 22, "title": PERSON}),
            event("c", 101, 12, {"n": 12, "m": 33, "title": OTHER}),
            event("d", 110, 11),
        ),
    ),
}


@pytest.mark.parametrize(
    ("keys", "landed"),
    [
        pytest.param(*told_by, id=name, marks=[pytest.mark.slow] * (number > 0))
        for number, (name, told_by) in enumerate(STORIES.items())
    ],
)
def test_what_landed_by_a_former_key_goes_with_the_row(
    tmp_path: Path, spark: SparkSession, keys: KeysOfTable, landed: Sequence[LandedEvent]
) -> None:
    story = told(tmp_path / "told", keys, *landed)
    run(story, spark, WINDOWS)
    before = readable(story, OTHER)
    assert readable(story, PERSON) == before
    certificate = erased(story, spark)
    assert certificate["state"] == "incomplete", "landing and raw have the values"
    assert readable(story, PERSON) == set()
    assert readable(story, OTHER) == before, "a row that lives loses nothing"
    assert UNLINKED not in remains(certificate)


@pytest.mark.slow
def test_it_stays_gone_by_a_rebuild_and_when_an_event_comes_late(tmp_path: Path, spark: SparkSession) -> None:
    keys, landed = STORIES["images from before the column was there"]
    story = told(tmp_path / "told", keys, *landed)
    run(story, spark, WINDOWS)
    erased(story, spark)
    late, end = event("u", 62, 2, {"id": 2, "title": f"late {PERSON}"}), Lsn(story._end.value + 1)
    story._seal([late], StreamSpan(story._end, end, end, end, 1, START, START))
    run(story, spark, WINDOWS)
    assert readable(story, PERSON) == set() and readable(story, OTHER)
    for table in [*queried(story), story.workspace.raw(SOURCE)]:
        shutil.rmtree(table.folder)
    run(story, spark, WINDOWS)
    assert readable(story, PERSON) == set() and readable(story, OTHER)


def renamed(story: Story) -> None:
    """Record that ``n`` was called ``number`` below the LSN 50."""
    columns = tuple(
        SeenColumn(at, name, "bigint", False, None, None, ()) for at, name in ((1, "id"), (2, "n"))
    )
    SchemaChanges(story.store.folder).seen(
        Look(1, Lsn(45), Lsn(50)),
        {"notes": SeenTable(16384, "notes", columns, ("id",), None)},
        {"notes": [Difference("column_renamed", "n", "number", "n")]},
    )


@pytest.mark.slow
def test_a_row_is_found_by_the_former_name_of_a_column_of_its_key(
    tmp_path: Path, spark: SparkSession
) -> None:
    landed = (
        event("c", 1, 2, {"id": 2, "number": 11, "title": PERSON}),
        event("c", 2, 3, {"id": 3, "number": 12, "title": OTHER}),
        event("d", 20, 2, {"id": 2, "number": 11, "title": PERSON}),
        # By now the row is read without its former key.
        event("c", 100, 11, {"n": 11, "title": PERSON}),
        event("d", 110, 11),
    )
    # With a policy the lake's own images have no column that the contract does not name.
    kept = document(pii={"body": {"policy": "mask", "mask": "text", "note": "A test."}})
    story = told(tmp_path / "told", BY_N, *landed, contract=kept)
    renamed(story)
    run(story, spark, WINDOWS)
    certificate = erased(story, spark)
    assert (readable(story, PERSON), certificate["state"]) == (set(), "incomplete")
    assert readable(story, OTHER) and UNLINKED not in remains(certificate)


@pytest.mark.slow
def test_a_row_is_found_by_what_landed_encrypted(tmp_path: Path, spark: SparkSession) -> None:
    """The column was personal before it became the key."""
    note = {"policy": "keep", "note": "A test."}
    encrypted = {"at_rest": {"pii": "encrypted", "subject": "person", "subject_column": "m"}}
    contract = document(key=["id"], pii={"n": note, "title": note}, **encrypted)
    properties = contract["properties"]
    contract["properties"] |= {"id": properties["n"], "n": properties["m"]}
    contract["required"] = ["id"]
    landed = (
        event("c", 1, 2, {"id": 2, "n": 11, "m": 1, "title": PERSON}),
        event("c", 2, 3, {"id": 3, "n": 12, "m": 2, "title": OTHER}),
        event("d", 20, 2, {"id": 2, "m": 1}),
    )
    story = told(tmp_path / "told", BY_ID, *landed, contract=contract)
    assert not any(b"Ada" in content_of(path) for path in everything(story.workspace.home.path))
    LandedKeys(story.store.folder).update(lambda _: {"public.notes": BY_N})
    story.write_contract(document(pii={"title": note}, **encrypted))
    story.workspace = open_workspace(tmp_path / "told")
    landed = (
        event("c", 100, 11, {"n": 11, "m": 1, "title": PERSON}),
        event("c", 101, 12, {"n": 12, "m": 2, "title": OTHER}),
        event("d", 110, 11),
    )
    land(story, landed)
    run(story, spark, WINDOWS)
    certificate = erased(story, spark)
    assert readable(story, PERSON) == set() and readable(story, OTHER)
    assert UNLINKED not in remains(certificate)


@pytest.mark.slow
def test_what_no_event_links_is_named(tmp_path: Path, spark: SparkSession) -> None:
    landed = (
        event("c", 1, 2, {"id": 2, "title": PERSON}),
        event("d", 20, 2, {"id": 2, "title": PERSON}),
        event("u", 90, None, {"id": 2, "title": PERSON}),
        event("c", 100, 11, {"n": 11, "title": PERSON}),
        event("d", 110, 11),
    )
    story = told(tmp_path / "told", BY_N, *landed)
    run(story, spark, WINDOWS)
    certificate = erased(story, spark)
    [entry] = [each for each in certificate["remains"] if each["what"] == UNLINKED]
    places = {each.split("/")[0] for each in entry["where"]}
    assert places == {"landing", "lake"} and readable(story, PERSON)
    # Of what landed without a key nobody can say whose it is either.
    assert "events in quarantine whose key could not be read" in remains(certificate)
    assert len(ErasureLedger.open(story.workspace, SOURCE).erasures) == 1


OF_PERSON = {"subject": "person", "subject_column": "m"}
FORMER, MIXED = (
    "images by a former key of its rows",
    "images by a former key that rows of other subjects had too",
)

UNNAMED = (
    # Whose a row is, a column says that was added with the new key.
    event("c", 1, 2, {"id": 2, "title": PERSON}),
    event("c", 2, 3, {"id": 3, "title": OTHER}),
    event("d", 20, 2, {"id": 2, "title": PERSON}),
)
NAMED = (
    event("c", 100, 11, {"n": 11, "id": 2, "m": 1, "title": PERSON}),
    event("c", 101, 12, {"n": 12, "id": 3, "m": 2, "title": OTHER}),
)


def of_person(pii: str, *personal: str) -> dict[str, Any]:
    policies = {each: {"policy": "keep", "note": "A test."} for each in ("title", *personal)}
    return document(pii=policies, at_rest={"pii": pii, **OF_PERSON})


def subject_erased(story: Story, spark: SparkSession) -> dict[str, Any]:
    """Erase the subject of the row ``n`` = 11 until its certificate is whole, and return that."""
    key = key_text(["11"])
    for _ in range(2):
        done = erase_subject(story.workspace, story.contract, key, erased_by="ana", why="request 7")
        assert done.certificate is not None
        run(story, spark, WINDOWS)
    done = erase_subject(story.workspace, story.contract, key, erased_by="ana", why="request 7")
    assert done.certificate is not None
    found: dict[str, Any] = json.loads(done.certificate.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("personal", [(), ("id",)], ids=["readable", "its former key is personal"])
@pytest.mark.parametrize("pii", ["plain", "encrypted"])
def test_a_subject_loses_what_landed_by_a_former_key_and_does_not_name_it(
    tmp_path: Path, spark: SparkSession, pii: str, personal: tuple[str, ...]
) -> None:
    story = told(tmp_path / "told", BY_N, *UNNAMED, *NAMED, contract=of_person(pii, *personal))
    run(story, spark, WINDOWS)
    before = readable(story, OTHER)
    assert look_up_subject(story.workspace, story.contract, key_text(["11"])).cells
    certificate = subject_erased(story, spark)
    assert (readable(story, PERSON), readable(story, OTHER)) == (set(), before)
    assert certificate["state"] == "incomplete" and FORMER in remains(certificate)
    assert MIXED not in remains(certificate) and len(certificate["former_keys_sha256"]) == 1


@pytest.mark.slow
def test_a_former_key_that_another_subject_had_too_is_left_and_named(
    tmp_path: Path, spark: SparkSession
) -> None:
    others = event("c", 3, 2, {"id": 2, "m": 2, "title": OTHER}, ordinal=2)
    story = told(tmp_path / "told", BY_N, *UNNAMED[:2], others, *NAMED, contract=of_person("plain"))
    run(story, spark, WINDOWS)
    certificate = subject_erased(story, spark)
    assert readable(story, PERSON) == {"lake/desk/deduped_events"}, "nobody can say whose that is"
    assert MIXED in remains(certificate) and FORMER not in remains(certificate)
    assert certificate["state"] == "incomplete"
