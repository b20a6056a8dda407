"""Checks that JSON has the expected kind of value; each function raises ``ValueFault`` if it has not."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from omnisupport_ingest.sources.debezium.faults import ValueFault


def string(value: Any) -> str:
    """Return ``value``, which must be a text."""
    if not isinstance(value, str):
        raise ValueFault("it is no text")
    return value


def number(value: Any) -> int:
    """Return ``value``, which must be a whole number; ``true`` and ``false`` are not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueFault("it is no whole number")
    return value


def from_base64(text: str) -> bytes:
    """Return the bytes that the base64 ``text`` encodes."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueFault("it is not base64") from None
