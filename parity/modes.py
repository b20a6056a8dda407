"""How Debezium's connector is told to write values: as it comes, or numbers and intervals as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Modes:
    """``settings``: of the connector. ``land``, ``events``: what ``land`` and the definition of a source of
    topics must say of them."""

    as_text: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    land: tuple[str, ...] = ()
    events: Mapping[str, str] = field(default_factory=dict)


DEFAULT = Modes()
TEXT = Modes(
    as_text=True,
    settings={
        "decimal.handling.mode": "string",
        "interval.handling.mode": "string",
    },
    land=("--decimals", "string"),
    events={"decimals": "string"},
)
BY_NAME = {"default": DEFAULT, "text": TEXT}
