"""The runbooks of pause, backup, restore and move, followed word by word on a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.session.errors import SlotMoved
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

PAGE = Path(__file__).parents[2] / "docs" / "runbooks.md"
PAUSED = 1


def steps(runbook: str) -> list[str]:
    """The blocks that a person types for ``runbook``, in order."""
    section = PAGE.read_text().partition(f"\n## {runbook}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", section, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in blocks]


@dataclass
class Terminal:
    """A shell on one machine; /backups of the page is a folder of the test."""

    folder: Path
    backups: Path
    variables: dict[str, str] = field(default_factory=dict)

    def type(self, *lines: str, code: int = 0) -> str:
        """Run ``lines`` as one script, which must end with ``code``; return all that it printed."""
        script = "\n".join(lines).replace("/backups", str(self.backups))
        given = {name: value for name, value in os.environ.items() if not name.startswith("OMNISUPPORT_")}
        given |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(PAGE.parents[1]),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=given | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout[-4000:]
        return done.stdout


def machine(tmp_path: Path, name: str, source: SourceUnderTest) -> Terminal:
    (tmp_path / name).mkdir()
    return Terminal(
        tmp_path / name,
        tmp_path / "backups",
        {
            "OMNISUPPORT_SOURCE_DSN": source.dsn,
            "OMNISUPPORT_SLOT": source.slot,
            "OMNISUPPORT_PUBLICATION": source.slot,
        },
    )


@pytest.mark.slow
def test_a_home_backed_up_while_paused_goes_on_elsewhere_and_an_older_backup_is_repaired(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    pause, _ = steps("Upgrade")
    unpack, adopt, resume_restored, go_on, repair = steps("Restore of the home")
    source.sql("CREATE TABLE items (id bigint PRIMARY KEY, name text)", "INSERT INTO items VALUES (1, 'one')")

    old = machine(tmp_path, "old", source)
    old.type("omnisupport-ingest init shop", "cd shop", "omnisupport-ingest contracts new --all")
    old.folder /= "shop"
    old.type("omnisupport-ingest sync --verify none")
    old.type(pause)
    source.sql("INSERT INTO items VALUES (2, 'while paused')")
    old.type(*steps("Backup of the home"))

    # Nothing was captured since: the other machine goes on where the backup ends.
    new = machine(tmp_path, "new", source)
    new.type(unpack)
    new.folder /= "shop"
    refused = new.type("omnisupport-ingest capture --once", code=PAUSED)
    assert "Fix: omnisupport-ingest source resume" in refused
    source.sql("DELETE FROM items WHERE id = 1", "INSERT INTO items VALUES (3, 'after the backup')")
    new.type(adopt, resume_restored, "omnisupport-ingest capture --once")

    # That one is lost, and the backup is older than what it has captured.
    again = machine(tmp_path, "again", source)
    again.type(unpack)
    again.folder /= "shop"
    again.type(adopt, resume_restored)
    assert go_on in repair
    assert "The slot" in again.type("omnisupport-ingest capture --once", code=SlotMoved.exit_code)
    assert "No difference." in again.type(repair)
    (told,) = json.loads(again.type("omnisupport-ingest ledger --json"))["sources"]
    assert told["verdict"] == "named"
