"""What the Dagster UI says of the sensors is read, and a UI that is not there is no error."""

from __future__ import annotations

from datetime import UTC, datetime

from omnisupport_ingest.runtime.ports import free_port
from omnisupport_ingest.runtime.sensors_seen import SensorSeen, read_answer, sensors_seen

TICK = {"status": "SKIPPED", "timestamp": 1795238481.5, "skipReason": "Nothing has landed yet."}
ANSWER = {
    "data": {
        "repositoriesOrError": {
            "nodes": [
                {
                    "sensors": [
                        {"name": "wal_batches_desk", "sensorState": {"status": "RUNNING", "ticks": [TICK]}},
                        {"name": "wal_batches_files", "sensorState": {"status": "STOPPED", "ticks": []}},
                    ]
                }
            ]
        }
    }
}
"""An answer of Dagster 1.13's webserver, names changed."""


def test_every_sensor_is_read_with_its_last_tick() -> None:
    assert list(read_answer(ANSWER)) == [
        SensorSeen(
            "wal_batches_desk",
            running=True,
            tick="SKIPPED",
            tick_at=datetime(2026, 11, 21, 5, 21, 21, 500000, tzinfo=UTC),
            said="Nothing has landed yet.",
        ),
        SensorSeen("wal_batches_files", running=False, tick=None, tick_at=None, said=None),
    ]


def test_a_ui_that_is_not_there_tells_nothing() -> None:
    assert sensors_seen(free_port()) is None
