"""The warm server: other processes find it, and it is gone with its supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime import spark_connect
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.spark_connect import NAME, start_spark_connect, stop_spark_connect
from omnisupport_ingest.runtime.supervisor import ServiceFailed, Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.full

_CLIENT = """
import json
from omnisupport_ingest.runtime.spark import session, session_conf
from omnisupport_ingest.settings import Settings
spark = session(Settings())
conf = {key: spark.conf.get(key) for key in session_conf(Settings())}
print(json.dumps([type(spark).__module__, spark.range(10).count(), conf]))
spark.stop()
"""


@pytest.mark.slow
def test_another_process_has_a_session_on_the_server_with_our_configuration(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", spark_driver_memory="1g")
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home) as supervisor:
        address = start_spark_connect(supervisor, settings, home)
        assert ConnectAddress.read(home.run) == address
        assert (home.run / "spark-connect.json").stat().st_mode & 0o777 == 0o600
        environment = {**os.environ, **settings_environment(settings)}
        said = subprocess.check_output(
            [sys.executable, "-c", _CLIENT], env=environment, text=True, timeout=PATIENCE
        )
        module, count, conf = json.loads(said)
        assert (module, count) == ("pyspark.sql.connect.session", 10)
        assert conf["spark.sql.session.timeZone"] == "UTC"
        assert conf["spark.sql.parquet.outputTimestampType"] == "TIMESTAMP_MICROS"
        assert address.token not in supervisor.log_of(NAME).read_text()
        stop_spark_connect(supervisor, home)
        assert ConnectAddress.read(home.run) is None


def test_a_record_of_a_server_that_is_gone_counts_as_none(tmp_path: Path) -> None:
    ConnectAddress(str(tmp_path / "gone.sock"), "token").write(tmp_path)
    assert ConnectAddress.read(tmp_path) is None


def test_the_token_is_not_in_the_text_of_an_address() -> None:
    assert "hunter2" not in repr(ConnectAddress("/run/x.sock", "hunter2"))


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"socket": 5}', '{"socket": "x", "token": 1}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, record: str) -> None:
    (tmp_path / "spark-connect.json").write_text(record)
    assert ConnectAddress.read(tmp_path) is None


def test_a_first_job_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_connect, "_FIRST_JOB", "import time; time.sleep(600)")
    monkeypatch.setattr(spark_connect, "_READY_SECONDS", 0.5)
    with pytest.raises(ServiceFailed, match="first job within") as told:
        spark_connect._do_first_job(
            Settings(home=tmp_path), ConnectAddress(str(tmp_path / "x.sock"), "hunter2")
        )
    assert "hunter2" not in str(told.value)
