"""``status --watch``, what ``status`` judges, and which sources it shows."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from omnisupport_ingest.cli.status import status
from omnisupport_ingest.cli.status_health import health
from omnisupport_ingest.cli.status_live import WalGrowth
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, run
from omnisupport_ingest_tests.layers.story import SOURCE

WELL: dict[str, Any] = {
    "source": {
        "name": "desk",
        "capture": "RUNNING",
        "slot": {"wal_status": "reserved", "retained_bytes": 100, "safe_bytes": 600},
    },
    "other_logs": [],
    "definition_changes": [],
    "schema_changes": [],
    "documents_refused": None,
    "contracts_gone": [],
    "unread_slots": [],
    "readings": [],
    "platform": {
        "checks": {"passed": 3, "failed": []},
        "failed_runs": [],
        "sensors": [{"name": "wal_batches_desk", "running": True, "tick": "SKIPPED"}],
    },
    "disk": {"free": 10**12, "days": 900.0, "settled": True},
    "sources": [
        {
            "source": "desk",
            "landing": {"problem": None, "gap": None},
            "quarantine": {},
            "discarded": 0,
            "left_out": [],
        }
    ],
}


RED = {"asset": "desk/dim_notes", "check": "fresh", "said": "It is behind. Look: omnisupport-ingest status"}


UNREADABLE = {"problem": "x", "fix": "y"}

TARGET = {
    "table": "desk.notes",
    "target": "public.notes",
    "lake_version": 7,
    "version": 5,
    "versions_behind": 2,
    "seconds_behind": 899.0,
    "synced_at": "2026-11-21T10:00:00+00:00",
    "problem": None,
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    found = copy.deepcopy(WELL)
    at: Any = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return found


def test_a_platform_with_nothing_wrong_is_healthy() -> None:
    assert health(WELL) == {"level": "healthy", "reasons": []}


@pytest.mark.parametrize(
    ("document", "level", "reason"),
    [
        (changed("source", "capture", to="FAILED"), "broken", "capture of desk has failed"),
        (changed("sources", 0, "landing", "problem", to={}), "healthy", None),
        (
            changed("sources", 0, "landing", "problem", to={"problem": "x", "fix": "y"}),
            "broken",
            "cannot be read",
        ),
        (changed("sources", 0, "landing", "gap", to={"repaired": False, "fix": "y"}), "broken", "gap"),
        (changed("sources", 0, "landing", "gap", to={"repaired": True}), "healthy", None),
        (changed("source", "slot", "wal_status", to="lost"), "warning", "the slot of desk is lost"),
        (changed("platform", "checks", to={"passed": 1, "failed": [RED]}), "warning", "1 check failed"),
        (
            changed("platform", "failed_runs", to=[{"job": "ingest_desk"}]),
            "warning",
            "run of ingest_desk failed",
        ),
        (
            changed("disk", "free", to=10**9),
            "warning",
            "has 954 MB left, full in 900 days",
        ),
        (changed("disk", "days", to=2.0), "warning", "full in 2 days"),
        (changed("disk", to={"free": 10**12, "days": 2.0, "settled": False}), "healthy", None),
        (changed("platform", "sensors", 0, "tick", to="FAILURE"), "warning", "wal_batches_desk failed"),
        (changed("platform", "sensors", 0, "running", to=False), "warning", "is stopped"),
        (changed("sources", 0, "quarantine", to={"collision": 2}), "warning", "2 events of desk"),
        (changed("platform", "checks", to=None), "healthy", None),
        (changed("sources", 0, "targets", to=[TARGET]), "healthy", None),
        (
            changed("sources", 0, "targets", to=[TARGET | {"seconds_behind": 901.0}]),
            "warning",
            "the target public.notes of desk.notes is late: 2 versions behind for 15 min",
        ),
        (
            changed("sources", 0, "targets", to=[TARGET | {"problem": {"problem": "No.", "fix": "y"}}]),
            "warning",
            "cannot be synced: No",
        ),
    ],
)
def test_the_worst_thing_is_the_level_and_each_has_a_reason(
    document: dict[str, Any], level: str, reason: str | None
) -> None:
    found = health(document)
    assert found["level"] == level
    assert found["reasons"] == [] if reason is None else reason in found["reasons"][0]


def test_the_forecast_of_a_slot_takes_two_looks() -> None:
    wal = WalGrowth()
    assert wal.with_rates(copy.deepcopy(WELL), now=10.0)["source"]["slot"]["seconds_left"] is None
    grown = changed("source", "slot", "retained_bytes", to=160)
    slot = wal.with_rates(grown, now=12.0)["source"]["slot"]
    assert (slot["bytes_per_second"], slot["seconds_left"]) == (30, 20)
    away = changed("source", "slot", "retained_bytes", to=None)
    assert wal.with_rates(away, now=14.0)["source"]["slot"]["bytes_per_second"] is None
    assert wal.with_rates(grown, now=16.0)["source"]["slot"]["bytes_per_second"] is None


def test_a_slot_that_is_gone_is_a_warning_once_its_stream_has_landed() -> None:
    gone = changed("source", "slot", "there", to=False)
    assert health(gone)["level"] == "healthy"
    gone["sources"][0]["landing"]["stream_end"] = "0/A"
    assert health(gone) == {"level": "warning", "reasons": ["the slot of desk is not on the server any more"]}


def test_sources_that_are_not_in_use_are_counted_until_they_are_asked_for(sample_home: SampleHome) -> None:
    contract = json.loads((sample_home.folder / "contracts" / "notes.json").read_text())
    contract["x-cdc"]["source"] = "unused"
    (sample_home.folder / "contracts" / "others.json").write_text(json.dumps(contract))
    seen = document(status)
    assert [each["source"] for each in seen["sources"]] == [SOURCE]
    assert seen["sources_not_in_use"] == ["unused"]
    assert "unused (--all shows them)" in run(status).stdout
    assert [each["source"] for each in document(status, "--all")["sources"]] == [SOURCE, "unused"]
    assert [each["source"] for each in document(status, "--source", "unused")["sources"]] == ["unused"]


def test_watch_looks_again_and_again_until_ctrl_c_and_that_is_no_failure(sample_home: SampleHome) -> None:
    watching = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "omnisupport_ingest.cli.main",
            *["status", "--watch", "--every", "0.2", "--json"],
        ],
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    )
    assert watching.stdout is not None
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(watching.stdout.readline() for _ in range(3)))  # type: ignore[union-attr]
    reader.start()
    reader.join(60)
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert [json.loads(line)["health"]["level"] for line in lines] == ["healthy"] * 3
