"""Reading row images as Arrow columns, without a Python object per row.

A landed image is a flat JSON object of texts and nulls, written compactly. One regular expression proves this
for many images at once, and DuckDB extracts their columns. Any other image (another program's formatting, a
repeated name, half of a surrogate pair, a number) is left to the exact reader (``images.read_image``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Escapes that all readers decode alike: not NUL, and nothing that may be half of a surrogate pair.
_ESCAPE = r'\\["\\/bfnrt]|\\u00(?:0[1-9a-fA-F]|[1-9a-fA-F][0-9a-fA-F])'
_TEXT = rf'"(?:[^"\\\x00-\x1f]|{_ESCAPE})*"'
_PLAIN_TEXT = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
MEMBER_VALUE = rf"(?:null|{_TEXT})"
"""Regular expression for the value of a member of a flat image: null, or a text."""

_MEMBER = rf"{_TEXT}:{MEMBER_VALUE}"
_COMPACT = rf"\A\{{(?:{_MEMBER}(?:,{_MEMBER})*)?\}}\z"
_KEY = rf"\A\[{_TEXT}(?:,{_TEXT})*\]\z"

_QUERIES = 1_000
"""Queries that a process caches: one or two for each table."""

_WORD = re.compile("[A-Za-z0-9_]+")
_FIRST = 64
_SAMPLE = 16
"""Images among the first ones whose most frequent list of names is tried next."""

_TRIES = 4
"""Lists of names that are tried."""

_FEW_ALIKE = 8
"""If a list of names fits fewer than this fraction (1/n) of the images, no other is tried."""

_MOST_NAMES = 200
"""With more names the regular expression would be slow."""

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


Mask = npt.NDArray[np.bool_]


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
    looked_for = (*columns, *seen)
    known, sent, more, unusual, rest = _by_usual_names(images, looked_for)
    proven = pa.array(known)
    if len(unusual):
        flat = are_flat(rest)
        in_rest, distinct, doubtful = _sent(pc.if_else(flat, rest, "{}"), looked_for)
        for name in looked_for:
            sent[name][unusual] = in_rest[name].to_numpy(zero_copy_only=False)
        more[unusual] = doubtful.to_numpy(zero_copy_only=False)
        known[unusual] = pc.and_(flat, distinct).to_numpy(zero_copy_only=False)
        proven = pa.array(known)
    read = images if proven.true_count == len(images) else pc.if_else(proven, images, "{}")
    found = query_images(_reading(tuple(columns)), read)
    texts = {name: found.column(f"text_{place}") for place, name in enumerate(columns)}
    return FlatImages(proven, texts, {name: pa.array(each) for name, each in sent.items()}, pa.array(more))


def _by_usual_names(
    images: pa.StringArray, columns: Sequence[str]
) -> tuple[Mask, dict[str, Mask], Mask, npt.NDArray[np.int64], pa.StringArray]:
    """Prove images that have the same names in the same order by one regular expression for all of them.

    Most images of a table have all its columns, and nearly always the same few are not sent. So some lists of
    names are tried, each on the images that the earlier ones left. Returns which images are proven, by column
    which of these have it, which have another column, and the numbers and images of the others.
    """
    proven, more = np.zeros(len(images), np.bool_), np.zeros(len(images), np.bool_)
    sent = {name: np.zeros(len(images), np.bool_) for name in columns}
    left, others = np.arange(len(images)), images
    for _ in range(_TRIES):
        names = _names_of_most(others)
        if not names:
            break
        alike = pc.fill_null(pc.match_substring_regex(others, _object_of(names)), False)
        chosen = alike.to_numpy(zero_copy_only=False)
        here = left[chosen]
        proven[here] = True
        for name in set(columns).intersection(names):
            sent[name][here] = True
        more[here] = not set(columns).issuperset(names)
        few = len(here) < len(left) // _FEW_ALIKE
        left = left[~chosen]
        others = others.filter(pc.invert(alike))
        if few:
            break
    return proven, sent, more, left, others


def _names_of_most(images: pa.StringArray) -> tuple[str, ...]:
    """Return the most frequent list of names among the first images; empty unless all are distinct words."""
    some = images.slice(0, _FIRST)
    proven = some.filter(pc.fill_null(pc.match_substring_regex(some, _COMPACT), False))
    forms = Counter(
        tuple(name for name, _ in json.loads(image, object_pairs_hook=list))
        for image in proven.slice(0, _SAMPLE).to_pylist()
    )
    [(names, _)] = forms.most_common(1) or [((), 0)]
    plain = len(names) <= _MOST_NAMES and all(_WORD.fullmatch(name) for name in names)
    return names if plain and len(set(names)) == len(names) else ()


@lru_cache(_QUERIES)
def _object_of(names: tuple[str, ...]) -> str:
    """Return the regular expression of flat objects that have ``names`` in that order."""
    members = ",".join(f'"{name}":(?:null|{_PLAIN_TEXT})' for name in names)
    return rf"\A\{{{members}\}}\z"


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
