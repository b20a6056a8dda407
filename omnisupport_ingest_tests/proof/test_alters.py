"""Tables that ALTERs change: each change is drawn, and what the oracle makes of the words of a contract."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from random import Random
from typing import Any

import psycopg2
import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest_tests.oracle.model import Image
from omnisupport_ingest_tests.oracle.oracle import current_state
from omnisupport_ingest_tests.proof.altered import CHANGES, Altered
from omnisupport_ingest_tests.proof.by_alters import Law
from omnisupport_ingest_tests.proof.tables import ContractShape

LAW = Law(
    ContractShape(
        "t",
        ("n", "v", "m", "b"),
        types=(("n", "integer"), ("v", "text"), ("m", "text"), ("b", "boolean")),
    ),
    required=frozenset(("v",)),
    values={"m": frozenset(("ok",))},
    longest={"v": 5},
    former={"n": (), "v": (), "m": (), "b": ("integer",)},
)


def test_every_change_is_drawn_and_the_events_hold_what_the_server_does(postgres: EmbeddedPostgres) -> None:
    with closing(psycopg2.connect(postgres.dsn())) as connection:

        def run(sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
            with connection.cursor() as cursor:
                cursor.execute(sql, values or None)
                return cursor.fetchall() if cursor.description else []

        drawn: Counter[str] = Counter()
        for seed in range(30):
            table = Altered(f"altered_{seed}", Random(seed), run, with_cursor=seed % 2 == 0)
            table.make()
            table.read()
            for _ in range(4):
                table.write(2)
                drawn[table.alter()] += 1
                table.write(2)
            table.read()
            shape = ContractShape(table.name, tuple(table.columns))
            rows = current_state(table.events, shape).items()
            assert {key: row.values for key, row in rows if not row.ended} == table.rows()
            # The tables were never committed.
            connection.rollback()
        assert set(drawn) == set(CHANGES)


@pytest.mark.parametrize(
    ("image", "broken"),
    [
        ({"n": "7", "v": "one", "m": "ok", "b": "t"}, []),
        ({"n": "5000000000", "v": "one"}, ["n:type"]),
        ({"n": "many"}, ["n:type"]),
        ({"v": None, "n": None, "m": None}, ["v:not_null"]),
        ({"m": "sad"}, ["m:enum"]),
        ({"v": "longer"}, ["v:max_length"]),
        ({"b": "12"}, []),
        ({"b": "maybe"}, ["b:type"]),
        ({"unknown": "anything"}, []),
    ],
)
def test_a_row_is_judged_by_the_words_of_its_contract(image: Image, broken: list[str]) -> None:
    assert LAW.broken(image) == broken
