"""The blocks `sh` of the tutorial are run on a real server, as a person would in one terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from omnisupport_ingest_tests.cli.conftest import source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

__all__ = ["source"]

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
SERVER = "host=localhost"
"""What the page calls the server."""


def steps() -> list[str]:
    """The blocks that a person types into the shell, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_can_be_followed(source: SourceUnderTest, tmp_path: Path) -> None:
    server = {
        name: value for name, value in parse_dsn(source.dsn).items() if name in ("host", "port", "user")
    }
    programs = Path(sys.executable).parent
    psql = next(programs.parent.rglob("pginstall*/bin/psql"), None)
    if psql is None:
        pytest.skip("the embedded PostgreSQL has no psql")
    # libpq takes the last of two names of a user: the one that the page says.
    script = "\n".join(steps()).replace(SERVER, make_dsn(**server))
    given = {name: value for name, value in os.environ.items() if not name.startswith("OMNISUPPORT_")}
    given |= {
        "PATH": f"{programs}:{psql.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(PAGE.parents[1]),
        # Names of their own: other tests capture from the same server.
        "OMNISUPPORT_SLOT": f"{source.slot}_tutorial",
        "OMNISUPPORT_PUBLICATION": f"{source.slot}_tutorial",
    }
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "Stays: the role omnisupport_capture" in done.stdout
        assert "No difference." in done.stdout and "No difference in the sample." in done.stdout
        assert "@example.org" in done.stdout and "c1@example.org" not in done.stdout
        exported = (tmp_path / "shop" / "orders.csv").read_text().splitlines()
        assert len(exported) == 1 + 4999
        assert sum(",paid," in line for line in exported) == 2500
    finally:
        source.sql("DROP DATABASE IF EXISTS shop WITH (FORCE)", "DROP ROLE IF EXISTS omnisupport_capture")
