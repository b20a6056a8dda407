"""The commands that messages of a cursor source recommend, quoted for a shell.

A table is named with its source, because another source may have a table of the same name.
"""

from __future__ import annotations

import shlex

from omnisupport_ingest.contracts.model import TableContract


def propose(table: TableContract) -> str:
    """Return the command that shows the next contract version of ``table``."""
    return f"omnisupport-ingest contracts propose {shlex.quote(f'{table.source}.{table.name}')}"


def new_contract(table: TableContract) -> str:
    """Return the command that drafts a contract for ``table``, with columns that could be its cursor."""
    return (
        f"omnisupport-ingest contracts new --table {shlex.quote(table.full_name)} "
        f"--source {shlex.quote(table.source)} --out FOLDER"
    )


def read_anew(source: str, reason: str, table: TableContract | None = None) -> str:
    """Return the command that reads ``table`` of ``source`` whole (None: every table), because of ``reason``.

    ``REASON`` is a placeholder for a reason that only a person knows.
    """
    alone = "" if table is None else f" --table {shlex.quote(table.name)}"
    why = reason if reason == "REASON" else f'"{reason}"'
    return f"omnisupport-ingest sync {shlex.quote(source)}{alone} --full-refresh {why}"
