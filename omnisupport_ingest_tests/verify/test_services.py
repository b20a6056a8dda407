"""What ``up`` and ``demo`` start, and what they leave to others."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.verify import services
from omnisupport_ingest_tests.waiting import PATIENCE


def test_a_spark_that_runs_elsewhere_is_not_started_again(
    tmp_path: Path,
) -> None:
    settings = Settings(home=tmp_path / "home", spark_remote="sc://spark.example:15002/;token=hunter2")
    home = Home.open(settings.home, settings.window_size)
    lines: list[str] = []
    with Supervisor(home) as supervisor:
        services.start_spark(supervisor, settings, home, lines.append)
        assert supervisor.names == ()
        assert ConnectAddress.read(home.run) is None
        stop_spark_connect(supervisor, home)
    (line,) = lines
    assert "sc://spark.example:15002" in line
    assert "hunter2" not in line


def test_the_first_start_of_the_embedded_server_leaves_no_error_in_its_log(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres")
    asked = []

    def ask() -> None:
        while not (asked and asked[-1]):
            asked.append(server.running and services._accepts(server))
            time.sleep(0.01)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        server.start()
        asking.join(PATIENCE)
        assert asked[-1], f"asked {len(asked)} times, and it never had its database"
        assert asked.count(False) > 0
        assert "FATAL:  database" not in (tmp_path / "postgres" / "postgres.log").read_text()
    finally:
        server.destroy()
