"""The hand-made histories: each a situation that captures are known to tell differently.

A script is statements of one session, each a transaction of its own unless it stands between ``BEGIN`` and
``COMMIT``. Keys are from 1 to 99 here; those of random workloads lie above.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONG = "(SELECT string_agg(md5(i::text), '') FROM generate_series({0}, {0} + 150) i)"
"""Text of 4,832 characters that does not stay in the row."""


@dataclass(frozen=True, slots=True)
class Script:
    """``name``: what happens, as a difference reports it."""

    name: str
    statements: tuple[str, ...]


def _long(seed: int) -> str:
    return _LONG.format(seed)


SCRIPTS = (
    Script(
        "insert, update, delete, insert again",
        (
            "INSERT INTO by_int VALUES (1, 'one', 12.50, '2026-03-04 05:06:07.123456+02', true)",
            "UPDATE by_int SET name = 'uno', flag = NULL WHERE id = 1",
            "DELETE FROM by_int WHERE id = 1",
            "INSERT INTO by_int VALUES (1, 'again', NULL, NULL, false)",
            "UPDATE by_int SET name = name WHERE id = 1",
        ),
    ),
    Script(
        "several changes of one row in one transaction",
        (
            "BEGIN",
            "INSERT INTO by_int VALUES (2, 'a', 1, '2026-01-01+00', NULL)",
            "UPDATE by_int SET name = 'b' WHERE id = 2",
            "UPDATE by_int SET amount = -0.01 WHERE id = 2",
            "DELETE FROM by_int WHERE id = 2",
            "INSERT INTO by_int VALUES (2, 'c', 9999999999.99, '2026-01-02+00', true)",
            "INSERT INTO by_pair VALUES ('north', 1, 'beside', 1.5)",
            "COMMIT",
        ),
    ),
    Script(
        "a key changes",
        (
            "INSERT INTO by_int VALUES (3, 'three', 3, NULL, true)",
            "UPDATE by_int SET id = 4 WHERE id = 3",
            "UPDATE by_int SET id = 3, name = 'back' WHERE id = 4",
            "INSERT INTO by_pair VALUES ('south', 1, 'one', 0.001)",
            "UPDATE by_pair SET number = 2 WHERE area = 'south'",
            "UPDATE by_pair SET area = 'west', number = 3, label = 'moved' WHERE area = 'south'",
            "INSERT INTO by_bigint_full VALUES (3, 3, 1.5, 2.25, 3.14159, 'full')",
            "UPDATE by_bigint_full SET id = 4 WHERE id = 3",
            "INSERT INTO by_index VALUES (3, 'three', 3)",
            "UPDATE by_index SET id = 4 WHERE id = 3",
            "DELETE FROM by_index WHERE id = 4",
        ),
    ),
    Script(
        "two rows swap their keys in one transaction",
        (
            "INSERT INTO by_int VALUES (5, 'five', 5, NULL, true), (6, 'six', 6, NULL, false)",
            "BEGIN",
            "UPDATE by_int SET id = -5 WHERE id = 5",
            "UPDATE by_int SET id = 5 WHERE id = 6",
            "UPDATE by_int SET id = 6 WHERE id = -5",
            "COMMIT",
            f"INSERT INTO long_text VALUES (5, {_long(5)}, NULL, NULL, 'five')",
            f"INSERT INTO long_text VALUES (6, {_long(6)}, NULL, NULL, 'six')",
            "BEGIN",
            "UPDATE long_text SET id = -5 WHERE id = 5",
            "UPDATE long_text SET id = 5 WHERE id = 6",
            "UPDATE long_text SET id = 6 WHERE id = -5",
            "COMMIT",
        ),
    ),
    Script(
        "long values are not sent again",
        (
            f"INSERT INTO long_text VALUES (1, {_long(1)}, convert_to({_long(2)}, 'UTF8'),"
            f" ARRAY[{_long(3)}, 'x'], 'short')",
            "UPDATE long_text SET short = 'changed' WHERE id = 1",
            "UPDATE long_text SET long = long || 'x' WHERE id = 1",
            "UPDATE long_text SET bytes = NULL, short = NULL WHERE id = 1",
            "UPDATE long_text SET id = 2 WHERE id = 1",
            "DELETE FROM long_text WHERE id = 2",
            f"INSERT INTO long_text_full VALUES (1, {_long(1)}, 'short')",
            "UPDATE long_text_full SET short = 'changed' WHERE id = 1",
            "UPDATE long_text_full SET id = 2 WHERE id = 1",
            "UPDATE long_text_full SET long = 'short now' WHERE id = 2",
            "DELETE FROM long_text_full WHERE id = 2",
            f"INSERT INTO long_text_full VALUES (3, {_long(3)}, 'stays')",
            "UPDATE long_text_full SET short = 'stays changed' WHERE id = 3",
        ),
    ),
    Script(
        "a key too long to be sent again",
        (
            "ALTER TABLE by_text ALTER id SET STORAGE EXTERNAL",
            "INSERT INTO by_text (id, day) SELECT string_agg(md5(i::text), ''), '2026-01-01'"
            " FROM generate_series(1, 75) i",
            "UPDATE by_text SET day = '2026-01-02' WHERE length(id) > 2000",
            "DELETE FROM by_text WHERE length(id) > 2000",
            "ALTER TABLE by_text ALTER id SET STORAGE EXTENDED",
        ),
    ),
    Script(
        "a table is emptied",
        (
            "INSERT INTO emptied SELECT i, 'row ' || i FROM generate_series(1, 3) i",
            "TRUNCATE emptied",
            "BEGIN",
            "INSERT INTO emptied VALUES (4, 'before')",
            "TRUNCATE emptied, without_key",
            "INSERT INTO emptied VALUES (4, 'after')",
            "COMMIT",
        ),
    ),
    Script(
        "savepoints and rollbacks",
        (
            "BEGIN",
            "INSERT INTO by_int VALUES (7, 'kept', NULL, NULL, NULL)",
            "SAVEPOINT a",
            "INSERT INTO by_int VALUES (8, 'rolled back', NULL, NULL, NULL)",
            "UPDATE by_int SET name = 'rolled back' WHERE id = 7",
            "ROLLBACK TO a",
            "INSERT INTO by_int VALUES (9, 'kept too', NULL, NULL, NULL)",
            "SAVEPOINT b",
            "UPDATE by_int SET name = 'released' WHERE id = 9",
            "RELEASE b",
            "COMMIT",
            "BEGIN",
            "INSERT INTO by_int VALUES (10, 'never', NULL, NULL, NULL)",
            "ROLLBACK",
        ),
    ),
    Script(
        "transactions without a change",
        (
            "BEGIN",
            "SELECT txid_current()",
            "COMMIT",
            "BEGIN",
            "SAVEPOINT a",
            "INSERT INTO by_int VALUES (11, 'never', NULL, NULL, NULL)",
            "ROLLBACK TO a",
            "COMMIT",
            "UPDATE by_int SET name = 'nobody' WHERE id = -1",
        ),
    ),
    Script(
        "logical messages",
        (
            "SELECT pg_logical_emit_message(true, 'app.outbox', '{\"a\": 1}')",
            "SELECT pg_logical_emit_message(false, 'app.audit', 'outside')",
            "BEGIN",
            "INSERT INTO by_int VALUES (12, 'with a message', NULL, NULL, NULL)",
            "SELECT pg_logical_emit_message(true, 'app.outbox', convert_to('bytes ' || chr(233), 'UTF8'))",
            "SELECT pg_logical_emit_message(false, 'app.audit', 'outside, from inside')",
            "UPDATE by_int SET name = 'after it' WHERE id = 12",
            "COMMIT",
            "BEGIN",
            "SELECT pg_logical_emit_message(true, 'app.outbox', 'rolled back')",
            "SELECT pg_logical_emit_message(false, 'app.audit', 'of a rolled back transaction')",
            "ROLLBACK",
            "SELECT pg_logical_emit_message(true, '', '')",
        ),
    ),
    Script(
        "columns come and go",
        (
            "INSERT INTO evolving VALUES (1, 'one')",
            "ALTER TABLE evolving ADD COLUMN extra text DEFAULT 'x'",
            "UPDATE evolving SET label = 'uno' WHERE id = 1",
            "INSERT INTO evolving VALUES (2, 'two', 'y'), (3, 'three', NULL)",
            "BEGIN",
            "ALTER TABLE evolving ADD COLUMN number int",
            "UPDATE evolving SET number = 5 WHERE id = 2",
            "COMMIT",
            "ALTER TABLE evolving DROP COLUMN extra",
            "UPDATE evolving SET label = 'dos' WHERE id = 2",
            "DELETE FROM evolving WHERE id = 1",
            "BEGIN",
            "UPDATE evolving SET label = 'before' WHERE id = 3",
            "ALTER TABLE evolving DROP COLUMN number",
            "UPDATE evolving SET label = 'after' WHERE id = 3",
            "COMMIT",
        ),
    ),
    Script(
        "numbers at their edges",
        (
            "INSERT INTO by_bigint_full VALUES (9223372036854775807, 32767, 'Infinity', 'NaN', 'NaN', '')",
            "INSERT INTO by_bigint_full VALUES (-9223372036854775808, -32768, 'NaN', '-Infinity', 'Infinity', 'é')",
            "INSERT INTO by_bigint_full VALUES (20, 0, 1e-30, 5e-324, -0.000000000000000001, 'tiny')",
            "INSERT INTO by_bigint_full VALUES (21, 1, 3.4028235e38, 1.7976931348623157e308, 1e30, 'huge')",
            "INSERT INTO by_bigint_full VALUES (22, 1, 16777217, 0.1, 1.10, 'trailing zero')",
            "UPDATE by_bigint_full SET rate = '-Infinity', note = NULL WHERE id = 20",
            "DELETE FROM by_bigint_full WHERE id = 9223372036854775807",
            "INSERT INTO by_int VALUES (20, 'most', 9999999999.99, NULL, NULL),"
            " (21, 'least', -9999999999.99, NULL, NULL), (22, 'zero', 0, NULL, NULL), (23, '128', 1.28, NULL, NULL),"
            " (24, '-128', -1.28, NULL, NULL), (25, '-129', -1.29, NULL, NULL)",
        ),
    ),
    Script(
        "times at their edges",
        (
            "INSERT INTO by_text VALUES ('plain', '2026-02-28', '13:14:15.123456', '2026-02-28 13:14:15.123456',"
            " '2026-02-28 13:14:15.123', '2026-02-28 13:14:15.1+02', '1 year 2 mons 3 days 04:05:06.789', 'ok', 'ab')",
            "INSERT INTO by_text VALUES ('infinite', 'infinity', '00:00', 'infinity', 'infinity', 'infinity',"
            " '0', 'sad', '')",
            "INSERT INTO by_text VALUES ('infinite before', '-infinity', '24:00', '-infinity', '-infinity',"
            " '-infinity', '-1 mons +2 days -03:00:00', 'happy', 'abcdef')",
            "INSERT INTO by_text VALUES ('long ago', '0044-03-15 BC', NULL, '0001-01-01 00:00:00 BC',"
            " '0001-12-31 23:59:59.999 BC', '0001-01-01 00:00:00+00', '-1 day', NULL, NULL)",
            "INSERT INTO by_text (id, zoned) VALUES ('zoned long ago', '0044-03-15 12:00:00+00 BC'),"
            " ('the year before 1', '0001-12-31 23:59:59.5+00 BC')",
            "INSERT INTO by_text VALUES ('late', '9999-12-31', '23:59:59.999999', '9999-12-31 23:59:59.999999',"
            " '9999-12-31 23:59:59.999', '9999-12-31 23:59:59.999999+00', '10 years', NULL, NULL)",
            "INSERT INTO by_text (id, day, local, zoned) VALUES ('before 1970', '1969-12-31',"
            " '1969-12-31 23:59:59.999999', '1582-10-04 00:00:00.000001+00')",
            "INSERT INTO by_text (id, zoned) VALUES ('far', '12026-01-01 00:00:00+00')",
            "INSERT INTO by_text (id, span) VALUES ('cut off', '19:00:18.015626'), ('cut off below 0', '-00:15:36.918882')",
            "UPDATE by_text SET span = NULL, state = 'sad' WHERE id = 'plain'",
        ),
    ),
    Script(
        "documents, bytes and lists",
        (
            "INSERT INTO by_uuid VALUES ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{\"z\": 1,  \"a\":2}',"
            ' \'{"z": 1,  "a":2}\', \'\\xdeadbeef00ff\', \'{a,"b c",NULL,"q\\"uote",""}\', \'{1,2,NULL}\', \'{-1}\')',
            "INSERT INTO by_uuid VALUES ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 'null', '[]', '\\x', '{}', '{}',"
            " '{9223372036854775807}')",
            "INSERT INTO by_uuid (id, docb, tags) VALUES ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a13',"
            " '\"Ana \\u00d1and\\u00fa\"', '{\"__debezium_unavailable_value\"}')",
            "INSERT INTO by_uuid (id, counts, tags) VALUES ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a14',"
            " '{{1,2},{3,4}}', '{{a,b}}')",
            "UPDATE by_uuid SET id = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a15', counts = NULL"
            " WHERE id = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12'",
            # What these two have become is not known in Debezium's files any more.
            "DELETE FROM by_uuid WHERE id = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a13'",
            "DELETE FROM by_uuid WHERE id = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a14'",
        ),
    ),
    Script(
        "texts that look like something else",
        (
            "INSERT INTO by_int (id, name) VALUES (30, ''), (31, 'null'), (32, E'line\\nend\\ttab \\\\ \"q\"'),"
            " (33, '😀 Ñandú'), (34, '{}'), (35, E'\\u0001')",
            "INSERT INTO by_int (id, name) VALUES (36, '__debezium_unavailable_value')",
            "DELETE FROM by_int WHERE id = 36",
        ),
    ),
    Script(
        "columns with defaults, and not null",
        (
            "INSERT INTO with_defaults (id, day, required, number) VALUES (1, '2026-01-01', 'r', 1)",
            "INSERT INTO with_defaults VALUES (2, NULL, NULL, '2026-01-01', 'r', 1)",
            "UPDATE with_defaults SET label = NULL WHERE id = 1",
            "DELETE FROM with_defaults WHERE id = 1",
            "UPDATE with_defaults SET id = 3 WHERE id = 2",
        ),
    ),
    Script(
        "a generated column",
        (
            "INSERT INTO with_generated (id, amount) VALUES (1, 21), (2, NULL)",
            "UPDATE with_generated SET amount = 22 WHERE id = 1",
            "DELETE FROM with_generated WHERE id = 2",
        ),
    ),
    Script(
        "a table without a key",
        (
            "INSERT INTO without_key VALUES (1, 'a'), (1, 'a'), (NULL, NULL)",
            "UPDATE without_key SET label = 'z' WHERE number = 1",
            "DELETE FROM without_key",
            "INSERT INTO without_key VALUES (2, 'stays')",
        ),
    ),
    Script(
        "the replica identity is another index than the key",
        (
            "INSERT INTO by_other_index VALUES (1, 'a', 'one'), (2, 'b', 'two')",
            "UPDATE by_other_index SET label = 'uno' WHERE id = 1",
            "UPDATE by_other_index SET code = 'c' WHERE id = 1",
            "UPDATE by_other_index SET id = 3 WHERE id = 2",
            "DELETE FROM by_other_index WHERE id = 3",
        ),
    ),
    Script(
        "rows move between partitions",
        (
            "INSERT INTO parts VALUES (1, 5, 'low'), (2, 15, 'high')",
            "UPDATE parts SET label = 'still low' WHERE id = 1",
            "UPDATE parts SET region = 12 WHERE id = 1",
            "UPDATE parts SET region = 13 WHERE id = 1",
            "DELETE FROM parts WHERE id = 2",
        ),
    ),
    Script(
        "names that must be quoted",
        (
            "INSERT INTO \"Quoted Name\" VALUES (1, 'keyword', 'case')",
            'UPDATE "Quoted Name" SET "select" = NULL',
            'UPDATE "Quoted Name" SET "Id" = 2',
        ),
    ),
    Script(
        "many rows in one statement",
        (
            "INSERT INTO by_pair SELECT 'bulk', i, 'row ' || i, i / 1000.0 FROM generate_series(1, 300) i",
            "UPDATE by_pair SET label = NULL WHERE area = 'bulk' AND number <= 40",
            "UPDATE by_pair SET number = number + 1000 WHERE area = 'bulk' AND number > 290",
            "DELETE FROM by_pair WHERE area = 'bulk' AND number BETWEEN 100 AND 250",
        ),
    ),
)
