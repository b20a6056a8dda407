"""Reading a row image: one opaque JSON object, column name → text or null."""

from __future__ import annotations

import json
from typing import Any

_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
"""Numbers stay the text they are."""


def read_image(text: str | None) -> dict[str, Any] | None:
    """The columns of an image by name; null where there is none, or ``text`` is no JSON object.

    Landed images hold text and null alone. What else JSON has (another capture's image) is given as
    text: numbers as they are written, ``true`` and ``false``, objects and arrays as compact JSON.
    """
    if text is None:
        return None
    try:
        image = _DECODER.decode(text)
    except ValueError:
        return None
    if not isinstance(image, dict):
        return None
    for name, value in image.items():
        if value is not None and not isinstance(value, str):
            image[name] = _text(value)
    return image


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
