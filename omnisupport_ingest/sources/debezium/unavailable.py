"""The value that Debezium writes for a column that was not sent (unchanged TOAST), in all its forms."""

from __future__ import annotations

import base64
import json
import uuid
from hashlib import md5
from typing import Any

PLACEHOLDER = "__debezium_unavailable_value"

_BYTES = PLACEHOLDER.encode()
UNAVAILABLE_TEXTS = frozenset(
    {
        PLACEHOLDER,
        base64.b64encode(_BYTES).decode(),
        base64.urlsafe_b64encode(_BYTES).decode(),
        _BYTES.hex(),
        json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":")),
    }
)
_UNAVAILABLE_ELEMENTS = frozenset(
    {*UNAVAILABLE_TEXTS, str(uuid.UUID(bytes=md5(_BYTES, usedforsecurity=False).digest(), version=3))}
)
_CODES = list(_BYTES)

DISGUISES = frozenset({PLACEHOLDER, *(each for each in _UNAVAILABLE_ELEMENTS if PLACEHOLDER not in each)})
"""Every line with such a value contains one of these texts, apart from escapes, unless the value is a list of
numbers."""


def is_unavailable(value: Any) -> bool:
    """Whether ``value`` stands for a column that was not sent (unchanged TOAST), in any of its forms."""
    if isinstance(value, str):
        return value in UNAVAILABLE_TEXTS
    if isinstance(value, list) and value:
        alone = value[0] if len(value) == 1 else None
        return value == _CODES or (isinstance(alone, str) and alone in _UNAVAILABLE_ELEMENTS)
    return isinstance(value, dict) and value == {PLACEHOLDER: PLACEHOLDER}
