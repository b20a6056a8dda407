"""Every type of the server's catalogue, alone and in arrays: the same text by snapshot and by stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from psycopg2 import errors

from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

DIGITS = "1" + "0123456789" * 99 + "9"
"""A number of 992 digits."""

SAMPLES: dict[str, tuple[str, ...]] = {
    "bool": ("true", "false"),
    "bytea": (r"\x", r"\x00ff5c27", r"\xdeadbeef"),
    "char": ("x", r"\377"),
    "name": ("pg_class", 'odd "name"'),
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "int2": ("-32768", "32767"),
    "int4": ("-2147483648", "2147483647"),
    "int2vector": ("1 2 3", ""),
    "oidvector": ("1 2 3", ""),
    "text": ("", "NULL", "null", "\\N", "a\tb\nc\\d\r", "„naïve“ 日本 🦉", '{"a", b}'),
    "oid": ("0", "4294967295"),
    "tid": ("(0,1)", "(4294967295,65535)"),
    "xid": ("3", "4294967295"),
    "xid8": ("3", "18446744073709551615"),
    "cid": ("0", "4294967295"),
    "json": ('{"b": 1, "a": 2, "a": 3}', "null", ' [1.0,  "\\u00e9"] ', '"\\ud83e\\udd89"'),
    "jsonb": ('{"b": 1, "a": 2, "a": 3}', "null", '[1.0, 1e400, "é"]'),
    "jsonpath": ("$.a[*] ? (@.b > 1)", "strict $"),
    "xml": ('<a b="c">d &amp; e</a>', '<?xml version="1.0"?><a/>', "text only"),
    "point": ("(1.5,-2)", "(NaN,Infinity)", "(1e-300,-0)"),
    "lseg": ("[(0,0),(1,1)]",),
    "path": ("((0,0),(1,1),(2,0))", "[(0,0),(1,1)]"),
    "box": ("(1,1),(0,0)",),
    "polygon": ("((0,0),(1,1),(2,0))",),
    "line": ("{1,-1,0}",),
    "circle": ("<(0,0),5.5>",),
    "float4": ("NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1"),
    "float8": ("NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1"),
    "money": ("$0.00", "-92233720368547758.08", "92233720368547758.07"),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "inet": ("192.0.2.1", "192.0.2.1/24", "2001:db8::1/64"),
    "cidr": ("192.0.2.0/24", "2001:db8::/32"),
    "aclitem": ("postgres=r/postgres",),
    "bpchar": ("padded  ", ""),
    "varchar": ("", "any"),
    "date": ("4713-01-01 BC", "0001-12-31 BC", "5874897-12-31", "infinity", "-infinity", "2024-02-29"),
    "time": ("00:00:00", "24:00:00", "23:59:59.999999"),
    "timestamp": ("4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999", "infinity", "-infinity"),
    "timestamptz": ("4713-01-02 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "infinity", "-infinity"),
    "interval": ("-178000000 years", "1 mon -2 days +00:00:00.000001", "00:00:00", "-1 days +24:00:01"),
    "timetz": ("00:00:00+15:59", "24:00:00-15:59:59", "12:00:00.5+00"),
    "bit": ("1", "0"),
    "varbit": ("", "10110"),
    "numeric": ("NaN", "Infinity", "-Infinity", "0.00", f"{DIGITS}.{DIGITS}", "-1e-1000", "1e1000"),
    "refcursor": ("cursor 1",),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    "pg_lsn": ("0/0", "FFFFFFFF/FFFFFFFF"),
    "txid_snapshot": ("10:20:10,14,15", "1:1:"),
    "pg_snapshot": ("10:20:10,14,15", "1:1:"),
    "tsvector": ("'a':1A 'b''c':2,3B", ""),
    "gtsvector": (),
    "tsquery": ("'a' & ( 'b':*AB | !'c' )", ""),
    "int4range": ("empty", "[1,2)", "(,5)", "(,)"),
    "int8range": ("empty", "[1,9223372036854775807)"),
    "numrange": ("empty", "[1.50,2.5]", "(,)"),
    "tsrange": ("empty", '["2024-01-01 00:00:00","infinity"]'),
    "tstzrange": ("empty", '["2024-01-01 00:00:00+00",)'),
    "daterange": ("empty", "[2024-01-01,infinity)"),
    "int4multirange": ("{}", "{[1,2),[5,7)}"),
    "int8multirange": ("{}", "{(,1),[5,)}"),
    "nummultirange": ("{}", "{[1.5,2.5],(3,)}"),
    "tsmultirange": ("{}", '{["2024-01-01 00:00:00","2024-01-02 00:00:00")}'),
    "tstzmultirange": ("{}", '{["2024-01-01 00:00:00+00","2024-01-02 00:00:00+00")}'),
    "datemultirange": ("{}", "{[2024-01-01,2024-02-01)}"),
    **dict.fromkeys(("regproc", "regprocedure", "regclass", "regtype", "regrole"), ("-",)),
    **dict.fromkeys(("regoper", "regoperator"), ("0",)),
    **dict.fromkeys(("regcollation", "regnamespace", "regconfig", "regdictionary", "regdatabase"), ("-",)),
}
"""Values of each type; the first ones are those that go wrong elsewhere."""

NO_VALUES = {
    "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary",
    "pg_brin_minmax_multi_summary", "gtsvector",
}  # fmt: skip
"""Types of the server's own that take no value from anybody."""

