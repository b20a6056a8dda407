"""Decision tables that differ from the project's own in one row."""

from __future__ import annotations

import csv
from pathlib import Path

from omnisupport_ingest.contracts.decision_table import default_decision_table


def write_decision(path: Path, scenario: str, action: str, *, review: str = "true") -> Path:
    """Write the project's table to ``path`` with another action in the row of ``scenario``."""
    rows = list(csv.DictReader(default_decision_table().read_text().splitlines()))
    for row in rows:
        if row["scenario"] == scenario:
            row |= {"default_action": action, "needs_manual_review": review}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path
