"""What tests of commands look at in a shop: the source's status, what has landed, and when it is so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from omnisupport_ingest import failpoints
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.sources.postgres.awkward import SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.source_under_test import folded, landed_events
from omnisupport_ingest_tests.waiting import PATIENCE


def status(shop: Shop, *, code: int = 0) -> dict[str, Any]:
    """What ``source status`` tells; ``code``: the exit code it must have."""
    done = shop.run("source", "status", "--json")
    assert done.code == code, done.output
    found: dict[str, Any] = json.loads(done.out)
    return found


def landed_rows(shop: Shop) -> int:
    """Rows of the stream that have landed."""
    store = LandingStore(shop.home / "landing", SOURCE)
    return sum(manifest.rows for manifest in store.manifests() if manifest.stream)


def same_as_source(shop: Shop, *tables: str) -> None:
    """The fold of all that has landed is what ``tables`` hold now; without any, both of the shop."""
    events = landed_events(LandingStore(shop.home / "landing", SOURCE))
    for table in tables or ("items", "orders"):
        rows = shop.query(f"SELECT id::text, v FROM {table}")
        assert folded(events, table) == {json.dumps([key]): {"id": key, "v": v} for key, v in rows}


def killed_at(shop: Shop, point: str, *arguments: str) -> None:
    """Run a command that dies at ``point``."""
    variables = {f"OMNISUPPORT_{name.upper()}": value for name, value in shop.settings().items()}
    done = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
        env=os.environ | variables | {failpoints.VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
