"""``ledger``: a sentence first, and its exit code."""

from __future__ import annotations

import pytest

from omnisupport_ingest.cli.ledger import ledger
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, run
from omnisupport_ingest_tests.layers.story import SOURCE


def test_a_table_that_was_never_read_whole_may_lack_rows(sample_home: SampleHome) -> None:
    done = run(ledger)
    assert done.return_value == 1
    assert done.stdout.startswith(f"Changes of {SOURCE} may be missing")
    assert "Table notes has not been read" in " ".join(done.stdout.split())
    (source,) = document(ledger)["sources"]
    assert (source["verdict"], source["withheld"]) == ("missing", {})
    (epoch,) = source["epochs"]
    assert (epoch["to_lsn"], epoch["events"], epoch["gap"]) == ("0/14", 4, None)


def test_a_home_in_which_nothing_landed_lost_nothing(sample_home: SampleHome) -> None:
    for manifest in (sample_home.home / "landing" / SOURCE / "manifests").glob("*.json"):
        manifest.unlink()
    done = run(ledger)
    assert done.return_value == 0
    assert "nothing can be lost" in done.stdout


def test_a_server_that_is_away_leaves_the_verdict_open(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "postgresql://nobody@127.0.0.1:1/desk")
    done = run(ledger)
    assert done.return_value == 1
    assert "UNKNOWN" in done.stdout
    (source,) = document(ledger)["sources"]
    assert source["slot_unknown"] is not None