OWN = (
    "CREATE TYPE mood AS ENUM ('fine', 'so, so', 'it''s \"bad\"')",
    "CREATE DOMAIN small AS numeric(5,2) CHECK (VALUE < 100)",
    "CREATE TYPE pair AS (a int, b text, c numeric)",
    "CREATE TYPE floats AS RANGE (subtype = float8)",
)
OWN_SAMPLES: dict[str, tuple[str, ...]] = {
    "mood": ("fine", "so, so", 'it\'s "bad"'),
    "small": ("99.99", "-0.10"),
    "pair": ('(1,"a, ""b""",NaN)', "(,,)", '(2,"",1.50)'),
    "floats": ("empty", "[-Infinity,0.1)"),
    "floats_multirange": ("{}",),
    "numeric(30,10)": ("1.5", "-12345678901234567890.0123456789"),
    "bit(5)": ("10101",),
    "char(5)": ("a",),
    "timestamp(3)": ("2024-01-01 00:00:00.123",),
    "interval day to second": ("1 day 02:03:04.5",),
}


@pytest.fixture
def typed(source: SourceUnderTest) -> SourceUnderTest:
    source.sql(*OWN)
    return source


def types_of(source: SourceUnderTest) -> list[str]:
    """Every type of the catalogue that a column may have, but arrays and the server's own row types.

    Only what is the ``typarray`` of another type is an array of it: int2vector and oidvector are of the
    category of arrays too, but are types with a text form of their own.
    """
    rows = source.query(
        "SELECT typname FROM pg_type AS t WHERE typnamespace = 'pg_catalog'::regnamespace"
        " AND typtype IN ('b', 'r', 'm', 'd', 'e')"
        " AND NOT EXISTS (SELECT FROM pg_type AS element WHERE element.typarray = t.oid) ORDER BY 1"
    )
    return [name for (name,) in rows]


def reads_xml(source: SourceUnderTest) -> bool:
    """Whether the server was built with libxml; the embedded one is not."""
    try:
        return bool(source.query("SELECT '<a/>'::xml IS DOCUMENT"))
    except errors.FeatureNotSupported:
        return False


def without_values(source: SourceUnderTest) -> set[str]:
    """The types that no column of this server can have a value of."""
    return NO_VALUES if reads_xml(source) else NO_VALUES | {"xml"}


