"""A database whose landing and lake are in a bucket from the first command on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.storage.s3_server import S3Server


def content_of(home: Path) -> dict[str, str]:
    """The content hash of each dimension's newest version, by its own log."""
    found = {}
    for table in pgbench.COLUMNS:
        folder = home / "lake" / pgbench.SOURCE / f"dim_{table}"
        text = json.dumps(open_delta(folder).history(1)[0])
        assert "omnisupport_ingest" in text
        from omnisupport_ingest.lake.state import read_state

        paths = [each for each in open_delta(folder).file_uris() if "/state-" in each]
        state = read_state(folder / paths[0].rpartition(f"dim_{table}/")[2])
        found[table] = state.checkpoint.content_hash
    return found


@pytest.mark.slow
def test_what_a_bucket_holds_is_what_folders_hold_and_another_machine_goes_on_with_it(
    s3: S3Server, source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    place = s3.place()
    given = pgbench.variables(source, tmp_path) | {"OMNISUPPORT_STORAGE": place}
    done = pgbench.command("sync", "--verify", "full", folder=tmp_path, variables=given)
    assert done.returncode == 0, done.stderr
    assert "No difference." in done.stdout

    # The copies are lost, and so is everything else of the machine: another home goes on.
    there = {"OMNISUPPORT_HOME": str(tmp_path / "another")}
    shutil.move(tmp_path / "home", tmp_path / "gone")
    source.sql("UPDATE pgbench_tellers SET tbalance = tbalance + 7 WHERE tid < 4")
    again = pgbench.command("sync", "--verify", "full", folder=tmp_path, variables=given | there)
    assert again.returncode == 0, again.stderr
    assert "No difference." in again.stdout

    # The same landing in folders gives the same dimensions.
    local = tmp_path / "local"
    Home.open(local, WindowSize.parse("hourly"))
    marker = json.loads((tmp_path / "another" / "home.json").read_text())
    del marker["storage"]
    (local / "home.json").write_text(json.dumps(marker))
    landing = tmp_path / "another" / "landing"
    for each in storage_of(landing / "x").listed(landing):
        at = local / each.path.relative_to(tmp_path / "another")
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(storage_of(each.path).at_hand(each.path), at)
    made = pgbench.command(
        "materialize",
        folder=tmp_path,
        variables=pgbench.variables(source, tmp_path) | {"OMNISUPPORT_HOME": str(local)},
    )
    assert made.returncode == 0, made.stderr
    assert content_of(local) == content_of(tmp_path / "another")

    for file in (tmp_path / "another").rglob("*"):
        if file.is_file() and not file.is_socket():
            assert b"SECRET-that-no-file-may-hold" not in file.read_bytes(), file
