"""Dagster's own storage with gates around what the daemon writes: cursors of sensors, and runs.

Dagster writes these itself, so the package cannot put a gate there. The classes are Dagster's, which do
all the work; ``gate_storage`` names them in ``dagster.yaml``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dagster._core.storage.runs.sqlite.sqlite_run_storage import SqliteRunStorage
from dagster._core.storage.schedules.sqlite.sqlite_schedule_storage import SqliteScheduleStorage

from omnisupport_ingest.failpoints import gate

DAGSTER_GATES = {
    "dagster.launch": "a run that a tick asked for, recorded; it is launched next",
    "dagster.cursor": "the cursor that a tick gave back",
}


class GatedSchedules(SqliteScheduleStorage):
    """Where the daemon keeps cursors."""

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> GatedSchedules:
        made: Any = cls.from_local(inst_data=inst_data, **config_value)
        # Dagster's own constructor does not ask for the class.
        made.__class__ = cls
        return made

    def update_instigator_state(self, state: Any) -> Any:
        with gate("dagster.cursor", state.instigator_name):
            return super().update_instigator_state(state)


class GatedRuns(SqliteRunStorage):
    """Where the daemon records the runs that it is about to launch."""

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> GatedRuns:
        made: Any = cls.from_local(inst_data=inst_data, **config_value)
        made.__class__ = cls
        return made

    def add_run(self, dagster_run: Any) -> Any:
        with gate("dagster.launch", dagster_run.job_name):
            return super().add_run(dagster_run)


def gate_storage(dagster_home: Path) -> None:
    """Make the instance in ``dagster_home`` use the classes above, in the places that it uses anyway."""
    file = dagster_home / "dagster.yaml"
    text = file.read_text()
    instance = json.loads(text[text.index("{") :])
    for name, made, folder in (
        ("schedule_storage", GatedSchedules, "schedules"),
        ("run_storage", GatedRuns, "history"),
    ):
        instance[name] = {
            "module": __name__,
            "class": made.__name__,
            "config": {"base_dir": str(dagster_home / folder)},
        }
    instance["event_log_storage"] = {
        "module": "dagster._core.storage.event_log",
        "class": "SqliteEventLogStorage",
        "config": {"base_dir": str(dagster_home / "history" / "runs")},
    }
    file.write_text(json.dumps(instance, indent=2))