def columns_of(source: SourceUnderTest) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, type and values of each column: every type, and an array of it."""
    without = without_values(source)
    samples = {f'pg_catalog."{name}"': SAMPLES[name] for name in types_of(source) if name not in without}
    for number, (pg_type, values) in enumerate((samples | OWN_SAMPLES).items()):
        yield f"t{number}", pg_type, values
        # Of all types, a box alone is separated by another sign (pg_type.typdelim).
        sign = ";" if pg_type == 'pg_catalog."box"' else ","
        plain = "{" + sign.join([*map(_quoted, values), "NULL"]) + "}"
        yield (
            f"a{number}",
            f"{pg_type}[]",
            (plain, f"[2:{len(values) + 2}]={plain}", f"{{{plain}{sign}{plain}}}", "{}"),
        )


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_every_type_of_the_catalogue_has_values_here_or_takes_none(typed: SourceUnderTest) -> None:
    assert [name for name in types_of(typed) if name not in SAMPLES and name not in NO_VALUES] == []


def test_values_of_every_type_that_the_server_knows_are_used(typed: SourceUnderTest) -> None:
    known = typed.query("SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace")
    assert {name for (name,) in known} & SAMPLES.keys() <= set(types_of(typed))


def test_type_without_values_here_takes_none(typed: SourceUnderTest) -> None:
    """What is left out of the comparison has nothing to compare, on this server.

    A type that only dislikes a text says that the text is wrong (22P02, mostly); one that takes none says
    that there is no such feature, whatever the text.
    """
    left_out = without_values(typed) & set(types_of(typed))
    texts = ("", "1", "{}", "<a/>", *(text for name in left_out for text in SAMPLES.get(name, ())))
    assert {"pg_node_tree", "pg_mcv_list"} <= left_out
    with typed.connected() as connection, connection.cursor() as cursor:
        for name, text in itertools.product(sorted(left_out), texts):
            with pytest.raises(errors.FeatureNotSupported):
                cursor.execute(f'SELECT %s::pg_catalog."{name}"', (text,))


def test_every_type_reads_the_same_by_snapshot_by_stream_and_by_the_server(typed: SourceUnderTest) -> None:
    source, columns = typed, list(columns_of(typed))
    listed = ", ".join(f"{name} {pg_type}" for name, pg_type, _ in columns)
    source.sql(f"CREATE TABLE every_type (id int PRIMARY KEY, {listed})")
    source.tables.append(contract("every_type", ["id", *(name for name, _, _ in columns)]))
    most = max(len(values) for _, _, values in columns)

    def insert(first: int) -> None:
        with source.connected() as connection, connection.cursor() as cursor:
            for row in range(most):
                values = [values[row] if row < len(values) else None for _, _, values in columns]
                marks = ", ".join(f"%s::{pg_type}" for _, pg_type, _ in columns)
                cursor.execute(f"INSERT INTO every_type VALUES (%s, {marks})", (first + row, *values))

    insert(0)
    source.catch_up()
    insert(1000)
    source.catch_up()
    names = [name for name, _, _ in columns]
    with source.connected() as connection, connection.cursor() as cursor:
        # By the types' output functions: a cast to text differs for some. And a row of NULLs is no NULL.
        texts = (f"CASE WHEN num_nulls({name}) = 0 THEN format('%s', {name}) END" for name in names)
        cursor.execute(f"SELECT id, {', '.join(texts)} FROM every_type")
        told = {row[0]: dict(zip(names, row[1:], strict=True)) for row in cursor.fetchall()}
    found = {}
    for event in source.events("r", "c"):
        after = json.loads(event.after or "{}")
        found[int(after.pop("id"))] = after
    assert found.keys() == told.keys() and len(told) == 2 * most
    wrong = [
        (id, pg_type, found[id][name], told[id][name])
        for id in told
        for name, pg_type, _ in columns
        if found[id][name] != told[id][name]
    ]
    assert wrong == []
    assert all(found[row] == found[1000 + row] for row in range(most))
