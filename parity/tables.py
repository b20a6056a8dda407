"""The tables of the comparison: a shape each, of types, keys, replica identities."""

from __future__ import annotations

SCHEMA = "parity"

DDL = f"""
CREATE SCHEMA {SCHEMA};
SET search_path = {SCHEMA};
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');

CREATE TABLE by_int (
    id int PRIMARY KEY, name text, amount numeric(12,2), seen timestamptz, flag boolean
);

CREATE TABLE by_bigint_full (
    id bigint PRIMARY KEY, small smallint, ratio real, value double precision, rate numeric, note varchar(40)
);
ALTER TABLE by_bigint_full REPLICA IDENTITY FULL;

CREATE TABLE by_uuid (
    id uuid PRIMARY KEY, doc json, docb jsonb, raw bytea, tags text[], counts int[], wide bigint[]
);

CREATE TABLE by_text (
    id text PRIMARY KEY, day date, at_time time, local timestamp, local_ms timestamp(3), zoned timestamptz,
    span interval, state mood, padded char(6)
);

CREATE TABLE by_pair (
    area text, number int, label text, amount numeric(6,3), PRIMARY KEY (area, number)
);

CREATE TABLE by_index (
    id int NOT NULL, label text, amount numeric(8,2)
);
CREATE UNIQUE INDEX by_index_id ON by_index (id);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_id;

CREATE TABLE by_other_index (
    id int PRIMARY KEY, code text NOT NULL, label text
);
CREATE UNIQUE INDEX by_other_index_code ON by_other_index (code);
ALTER TABLE by_other_index REPLICA IDENTITY USING INDEX by_other_index_code;

CREATE TABLE long_text (
    id int PRIMARY KEY, long text, bytes bytea, list text[], short text
);
ALTER TABLE long_text ALTER long SET STORAGE EXTERNAL, ALTER bytes SET STORAGE EXTERNAL,
    ALTER list SET STORAGE EXTERNAL;

CREATE TABLE long_text_full (
    id int PRIMARY KEY, long text, short text
);
ALTER TABLE long_text_full ALTER long SET STORAGE EXTERNAL;
ALTER TABLE long_text_full REPLICA IDENTITY FULL;

CREATE TABLE with_defaults (
    id int PRIMARY KEY, label text DEFAULT 'none', amount int DEFAULT 7, day date NOT NULL,
    required text NOT NULL, number int NOT NULL
);

CREATE TABLE with_generated (
    id int PRIMARY KEY, amount int, twice int GENERATED ALWAYS AS (amount * 2) STORED
);

CREATE TABLE without_key (
    number int, label text
);
ALTER TABLE without_key REPLICA IDENTITY FULL;

CREATE TABLE evolving (
    id int PRIMARY KEY, label text
);

CREATE TABLE emptied (
    id int PRIMARY KEY, label text
);

CREATE TABLE "Quoted Name" (
    "Id" int PRIMARY KEY, "select" text, "Mixed" text
);

CREATE TABLE parts (
    id int, region int, label text, PRIMARY KEY (id, region)
) PARTITION BY RANGE (region);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10);
CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (10) TO (20);
"""

PUBLISHED = (
    "by_int",
    "by_bigint_full",
    "by_uuid",
    "by_text",
    "by_pair",
    "by_index",
    "by_other_index",
    "long_text",
    "long_text_full",
    "with_defaults",
    "with_generated",
    "without_key",
    "evolving",
    "emptied",
    "Quoted Name",
    "parts",
)
"""The tables that both publications name. A table's partitions come under its own name."""

WITHOUT_KEY = "without_key"
"""The table that no contract can be made for."""

PAST_COLUMNS: dict[str, dict[str, tuple[str, str | None]]] = {
    "evolving": {"extra": ("text", "x"), "number": ("integer", None)},
}
"""Columns that come and go: table → column → type and default."""
