"""What the source writes while capture is measured: one table, five mixed, and shapes that cost the most.

A shape has tables, contracts of them, and statements that make about so many changes. All rows are made by
the server itself, from numbers alone, so a shape of a size is always the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.source import Source, change_tickets
from omnisupport_ingest.contracts.load import default_contracts_dir

_IN_PROCEDURE = "DO $$\nBEGIN\n    FOR round IN 0 .. {last} LOOP\n{body}\n    END LOOP;\nEND $$"

_TEXT = "'The printer on floor ' || {0} % 30 || ' says \"PC LOAD LETTER\", code ' || md5({0}::text)"


@dataclass(frozen=True)
class Shape:
    """``prepare`` makes the tables; ``change`` makes about so many changes and returns how many.

    ``contracts``: the folder of the contracts, made below the given one. ``share``: of the changes that are
    asked for, as rows differ in size.
    """

    prepare: Callable[[Source], None]
    contracts: Callable[[Path], Path]
    change: Callable[[Source, int], int]
    share: float = 1.0


def _own_tables(names: list[str]) -> Callable[[Path], Path]:
    """Contracts of tables of the schema ``bench`` that say nothing but the key."""

    def made(folder: Path) -> Path:
        data = folder / "contracts" / "data"
        data.mkdir(parents=True)
        for name in names:
            document = {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "title": name,
                "description": "A table of the measurement.",
                "type": "object",
                "required": ["id"],
                "additionalProperties": True,
                "properties": {"id": {"type": "integer", "x-pg-type": "bigint", "description": "The key."}},
                "x-cdc": {
                    "version": "1.0.0",
                    "source": "support_desk",
                    "schema": "bench",
                    "table": name,
                    "owner": "team:bench",
                    "key": ["id"],
                    "events": {"soft_delete_column": None},
                    "lateness": {"allowed": "PT1H", "max": "P7D"},
                },
            }
            (data / f"{name}.json").write_text(json.dumps(document))
        return data

    return made


def _one_table(columns: str, values: str, *, a_round: int = 100, by: str = "1", share: float = 1.0) -> Shape:
    """Inserts into one table, ``a_round`` in a transaction, and an update of 4 in 10 of them in the next."""
    updated = a_round * 4 // 10

    def prepare(source: Source) -> None:
        source.execute(
            "CREATE SCHEMA bench",
            f"CREATE TABLE bench.rows (id bigint PRIMARY KEY, {columns})"
            " WITH (fillfactor = 60, autovacuum_enabled = off)",
        )

    def change(source: Source, changes: int) -> int:
        rounds = max(1, changes // (a_round + updated))
        body = f"""
            INSERT INTO bench.rows SELECT id, {values}
                FROM generate_series(round::bigint * {a_round}, round::bigint * {a_round} + {a_round - 1}) id;
            COMMIT;
            UPDATE bench.rows SET a = a + {by} WHERE id >= round::bigint * {a_round}
                AND id < round::bigint * {a_round} + {updated};
            COMMIT;"""
        _run(source, rounds, body)
        return rounds * (a_round + updated)

    return Shape(prepare, _own_tables(["rows"]), change, share)


def _run(source: Source, rounds: int, body: str) -> None:
    source.execute("SET synchronous_commit = off", _IN_PROCEDURE.format(last=rounds - 1, body=body))


def _mixed_prepare(source: Source) -> None:
    source.execute(
        *(
            f"ALTER TABLE support.{name} SET (fillfactor = 60, autovacuum_enabled = off)"
            for name in ("organizations", "customers", "agents", "tickets", "ticket_comments")
        )
    )


def _mixed_change(source: Source, changes: int) -> int:
    """Rounds of 100 changes in two transactions: 50 inserts, 40 updates, 10 deletes of five tables."""
    rounds = max(1, changes // 100)
    text = _TEXT.format("n")
    body = ""
    for step in range(5):
        # Four tickets, four comments, an organization or an agent, and a customer at each of five steps.
        first = f"round * 20 + {step * 4}"
        body += f"""
        INSERT INTO support.tickets SELECT n, n % 977, md5(n::text)::uuid, 'agent-' || n % 40, 'Room ' || n,
            {text} || {text} || {text}, 'new', 1 + n % 4, 'email',
            jsonb_build_object('browser', 'Firefox ' || n % 120, 'page', '/orders/' || n), NULL, now(), now()
            FROM generate_series({first}, {first} + 3) n;
        INSERT INTO support.ticket_comments SELECT n, 1, 'agent-' || n % 40, {text} || chr(10) || {text},
            true, NULL, now() FROM generate_series({first}, {first} + 3) n;
        INSERT INTO support.customers SELECT md5(n::text)::uuid, n % 977, n || '@example.org', 'Jo ' || n,
            'en', false, 0.01 * (n % 10000), ARRAY['vip', 'eu'], now(), now(), NULL
            FROM generate_series(round * 5 + {step}, round * 5 + {step}) n;"""
        if step % 2:
            body += f"""
        INSERT INTO support.agents SELECT 'agent-' || n, 'Agent ' || n, 'mail', ARRAY['net'], 12.5,
            now()::date, true, now()
            FROM generate_series(round * 2 + {step // 2}, round * 2 + {step // 2}) n;"""
        else:
            body += f"""
        INSERT INTO support.organizations SELECT 1 + n, 'Organization ' || n, 'team',
            jsonb_build_object('theme', 'dark'), 10, now(), now()
            FROM generate_series(round * 3 + {step // 2}, round * 3 + {step // 2}) n;"""
    body += "\n        COMMIT;"
    for step in range(5):
        first = f"round * 20 + {step * 4}"
        body += f"""
        UPDATE support.tickets SET priority = 1, updated_at = now()
            WHERE id BETWEEN {first} AND {first} + 3;
        UPDATE support.customers SET lifetime_value = lifetime_value + 1
            WHERE id = md5((round * 5 + {step})::text)::uuid;
        DELETE FROM support.ticket_comments WHERE ticket_id BETWEEN {first} AND {first} + 1;
        UPDATE support.ticket_comments SET is_public = false
            WHERE ticket_id BETWEEN {first} + 2 AND {first} + 3;"""
    body += """
        UPDATE support.organizations SET seats = seats + 1 WHERE id BETWEEN 1 + round * 3 AND 3 + round * 3;
        UPDATE support.agents SET hourly_cost = 13 WHERE handle = 'agent-' || (round * 2);
        UPDATE support.agents SET hourly_cost = 13 WHERE handle = 'agent-' || (round * 2 + 1);
        COMMIT;"""
    _run(source, rounds, body)
    # 20 + 20 + 5 + 2 + 3 inserts, 20 + 5 + 10 + 3 + 2 updates, 10 deletes.
    return rounds * 100


def _many_tables(count: int) -> Shape:
    """One row in each of ``count`` tables in turn, 20 to a transaction."""
    names = [f"t{number:04d}" for number in range(count)]

    def prepare(source: Source) -> None:
        source.execute("CREATE SCHEMA bench")
        for start in range(0, count, 50):
            made = "; ".join(
                f"CREATE TABLE bench.{name} (id bigint PRIMARY KEY, a bigint, b text)"
                for name in names[start : start + 50]
            )
            source.execute(made)

    def change(source: Source, changes: int) -> int:
        rounds = max(1, changes // count)
        body = ""
        for number, name in enumerate(names):
            body += f"\n        INSERT INTO bench.{name} VALUES (round, {number}, {_TEXT.format('round')});"
            if number % 20 == 19:
                body += "\n        COMMIT;"
        _run(source, rounds, body + "\n        COMMIT;")
        return rounds * count

    return Shape(prepare, _own_tables(names), change)


_WIDE = ", ".join(f"{_TEXT.format('id')} || repeat(md5(id::text || '{number}'), 38)" for number in range(4))
_COLUMNS = 299

SHAPES: dict[str, Shape] = {
    "tickets": Shape(lambda _: None, lambda _: default_contracts_dir(), change_tickets),
    "mixed": Shape(_mixed_prepare, lambda _: default_contracts_dir(), _mixed_change),
    "narrow": _one_table("a bigint, b text", "id % 977, 'x' || id % 1000"),
    "wide": _one_table(
        "a bigint, b text, c text, d text, e text", f"id % 977, {_WIDE}", a_round=20, share=0.24
    ),
    "columns": _one_table(
        "a bigint, " + ", ".join(f"c{number} text" for number in range(1, _COLUMNS)),
        "id % 977, " + ", ".join(f"'v' || id % {number + 1}" for number in range(1, _COLUMNS)),
        a_round=20,
        share=0.12,
    ),
    "tables": _many_tables(1000),
    "single": _one_table("a bigint, b text", "id % 977, 'x' || id % 1000", a_round=1, share=0.5),
}
"""``tickets``: one table. ``mixed``: five, inserts, updates and deletes. ``narrow``: rows of 60 bytes.
``wide``: of 5 kB. ``columns``: of 300 columns. ``tables``: 1,000 in turn. ``single``: one row to a
transaction."""
