"""Read row images (JSON objects: column name → text or null) and the texts of keys (JSON arrays)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from omnisupport_ingest.foreign import Unreadable, texts_only


def read_image(text: str | None) -> dict[str, Any] | None:
    """Return the columns of an image by name; None if there is none or ``text`` is not a JSON object.

    Images of our own capture hold texts and nulls alone. Other JSON values of another capture are returned as
    text: numbers as written, ``true`` and ``false``, objects and arrays as compact JSON.
    """
    if text is None:
        return None
    try:
        image = texts_only(text)
    except Unreadable:
        return None
    if not isinstance(image, dict):
        return None
    for name, value in image.items():
        if value is not None and not isinstance(value, str):
            image[name] = _text(value)
    return image


def with_unsent(
    image: Mapping[str, Any], unsent: Collection[str] | None, before: str | None
) -> Mapping[str, Any]:
    """Add the columns that were not sent, as far as the old image ``before`` has them (replica identity
    full)."""
    if not unsent or before is None:
        return image
    old = read_image(before) or {}
    return {name: old[name] for name in unsent if name in old} | dict(image)


def is_whole(key: str | None) -> bool:
    """Whether there is a key (JSON array of texts) without NULL; any other event belongs to no row."""
    if key is None:
        return False
    if "null" not in key:
        return True
    try:
        parts = texts_only(key)
    except Unreadable:
        return False
    return isinstance(parts, list) and None not in parts


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
