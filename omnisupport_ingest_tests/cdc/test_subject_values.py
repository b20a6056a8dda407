"""Which images are of an erased subject, and what is left of them, by a rule in plain Python."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.judging import ACCEPTED, QUARANTINED, JudgingRules, judge_batches
from omnisupport_ingest.cdc.subject_values import ErasedSubjects
from omnisupport_ingest.contracts.at_rest import SubjectTable
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.contracts.model import Column, Subject, TableContract
from omnisupport_ingest.contracts.pii_keys import HashKey, HashKeys
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest_tests.examples import examples

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
SCHEMA = (
    arrow_schema(RAW_TYPE, without=())
    .append(pa.field("copy", pa.int64()))
    .append(pa.field("collision", pa.bool_()))
)


def contract(name: str, column: str, *columns: Column) -> TableContract:
    """A table whose rows land plain and are of the person in ``column``."""
    return TableContract(
        name=name,
        version="1.0.0",
        source="desk",
        schema="public",
        table=name,
        title=name,
        description=name,
        owner="team:tests",
        key=("id",),
        columns=(Column("id", "bigint", nullable=False), *columns),
        soft_delete_column=None,
        allowed_lateness=timedelta(hours=1),
        max_lateness=timedelta(days=7),
        path=f"{name}.json",
        fingerprint="0",
        subject=Subject("person", column, encrypted=False),
    )


def personal(name: str, policy: str = "keep") -> Column:
    return Column(name, "text", pii=policy, pii_note="A test.", personal=True)


PEOPLE = contract("people", "id", Column("plan", "text"), personal("email"))
ORDERS = contract("orders", "owner", Column("owner", "text"), Column("amount", "text"), personal("address"))
KEPT = {"people": {"id", "plan"}, "orders": {"id", "owner", "amount"}}
COLUMNS = {"people": ("id", "plan", "email"), "orders": ("id", "owner", "amount", "address")}
SUBJECT = {"people": "id", "orders": "owner"}
PERSONS = ["1", "2", '7"\\', "ä", ""]


def rules(keys: SubjectKeys, *contracts: TableContract) -> JudgingRules:
    tables = {each.table_name: SubjectTable.of(each) for each in contracts}
    return JudgingRules(
        contracts=contracts,
        decisions=load_decision_table(default_decision_table()),
        window_length=timedelta(hours=1),
        subjects=ErasedSubjects("desk", tables, keys.erased()),
    )


def erased(folder: Path, *subjects: tuple[str, str]) -> SubjectKeys:
    keys = SubjectKeys(folder / "keys" / "subjects.sqlite")
    keys.make()
    keys.destroy(keys.ids_of([("desk", *each) for each in subjects]))
    return keys


def landed(number: int, table: str, key: str, **images: str | None) -> dict[str, Any]:
    return {
        "window": "2026-11-01T0900",
        "epoch": 1,
        "commit_lsn": number,
        "ordinal": 0,
        "op": "u",
        "source_ts": NOON,
        "source_schema": "public",
        "source_table": table,
        "key": key_text(key),
        "before": None,
        "after": None,
        "envelope": "as delivered",
        "batch_id": "batch",
        "landed_at": NOON,
        "newest_epoch_before": 1,
        "event_hash": number,
        "copy": 1,
        "collision": False,
        **images,
    }


def judged(rows: list[dict[str, Any]], by: JudgingRules, size: int = 1_000) -> list[dict[str, Any]]:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return [row for batch in judge_batches(table.to_batches(size), by) for row in batch.to_pylist()]


def whose(table: str, key: str, image: str | None) -> tuple[str, str]:
    """Of whom an image is, as a person would work it out; without one, its row."""
    try:
        said = json.loads(image or "{}").get(SUBJECT[table])
    except ValueError:
        said = None
    if said is None and table == "people":
        said = key
    return ("person", said) if said is not None else (f"row of public.{table}", key_text(key))


def left_of(table: str, key: str, image: str | None, gone: set[tuple[str, str]]) -> Any:
    """What is left of an image."""
    if image is None or whose(table, key, image) not in gone:
        return read(image)
    row = read(image)
    if not isinstance(row, dict):
        return None
    return {name: value if name in KEPT[table] else None for name, value in row.items()}


def drawn(rng: Random, number: int) -> dict[str, Any]:
    table = rng.choice(("people", "orders"))
    key = rng.choice(PERSONS)

    def image() -> str | None:
        row = {name: rng.choice([*PERSONS, f"text {number}", None]) for name in COLUMNS[table]} | {"id": key}
        row |= {"unnamed": "x"} if rng.random() < 0.2 else {}
        sent = {name: value for name, value in row.items() if name == "id" or rng.random() < 0.8}
        spaces = None if rng.random() < 0.2 else (",", ":")
        text = json.dumps(sent, ensure_ascii=rng.random() < 0.5, separators=spaces)
        return rng.choice([text] * 6 + [None, "no image"])

    return landed(number, table, key, before=image(), after=image())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, (1 << 32) - 1).map(Random), st.sampled_from((1, 3, 1_000)))
def test_images_of_erased_subjects_lose_their_values_and_all_else_stays(
    tmp_path_factory: pytest.TempPathFactory, rng: Random, size: int
) -> None:
    gone = {("person", each) for each in rng.sample(PERSONS, 2)}
    gone |= {("row of public.orders", key_text(rng.choice(PERSONS)))}
    by = rules(erased(tmp_path_factory.mktemp("home"), *gone), PEOPLE, ORDERS)
    rows = [drawn(rng, number) for number in range(1, 40)]
    whole = judged(rows, replace(by, subjects=ErasedSubjects()), size)
    for row, before, after in zip(rows, whole, judged(rows, by, size), strict=True):
        table, key = row["source_table"], json.loads(row["key"])[0]
        images = {name: row[name] for name in ("before", "after")}
        for name, image in images.items():
            assert read(after[name]) == left_of(table, key, image, gone), (row, name)
        theirs = {whose(table, key, each) for each in images.values() if each is not None}
        theirs_too = not gone.isdisjoint(theirs | {whose(table, key, None)})
        assert after["envelope"] == (None if theirs_too else "as delivered")
        # Judging saw all of it: what it found is what it finds without an erasure.
        kept = ("verdict", "reason", "rules", "late", "key", "op", "unchanged")
        assert [after[name] for name in kept] == [before[name] for name in kept]
        changed = [after[name] for name in images] != [*images.values()]
        due = hash_of(after) if changed and after["verdict"] == ACCEPTED else before["event_hash"]
        assert after["event_hash"] == due


def test_a_subject_is_found_by_what_landed_though_its_column_is_hashed(tmp_path: Path) -> None:
    keys = erased(tmp_path, ("person", "ada"))
    hashed = replace(
        ORDERS,
        columns=tuple(
            replace(each, pii="hash", pii_note="Whose.", personal=True) if each.name == "owner" else each
            for each in ORDERS.columns
        ),
    )
    secrets = Secrets(HashKeys((HashKey("k", b"s" * 32),)))
    images = [
        f'{{"id":"{number}","owner":"{who}","address":"{who} street"}}'
        for number, who in enumerate(("ada", "eve"), start=1)
    ]
    rows = [landed(number, "orders", str(number), after=each) for number, each in enumerate(images, start=1)]
    ada, eve = (
        json.loads(each["after"]) for each in judged(rows, replace(rules(keys, hashed), secrets=secrets))
    )
    assert ada["owner"].startswith("k:") and (ada["address"], eve["address"]) == (None, "eve street")


def test_a_quarantined_event_keeps_the_hash_by_which_reviews_name_it(tmp_path: Path) -> None:
    by = rules(erased(tmp_path, ("person", "1")), PEOPLE)
    # A number that is none breaks the rule of its type.
    image = '{"id":"1","plan":"gold","email":"ada"}'
    typed = replace(PEOPLE, columns=(*PEOPLE.columns[:1], Column("plan", "bigint"), *PEOPLE.columns[2:]))
    (row,) = judged([landed(5, "people", "1", after=image)], replace(by, contracts=(typed,)))
    assert (row["verdict"], row["event_hash"], row["rules"]) == (QUARANTINED, 5, ["plan:type"])
    assert json.loads(row["after"]) == {"id": "1", "plan": "gold", "email": None}


def test_nobody_is_looked_for_where_nobody_was_erased(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    assert keys.erased() is None and not keys.path.exists()
    assert not rules(keys, PEOPLE).subjects
    keys.make()
    assert keys.erased() is None
    keys.destroy(keys.ids_of([("desk", "person", "1")]))
    found = keys.erased()
    assert found is not None
    assert found.among([("desk", "person", "1"), ("desk", "person", "2"), ("shop", "person", "1")]) == [
        True,
        False,
        False,
    ]
    keys.path.unlink()
    with pytest.raises(SubjectKeysUnreadable, match="which subjects are erased"):
        keys.erased()


def read(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def key_text(key: str) -> str:
    return json.dumps([key], ensure_ascii=False, separators=(",", ":"))


def hash_of(row: dict[str, Any]) -> int:
    schema = pa.schema([field for field in SCHEMA if field.name in row])
    only = {name: row[name] for name in schema.names}
    found: int = event_hashes(pa.Table.from_pylist([only], schema=schema))[0].as_py()
    return found


def debezium(op: str, **images: dict[str, Any]) -> str:
    return json.dumps({"op": op, "before": None, "after": None, **images})


ORDER = {"id": 5, "owner": "ada", "address": "ada street"}
LINES = {
    "a delete that landed its key": (debezium("d", before=ORDER), {"op": "d", "before": '{"id":"5"}'}),
    "within a payload": (json.dumps({"payload": json.loads(debezium("u", before=ORDER))}), {}),
    "kept out by a gate": (json.dumps(ORDER), {"identity": '["kept out","files","1","a"]'}),
    "not read as a change": (json.dumps({**ORDER, "op": 7}), {"identity": '["odd","a"]'}),
    "of the former owner": (debezium("u", before=ORDER, after=ORDER | {"owner": "eve"}), {}),
}


@pytest.mark.parametrize(("line", "event"), LINES.values(), ids=LINES.keys())
def test_a_line_goes_if_it_names_an_erased_subject_whatever_the_images_say(
    tmp_path: Path, line: str, event: dict[str, Any]
) -> None:
    rows = [landed(1, "orders", "5", envelope=line, **event)]
    rows += [landed(2, "orders", "5", envelope=line.replace("ada", "eve"), **event)]
    ada, eve = judged(rows, rules(erased(tmp_path, ("person", "ada")), ORDERS), 1)
    assert (ada["envelope"], eve["envelope"]) == (None, line.replace("ada", "eve"))


def test_an_accepted_event_without_its_line_has_no_hash_of_the_line(tmp_path: Path) -> None:
    image = '{"id":"5","owner":"eve","amount":"1","address":"eve street"}'
    identity = '["public","orders","5","0123456789abcdef"]'
    line = debezium("u", before=ORDER)
    rows = [landed(1, "orders", "5", after=image, envelope=line, identity=identity)]
    (row,) = judged(rows, rules(erased(tmp_path, ("person", "ada")), ORDERS))
    assert (row["verdict"], row["envelope"]) == (ACCEPTED, None)
    assert (row["identity"], row["event_hash"]) == ('["public","orders","5"]', 1)


def test_events_of_a_table_of_which_nothing_says_whose_they_are_lose_all(tmp_path: Path) -> None:
    by = rules(erased(tmp_path, ("person", "ada")), PEOPLE)
    by = replace(by, subjects=replace(by.subjects, unnamed=frozenset({("public", "orders")})))
    images = {"before": '{"id":"5","address":"x"}', "after": "no image"}
    (gone, kept) = judged([landed(1, "orders", "5", **images), landed(2, "people", "5", **images)], by)
    assert (gone["before"], gone["after"], gone["envelope"]) == (None, None, None)
    assert (kept["before"], kept["envelope"]) == (images["before"], "as delivered")
