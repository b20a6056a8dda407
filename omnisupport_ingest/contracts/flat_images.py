"""Reading row images as Arrow columns, without a Python object per row.

A landed image is a flat JSON object of texts and nulls, written compactly. One compiled pass proves this and
reads the columns (``compiled_images.c``). What it does not take for ordinary, names with escapes above all, a
regular expression proves and DuckDB reads. Any other image (another program's formatting, a repeated name,
half of a surrogate pair, a number) is left to the exact reader (``images.read_image``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.compiled import CompiledImages, buffer_of, compiled_images, texts_of
from omnisupport_ingest.contracts.plain_texts import integer_keys

# Escapes that all readers decode alike: not NUL, and nothing that may be half of a surrogate pair.
_ESCAPE = r'\\["\\/bfnrt]|\\u00(?:0[1-9a-fA-F]|[1-9a-fA-F][0-9a-fA-F])'
_TEXT = rf'"(?:[^"\\\x00-\x1f]|{_ESCAPE})*"'
MEMBER_VALUE = rf"(?:null|{_TEXT})"
"""Regular expression for the value of a member of a flat image: null, or a text."""

_MEMBER = rf"{_TEXT}:{MEMBER_VALUE}"
_COMPACT = rf"\A\{{(?:{_MEMBER}(?:,{_MEMBER})*)?\}}\z"
_KEY = rf"\A\[{_TEXT}(?:,{_TEXT})*\]\z"

_QUERIES = 1_000
"""Queries that a process caches: one or two for each table."""

_READ = """
SELECT {columns} FROM (SELECT json_extract_string(image, {paths}) AS texts FROM images)
"""
_READ_SENT = """
SELECT {columns}, members
FROM (SELECT json_exists(image, {paths}) AS sent, len(json_keys(image)) AS members FROM images)
"""
_READ_NAMES = """
SELECT len(list_distinct(names)) = len(names) AS distinct_names
FROM (SELECT json_keys(image) AS names FROM images)
"""

_READ_KEYS = """
SELECT {columns}, parts
FROM (SELECT json_extract_string(image, {paths}) AS texts, json_array_length(image) AS parts FROM images)
"""


@dataclass(frozen=True)
class FlatImages:
    """Columns read from the images of one table.

    ``proven``: whether the image is a flat object of texts and nulls, so that ``texts`` and ``sent`` equal
    the result of the exact reader; for other images they mean nothing. ``texts``: by column, null for NULL
    and for values that were not sent. ``sent``: by column, whether the image has it. ``others``: whether it
    has a column that was not read.
    """

    proven: pa.BooleanArray
    texts: dict[str, pa.StringArray]
    sent: dict[str, pa.BooleanArray]
    others: pa.BooleanArray


def are_flat(images: pa.StringArray) -> pa.BooleanArray:
    """Return whether each image is a flat object of texts and nulls, written compactly; False for null."""
    return pc.fill_null(pc.match_substring_regex(images, _COMPACT), False)


def read_flat(images: pa.StringArray, columns: Sequence[str], *, seen: Sequence[str] = ()) -> FlatImages:
    """Read ``columns``, one or more, of ``images``. A null image is not proven.

    ``seen``: further columns of which only is read whether they were sent.
    """
    if compiled_images is None:
        return _read_by_queries(images, columns, (*columns, *seen))
    found = _read_in_one_pass(compiled_images, images, columns, (*columns, *seen))
    left = pc.and_not(images.is_valid(), found.proven)
    if not left.true_count:
        return found
    # Names that are written with an escape, or an image that is not flat.
    rest = _read_by_queries(images.filter(left), columns, (*columns, *seen))

    def whole(read: pa.Array, others: pa.Array) -> pa.Array:
        return pc.replace_with_mask(read, left, others)

    return FlatImages(
        whole(found.proven, rest.proven),
        {name: whole(found.texts[name], rest.texts[name]) for name in found.texts},
        {name: whole(found.sent[name], rest.sent[name]) for name in found.sent},
        whole(found.others, rest.others),
    )


def _read_in_one_pass(
    compiled: CompiledImages, images: pa.StringArray, columns: Sequence[str], looked_for: Sequence[str]
) -> FlatImages:
    """Read images whose names have no escapes. The others are not proven."""
    count, names = len(images), [json.dumps(each, ensure_ascii=False)[1:-1].encode() for each in looked_for]
    valid, offsets, content = images.buffers()
    if not count or content is None:
        content = b""
    proven, texts, sent, others = compiled.read(
        content,
        np.frombuffer(offsets, np.int32, count + 1, 4 * images.offset) if count else np.zeros(1, np.int32),
        valid,
        images.offset,
        (b"".join(names), np.cumsum([0, *map(len, names)]).astype(np.int32)),
        len(columns),
    )
    flags = [np.frombuffer(buffer_of(each), np.bool_) for each in (proven, sent, others)]
    return FlatImages(
        pa.array(flags[0]),
        {name: texts_of(each, count, is_utf8=True) for name, each in zip(columns, texts, strict=True)},
        dict(zip(looked_for, map(pa.array, flags[1].reshape(len(looked_for), count)), strict=True)),
        pa.array(flags[2]),
    )


def _read_by_queries(images: pa.StringArray, columns: Sequence[str], looked_for: Sequence[str]) -> FlatImages:
    """Read images by regular expressions and DuckDB, whatever their names are."""
    flat = are_flat(images)
    sent, distinct, others = _sent(pc.if_else(flat, images, "{}"), looked_for)
    proven = pc.and_(flat, distinct)
    read = images if proven.true_count == len(images) else pc.if_else(proven, images, "{}")
    found = query_images(_reading(tuple(columns)), read)
    texts = {name: found.column(f"text_{place}") for place, name in enumerate(columns)}
    return FlatImages(proven, texts, sent, others)


def _sent(
    images: pa.StringArray, columns: Sequence[str]
) -> tuple[dict[str, pa.BooleanArray], pa.BooleanArray, pa.BooleanArray]:
    """Return which of ``columns`` each image has, whether its names are distinct, and whether it has a
    further member."""
    found = query_images(_reading_sent(tuple(columns)), images)
    sent = {name: found.column(f"sent_{place}") for place, name in enumerate(columns)}
    known = np.zeros(len(images), np.uint64)
    for each in sent.values():
        known += each.to_numpy(zero_copy_only=False)
    distinct = pc.equal(found.column("members"), pa.array(known))
    # Some have a member that is no column, or a repeated name.
    doubtful = pc.invert(distinct)
    if doubtful.true_count:
        names = query_images(_READ_NAMES, images.filter(doubtful))
        distinct = pc.replace_with_mask(distinct, doubtful, names.column("distinct_names"))
    return sent, distinct, doubtful


def read_keys(
    keys: pa.StringArray, columns: Sequence[str]
) -> tuple[pa.BooleanArray, dict[str, pa.StringArray]]:
    """Return whether each key is proven to be a JSON array of one text per column, and these texts."""
    if len(columns) == 1 and pc.all(whole := integer_keys(keys).plain).as_py() and not whole.null_count:
        return whole, {columns[0]: pc.utf8_slice_codeunits(keys, 2, -2)}
    proven = pc.fill_null(pc.match_substring_regex(keys, _KEY), False)
    query = _READ_KEYS.format(
        paths=[f"/{place}" for place in range(len(columns))],
        columns=", ".join(f"texts[{place + 1}] AS text_{place}" for place in range(len(columns))),
    )
    found = query_images(query, pc.if_else(proven, keys, "[]"))
    whole = pc.and_(proven, pc.equal(found.column("parts"), len(columns)))
    return whole, {name: found.column(f"text_{place}") for place, name in enumerate(columns)}


@lru_cache(_QUERIES)
def _reading(columns: tuple[str, ...]) -> str:
    return _READ.format(
        paths=pointers(columns),
        columns=", ".join(f"texts[{place + 1}] AS text_{place}" for place in range(len(columns))),
    )


@lru_cache(_QUERIES)
def _reading_sent(columns: tuple[str, ...]) -> str:
    return _READ_SENT.format(
        paths=pointers(columns),
        columns=", ".join(f"sent[{place + 1}] AS sent_{place}" for place in range(len(columns))),
    )


def pointers(columns: tuple[str, ...]) -> str:
    """Return the JSON pointers (RFC 6901) of ``columns``, as a list of DuckDB."""
    escaped = (name.replace("~", "~0").replace("/", "~1") for name in columns)
    return "[" + ", ".join(_quoted(f"/{name}") for name in escaped) + "]"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def query_images(query: str, images: pa.StringArray) -> pa.RecordBatch:
    """Run ``query`` over the relation ``images`` with the column ``image``; return its rows in order."""
    asked = _connection().from_arrow(pa.table({"image": images})).query("images", query)
    assert asked is not None, "a SELECT has a result"
    found = asked.to_arrow_table().combine_chunks()
    return found.to_batches()[0] if found.num_rows else pa.RecordBatch.from_pylist([], schema=found.schema)


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    """Return the connection of this process, in memory. Processes that judge have one thread."""
    return duckdb.connect(config={"threads": 1})
