"""Changes whose images are made divided, so that a part can be encrypted, land as those made whole do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings

from omnisupport_ingest.compiled import compiled_rows
from omnisupport_ingest.contracts.model import Column, Subject, TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.landing.rows import DIVIDED_SCHEMA
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest.sources.postgres.protocol.change_block import ChangeBlock
from omnisupport_ingest.sources.postgres.protocol.changes import ChangeCollector
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.sources.postgres.protocol.test_change_block import (
    AGENTS,
    COMMENTS,
    KEYS,
    NOON,
    STREAMS,
    TABLES,
    TICKETS,
    Step,
    encoded,
    is_partitioned,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import contract

COMPILED = pytest.mark.skipif(compiled_rows is None, reason="installed without a C compiler")


def encrypted(table: str, key: Sequence[str], personal: Sequence[str], subject: str) -> TableContract:
    columns = tuple(Column(name, "text") for name in dict.fromkeys((*key, subject)))
    columns += tuple(Column(name, "text", personal=True) for name in personal)
    return replace(contract(table, (), key), columns=columns, subject=Subject("asker", subject))


CONTRACTS = (
    encrypted("comments", ("ticket", "no"), ["body"], "ticket"),
    # A column that it does not name, and a subject that an image may not say.
    encrypted("agents", ("handle",), ["skills"], "team"),
    replace(encrypted("tickets", ("id",), ["größe"], "id"), key=()),
    contract("parts", ["id", "v"]),
)


@pytest.fixture(scope="module")
def encrypting(tmp_path_factory: pytest.TempPathFactory) -> EncryptedLanding:
    keys = SubjectKeys(Path(tmp_path_factory.mktemp("home")) / "keys" / "subjects.sqlite")
    return EncryptedLanding("desk", keys, lambda: CONTRACTS)


def block_of(steps: Sequence[Step]) -> ChangeBlock:
    collector = ChangeCollector(3, KEYS, is_partitioned)
    for table in TABLES:
        collector.describe(table)
    collector.begin(Begin(1000, NOON, 700))
    for step in steps:
        if step.message is not None:
            collector.add_row(step.message)
        elif step.truncated:
            collector.add_truncate([(each.schema, each.table) for each in step.truncated], 7)
    return collector.take()


@given(STREAMS)
@settings(max_examples=examples(60), deadline=None)
def test_divided_images_land_as_whole_ones_do(encrypting: EncryptedLanding, steps: list[Step]) -> None:
    if block_of(steps).rows:
        whole = encrypting(block_of(steps).table())
        assert encrypting(block_of(steps).table(encrypting.divisions)).equals(whole)


@COMPILED
def test_usual_changes_come_divided_and_nothing_hidden_is_in_the_readable_part(
    encrypting: EncryptedLanding,
) -> None:
    ada = 'ada.l "\\\n'
    steps = [
        Step(encoded(b"I", COMMENTS, (b"N", ["1", "7", ada]))),
        Step(encoded(b"U", AGENTS, (b"O", ["h", ada, None]), (b"N", ["h", None, ada]))),
        Step(encoded(b"I", TICKETS, (b"N", ["1", ada, None]))),
    ]
    events = block_of(steps).table(encrypting.divisions)
    assert events.schema.equals(DIVIDED_SCHEMA)
    assert json.loads(events["after_hidden"][0].as_py()) == {"body": ada}
    assert events["after_subject"].to_pylist() == ["7", None, "1"]
    assert events["before_subject"].to_pylist() == [None, json.dumps(ada)[1:-1], None]
    assert [json.loads(each) for each in events["after"].to_pylist()] == [
        {"no": "1", "ticket": "7"},
        {"handle": "h", "team": None},
        {"id": "1"},
    ]
    landed = encrypting(events)
    assert landed.schema.names == DIVIDED_SCHEMA.names[:-4]
    assert "ada.l" not in repr(landed.select(["after"]).to_pydict())


@COMPILED
def test_the_contracts_are_looked_at_once_for_a_block_of_many_tables(tmp_path: Path) -> None:
    looks: list[int] = []

    def contracts() -> tuple[TableContract, ...]:
        looks.append(1)
        return CONTRACTS

    landing = EncryptedLanding("desk", SubjectKeys(tmp_path / "keys" / "subjects.sqlite"), contracts)
    steps = [
        Step(encoded(b"I", COMMENTS, (b"N", ["1", "7", "x"]))),
        Step(encoded(b"I", AGENTS, (b"N", ["h", "x", "y"]))),
        Step(encoded(b"I", TICKETS, (b"N", ["1", "x", None]))),
    ]
    assert block_of(steps).table(landing.divisions).schema.equals(DIVIDED_SCHEMA)
    assert len(looks) == 1


@COMPILED
def test_an_image_of_which_nothing_is_readable_lands_encrypted_alone(encrypting: EncryptedLanding) -> None:
    steps = [Step(encoded(b"I", COMMENTS, (b"N", ["1", "7", "x"])))]
    events = block_of(steps).table(encrypting.divisions)
    bare = events.set_column(events.schema.get_field_index("after"), "after", pa.array(["{}"]))
    assert [*json.loads(encrypting(bare)["after"][0].as_py())] == ["encrypted:1"]
