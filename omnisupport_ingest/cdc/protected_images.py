"""Row images with their values protected, by whole columns where that is proven to be the same.

``protect_image`` is the meaning: the image is read, each of its columns is protected or left out, and it is
written again, compactly. Most images are flat, compact, and have the names of many others in the same order;
of those DuckDB takes the columns apart, Arrow protects them, and they are joined again, without a Python
object per row. Both write the same bytes, so an event has one hash whichever it took.
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

FEW = 64
"""Images with the same names up to which each is protected by itself."""

_OTHER_SPELLING = r"\\[u/]"
"""An escape that is written otherwise when the text is written again."""

_ESCAPED = r'["\\\x00-\x1f]'
_QUERIES = 1_000


def protect_image(text: str | None, protection: Protection) -> str | None:
    """One image, protected; None where there is none, or none that can be read: what is a value in it is not
    known."""
    image = read_image(text)
    if image is None:
        return None
    return json.dumps(protection.row(image), ensure_ascii=False, separators=(",", ":"))


def protect_images(images: pa.StringArray, protection: Protection, *, few: int = FEW) -> pa.StringArray:
    """``protect_image`` of each of ``images``. ``few``: see ``FEW``."""
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
    """Read and write each image by itself; the values of a column are protected together."""
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
    written = (
        None if row is None else json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in kept
    )
    return pa.array(written, pa.string())


_NAMES = "SELECT json_keys(image)::JSON::VARCHAR AS names FROM images"


def _alike(images: pa.StringArray, names: Sequence[str], protection: Protection) -> pa.StringArray:
    """Protect proven images, all with ``names`` in this order."""
    kept = tuple(name for name in names if name in protection.kept)
    if not kept:
        return pa.array(["{}"] * len(images), pa.string())
    protected = tuple(name for name in kept if name in protection.columns)
    found = query_images(_reading(kept, protected), images)
    parts: list[pa.StringArray | str] = []
    for place, name in enumerate(kept):
        before = ("," if place else "{") + json.dumps(name, ensure_ascii=False) + ":"
        if name in protected:
            texts = protection.columns[name](found.column(f"text_{protected.index(name)}"))
            parts += [before, _as_json(texts)]
        else:
            parts += [before, found.column(f"json_{place}")]
    return pc.binary_join_element_wise(*parts, "}", "")


@lru_cache(_QUERIES)
def _reading(kept: tuple[str, ...], protected: tuple[str, ...]) -> str:
    """The query that reads ``kept`` as JSON (``json_<place>``), and of ``protected`` the texts
    (``text_<place>``)."""
    columns = [f"fragments[{place + 1}]::VARCHAR AS json_{place}" for place in range(len(kept))]
    columns += [f"texts[{place + 1}] AS text_{place}" for place in range(len(protected))]
    texts = f"json_extract_string(image, {pointers(protected)})" if protected else "[]"
    inner = f"SELECT json_extract(image, {pointers(kept)}) AS fragments, {texts} AS texts FROM images"
    return f"SELECT {', '.join(columns)} FROM ({inner})"


def _as_json(texts: pa.StringArray) -> pa.StringArray:
    """Each text as a JSON string; None as ``null``."""
    if pc.any(pc.match_substring_regex(texts, _ESCAPED)).as_py():
        encoded = texts.dictionary_encode()
        quoted = [json.dumps(text, ensure_ascii=False) for text in encoded.dictionary.to_pylist()]
        written = pa.array(quoted, pa.string()).take(encoded.indices)
    else:
        written = pc.binary_join_element_wise('"', texts, '"', "")
    return pc.fill_null(written, "null")
