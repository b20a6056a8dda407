"""The tables that the proof's histories are about, in the oracle's words and as contracts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from omnisupport_ingest_tests.oracle.model import TableShape

SOURCE = "desk"
KEY = ("lane", "id")

TICKETS = TableShape("tickets", ("status", "note", "body"))
AGENTS = TableShape("agents", ("note", "gone", "body"), soft_delete_column="gone")
SHAPES = (TICKETS, AGENTS)

UNKNOWN = "drafts"
"""A table that lands and has no contract."""

TOO_LONG = "x" * 40
"""Stands at the end of values that a strict contract does not allow."""


@dataclass(frozen=True)
class Terms:
    """What the contract of a table says: the most characters per column, and its lateness in hours.

    ``purge``: for how many hours rows are still published after their delete; null: for ever.
    """

    longest: Mapping[str, int]
    allowed: int
    most: int
    purge: int | None = None

    @property
    def lateness(self) -> tuple[timedelta, timedelta]:
        return timedelta(hours=self.allowed), timedelta(hours=self.most)

    def shown_since(self, watermark: datetime | None) -> datetime | None:
        """Rows deleted before this are purged: so long ago that nothing in time can arrive below.

        To the hour, so that a published table is not another one with every event.
        """
        if self.purge is None or watermark is None:
            return None
        hours = max(self.purge, self.allowed + self.most)
        return (watermark - timedelta(hours=hours)).replace(minute=0, second=0, microsecond=0)


VERSIONS: tuple[Mapping[str, Terms], ...] = (
    {"tickets": Terms({"status": 30, "body": 30}, 1, 2, 1), "agents": Terms({"body": 30}, 2, 100, 1)},
    {"tickets": Terms({}, 1, 2), "agents": Terms({"body": 30}, 0, 1, 3)},
    {"tickets": Terms({"status": 30, "note": 13}, 0, 3, 4), "agents": Terms({"note": 12}, 1, 1, 0)},
)
"""Versions that the contracts go through; each change makes the windows stale. Some purge rows sooner than
what is in time has arrived, if they were left to."""


def write_contracts(folder: Path, terms: Mapping[str, Terms]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        document = _contract(shape, terms[shape.name])
        (folder / f"{shape.name}.json").write_text(json.dumps(document))


def _contract(shape: TableShape, terms: Terms) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: {"type": "integer", "x-pg-type": "bigint", "description": "Part of the key."} for name in KEY
    }
    for name in shape.columns:
        columns[name] = {"type": ["string", "null"], "x-pg-type": "text", "description": "A text."}
        if name in terms.longest:
            columns[name]["maxLength"] = terms.longest[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": shape.name,
        "description": f"The table {shape.name} of the proof.",
        "type": "object",
        "required": list(KEY),
        "additionalProperties": True,
        "properties": columns,
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": "public",
            "table": shape.name,
            "owner": "team:tests",
            "key": list(KEY),
            "events": {
                "soft_delete_column": shape.soft_delete_column,
                "purge_deleted_after": None if terms.purge is None else f"PT{terms.purge}H",
            },
            "lateness": {"allowed": f"PT{terms.allowed}H", "max": f"PT{terms.most}H"},
            "pii": {},
        },
    }
