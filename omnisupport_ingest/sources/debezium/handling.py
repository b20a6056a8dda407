"""How a connector writes values whose JSON does not tell: what a file without schemas leaves open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Handling:
    """``decimals``: the connector's ``decimal.handling.mode`` (``double`` tells itself: it is a number).
    ``binary``: its ``binary.handling.mode``; null is ``bytes``, which is base64 in JSON.
    """

    decimals: str = "precise"
    binary: str | None = None
