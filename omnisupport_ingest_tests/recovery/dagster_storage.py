"""Our storage of Dagster's records with failpoints around what the daemon writes: sensors' cursors, and runs.

Dagster writes these itself, so the package cannot put a failpoint there; ``storage_with_failpoints``
names the classes in ``dagster.yaml``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnisupport_ingest.defs.dagster_storage import KeptRunStorage, KeptScheduleStorage, KeptSqliteStorage
from omnisupport_ingest.failpoints import failpoint

DAGSTER_FAILPOINTS = {
    "dagster.launch": "a run that a tick asked for, recorded; it is launched next",
    "dagster.cursor": "the cursor that a tick gave back",
}


class GatedSchedules(KeptScheduleStorage):
    """Where the daemon keeps cursors."""

    def update_instigator_state(self, state: Any) -> Any:
        with failpoint("dagster.cursor", state.instigator_name):
            return super().update_instigator_state(state)


class GatedRuns(KeptRunStorage):
    """Where the daemon records the runs that it is about to launch."""

    def add_run(self, dagster_run: Any) -> Any:
        with failpoint("dagster.launch", dagster_run.job_name):
            return super().add_run(dagster_run)


class GatedStorage(KeptSqliteStorage):
    """The storage that ``up`` uses, with both."""

    def __init__(self, base_dir: str, inst_data: Any = None) -> None:
        super().__init__(base_dir, inst_data)
        self._run_storage = GatedRuns(self._run_storage._conn_string, self.kept)
        self._schedule_storage = GatedSchedules(self._schedule_storage._conn_string, self.kept)


def storage_with_failpoints(dagster_home: Path) -> None:
    """Make the instance in ``dagster_home`` use the classes above, in the places that it uses anyway."""
    file = dagster_home / "dagster.yaml"
    text = file.read_text()
    instance = json.loads(text[text.index("{") :])
    instance["storage"]["custom"] |= {"module": __name__, "class": GatedStorage.__name__}
    file.write_text(json.dumps(instance, indent=2))
