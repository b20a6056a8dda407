"""Row images as Arrow columns, without a Python object per row.

A landed image is a flat JSON object of texts and nulls, written compactly. One expression proves that of many
images at once, and DuckDB takes their columns apart. Whatever is not proven is for the exact reader
(``images.read_image``): another program's spelling, a name that stands twice, half of a surrogate pair, a
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Escapes that every reader takes alike: not NUL, and nothing that may be half of a surrogate pair.
_ESCAPE = r'\\["\\/bfnrt]|\\u00(?:0[1-9a-fA-F]|[1-9a-fA-F][0-9a-fA-F])'
_TEXT = rf'"(?:[^"\\\x00-\x1f]|{_ESCAPE})*"'
_MEMBER = rf"{_TEXT}:(?:null|{_TEXT})"
_COMPACT = rf"\A\{{(?:{_MEMBER}(?:,{_MEMBER})*)?\}}\z"
_KEY = rf"\A\[{_TEXT}(?:,{_TEXT})*\]\z"

_READ = """
SELECT {columns}, members
FROM (SELECT json_extract_string(image, {paths}) AS texts, json_exists(image, {paths}) AS sent,
             len(json_keys(image)) AS members
      FROM images)
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
    """The columns of the images of one table.

    ``proven``: whether the image is a flat object of texts and nulls, so that ``texts`` and ``sent`` are what
    the exact reader gives; of another image they mean nothing. ``texts``: by column, null for NULL and for
    what was not sent. ``sent``: by column, whether the image has it.
    """

    proven: pa.BooleanArray
    texts: dict[str, pa.StringArray]
    sent: dict[str, pa.BooleanArray]


def read_flat(images: pa.StringArray, columns: Sequence[str]) -> FlatImages:
    """Read ``columns``, one or more, of ``images``. A null image is not proven."""
    proven = pc.fill_null(pc.match_substring_regex(images, _COMPACT), False)
    found = _query(_reading(tuple(columns)), pc.if_else(proven, images, "{}"))
    texts = [found.column(f"text_{place}") for place in range(len(columns))]
    sent = [found.column(f"sent_{place}") for place in range(len(columns))]
    known = np.zeros(len(images), np.uint64)
    for each in sent:
        known += each.to_numpy(zero_copy_only=False)
    # There is a member that is no column, or a name stands twice.
    doubtful = pc.and_(proven, pc.not_equal(found.column("members"), pa.array(known)))
    if doubtful.true_count:
        names = _query(_READ_NAMES, images.filter(doubtful))
        proven = pc.replace_with_mask(proven, doubtful, names.column("distinct_names"))
    return FlatImages(proven, dict(zip(columns, texts, strict=True)), dict(zip(columns, sent, strict=True)))


def read_keys(
    keys: pa.StringArray, columns: Sequence[str]
) -> tuple[pa.BooleanArray, dict[str, pa.StringArray]]:
    """Whether each key is proven to be a JSON array of a text for each of ``columns``, and these texts."""
    proven = pc.fill_null(pc.match_substring_regex(keys, _KEY), False)
    query = _READ_KEYS.format(
        paths=[f"/{place}" for place in range(len(columns))],
        columns=", ".join(f"texts[{place + 1}] AS text_{place}" for place in range(len(columns))),
    )
    found = _query(query, pc.if_else(proven, keys, "[]"))
    whole = pc.and_(proven, pc.equal(found.column("parts"), len(columns)))
    return whole, {name: found.column(f"text_{place}") for place, name in enumerate(columns)}


@cache
def _reading(columns: tuple[str, ...]) -> str:
    """The query that reads ``columns``, by JSON pointers (RFC 6901)."""
    escaped = (name.replace("~", "~0").replace("/", "~1").replace("'", "''") for name in columns)
    return _READ.format(
        paths="[" + ", ".join(f"'/{name}'" for name in escaped) + "]",
        columns=", ".join(
            f"texts[{place}] AS text_{place - 1}, sent[{place}] AS sent_{place - 1}"
            for place in range(1, len(columns) + 1)
        ),
    )


def _query(query: str, images: pa.StringArray) -> pa.RecordBatch:
    asked = _connection().from_arrow(pa.table({"image": images})).query("images", query)
    assert asked is not None, "a SELECT has a result"
    found = asked.to_arrow_table().combine_chunks()
    return found.to_batches()[0] if found.num_rows else pa.RecordBatch.from_pylist([], schema=found.schema)


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    """One for each process, in memory. The processes that judge have one thread."""
    return duckdb.connect(config={"threads": 1})
