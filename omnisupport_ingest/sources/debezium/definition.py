"""What the definition of a source of files says of its events: how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnisupport_ingest.contracts.sources import load_source, sources_folder
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.handling import Handling, NamedTable


def handling_in_force(settings: Settings, source: str) -> Handling:
    """How the events of ``source`` are read in the home of ``settings``; without a definition, as Debezium
    writes by default. ``ContractError`` if the definition is wrong."""
    path = sources_folder(settings) / f"{source}.json"
    return handling_of(load_source(path).events if path.exists() else {})


def handling_of(told: Mapping[str, Any]) -> Handling:
    """The member ``events`` of a definition, checked already."""
    tables = tuple(NamedTable(**each) for each in told.get("tables", ()))
    columns = tuple(told.get("time_columns", ()))
    return Handling(**{**told, "tables": tables, "time_columns": columns})
