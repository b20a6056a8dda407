"""Protect the personal values in row images (``protecting``), by whole columns where images are alike.

``protect_image`` defines the result: it reads the image, protects or removes each of its columns, and writes
it again as compact JSON. Most images are flat, compact, and have the same names in the same order as many
others. Of those DuckDB extracts the columns, Arrow protects them and joins them again, without a Python
object per row. Both ways write the same bytes, so an event has the same hash whichever way it took.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.flat_images import are_flat, pointers, query_images
from omnisupport_ingest.contracts.protection import Protection
from omnisupport_ingest.json_values import compact

FEW = 64
"""At most so many images with the same names are protected one by one."""

_OTHER_SPELLING = r"\\[u/]"
"""Matches escapes that are spelled differently when the text is written again."""

_ESCAPED = r'["\\\x00-\x1f]'
_QUERIES = 1_000


def protect_image(text: str | None, protection: Protection) -> str | None:
    """Return one image, protected; None if there is none or it cannot be read, because then its values are
    not known."""
    image = read_image(text)
    if image is None:
        return None
    return compact(protection.row(image))


def protect_images(images: pa.StringArray, protection: Protection, *, few: int = FEW) -> pa.StringArray:
    """Return ``protect_image`` of each of ``images``. ``few``: see ``FEW``."""
    done = pa.nulls(len(images), pa.string())
    left = images.is_valid()
    if images.null_count < len(images) - few:
        flat = pc.and_(are_flat(images), pc.invert(pc.match_substring_regex(images, _OTHER_SPELLING)))
        flat = pc.fill_null(flat, False)
        names = query_images(_NAMES, pc.if_else(flat, images, "{}")).column("names").dictionary_encode()
        counts = np.bincount(names.indices.to_numpy()[flat.to_numpy(zero_copy_only=False)])
        for code, count in enumerate(counts):
            usual = json.loads(names.dictionary[code].as_py())
            if count <= few or not usual or len(set(usual)) < len(usual):
                continue
            here = pc.and_(flat, pc.equal(names.indices, code))
            done = pc.replace_with_mask(done, here, _alike(images.filter(here), tuple(usual), protection))
            left = pc.and_(left, pc.invert(here))
    if not left.true_count:
        return done
    return pc.replace_with_mask(done, left, _one_by_one(images.filter(left), protection))


def _one_by_one(images: pa.StringArray, protection: Protection) -> pa.StringArray:
    """Read and write each image by itself; values of one column are protected together."""
    rows = [read_image(text) for text in images.to_pylist()]
    kept = [
        None if row is None else {name: value for name, value in row.items() if name in protection.kept}
        for row in rows
    ]
    for name, protect in protection.columns.items():
        having = [row for row in kept if row is not None and row.get(name) is not None]
        texts = protect(pa.array([row[name] for row in having], pa.string()))
        for row, text in zip(having, texts.to_pylist(), strict=True):
            row[name] = text
    written = (None if row is None else compact(row) for row in kept)
    return pa.array(written, pa.string())


_NAMES = "SELECT json_keys(image)::JSON::VARCHAR AS names FROM images"


def _alike(images: pa.StringArray, names: Sequence[str], protection: Protection) -> pa.StringArray:
    """Protect flat images that all have ``names`` in this order."""
    kept = tuple(name for name in names if name in protection.kept)
    if not kept:
        return pa.array(["{}"] * len(images), pa.string())
    protected = tuple(name for name in kept if name in protection.columns)
    found = query_images(_reading(kept, protected), images)
    parts: list[pa.StringArray | str] = []
    for index, name in enumerate(kept):
        before = ("," if index else "{") + json.dumps(name, ensure_ascii=False) + ":"
        if name in protected:
            texts = protection.columns[name](found.column(f"text_{protected.index(name)}"))
            parts += [before, _as_json(texts)]
        else:
            parts += [before, found.column(f"json_{index}")]
    return pc.binary_join_element_wise(*parts, "}", "")


@lru_cache(_QUERIES)
def _reading(kept: tuple[str, ...], protected: tuple[str, ...]) -> str:
    """Return the query that reads ``kept`` as JSON (``json_<n>``) and ``protected`` as texts
    (``text_<n>``)."""
    columns = [f"fragments[{index + 1}]::VARCHAR AS json_{index}" for index in range(len(kept))]
    columns += [f"texts[{index + 1}] AS text_{index}" for index in range(len(protected))]
    texts = f"json_extract_string(image, {pointers(protected)})" if protected else "[]"
    inner = f"SELECT json_extract(image, {pointers(kept)}) AS fragments, {texts} AS texts FROM images"
    return f"SELECT {', '.join(columns)} FROM ({inner})"


def _as_json(texts: pa.StringArray) -> pa.StringArray:
    """Return each text as a JSON string; null as ``null``."""
    if pc.any(pc.match_substring_regex(texts, _ESCAPED)).as_py():
        encoded = texts.dictionary_encode()
        quoted = [json.dumps(text, ensure_ascii=False) for text in encoded.dictionary.to_pylist()]
        written = pa.array(quoted, pa.string()).take(encoded.indices)
    else:
        written = pc.binary_join_element_wise('"', texts, '"', "")
    return pc.fill_null(written, "null")
