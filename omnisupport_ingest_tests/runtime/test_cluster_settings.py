"""Spark's own settings from a file, and the archive of the package that executors run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from omnisupport_ingest.compiled import compiled_images
from omnisupport_ingest.runtime.cluster import (
    SparkPropertiesRefused,
    is_local,
    package_archive,
    properties_text,
    spark_properties,
)
from omnisupport_ingest.runtime.private_folders import Scratch
from omnisupport_ingest.runtime.spark import session_conf, spark_conf
from omnisupport_ingest.settings import Settings

MASTER = "spark://127.0.0.1:7077"


def given(tmp_path: Path, text: str, **more: object) -> Settings:
    file = tmp_path / "spark.conf"
    file.write_text(text)
    return Settings(home=tmp_path / "home", spark_properties=file, _env_file=None, **more)


def test_a_setting_of_the_file_reaches_spark_and_ours_that_decide_about_data_stay(tmp_path: Path) -> None:
    text = "# Ours.\n\nspark.executor.memory   4g\nspark.x=a b\nspark.driver.extraJavaOptions -Dmine=1\n"
    settings = given(tmp_path, text, spark_master=MASTER)
    scratch = Scratch.take(settings)
    conf = spark_conf(settings, scratch)
    scratch.remove()
    assert (conf["spark.executor.memory"], conf["spark.x"], conf["spark.master"]) == ("4g", "a b", MASTER)
    assert conf["spark.driver.extraJavaOptions"].endswith(" -Dmine=1")
    assert "-Duser.timezone=UTC" in conf["spark.driver.extraJavaOptions"]
    assert conf["spark.sql.session.timeZone"] == "UTC"
    # What would bind it to loopback is a single machine's.
    assert "spark.driver.host" not in conf
    assert b"spark.x a b\n" in properties_text(conf)


def test_a_value_is_what_java_reads_from_the_same_file(tmp_path: Path) -> None:
    """Master and workers read the file by ``Properties.load``: a secret must be the same for all."""
    text = "spark.authenticate.secret a\\\\b\\:c\\u0041\\q\nspark.x one\\ntwo\nspark.y \\ z\n"
    found = spark_properties(given(tmp_path, text))
    assert found == {"spark.authenticate.secret": "a\\b:cAq", "spark.x": "one\ntwo", "spark.y": " z"}
    # What is written for Spark from them is read as the same again.
    again = given(tmp_path, properties_text(found).decode())
    assert spark_properties(again) == found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("spark.sql.session.timeZone CET", "Line 1 of .* sets spark.sql.session.timeZone"),
        ("spark.master local[8]", "sets spark.master"),
        ("spark.a 1\nhunter2", "Line 2 of .* is no setting"),
        ("spark.authenticate.secret hunter2\\", "Line 1 of .* is no setting"),
    ],
)
def test_what_is_not_the_files_to_decide_is_refused_without_its_value(
    tmp_path: Path, text: str, named: str
) -> None:
    settings = given(tmp_path, text)
    with pytest.raises(SparkPropertiesRefused, match=named) as refused:
        spark_properties(settings, session_conf(settings).keys())
    assert "hunter2" not in str(refused.value) and "CET" not in str(refused.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, spark_properties=tmp_path / "none", _env_file=None)
    with pytest.raises(SparkPropertiesRefused, match="OMNISUPPORT_SPARK_PROPERTIES"):
        spark_properties(settings)


@pytest.mark.parametrize(
    ("given", "local"),
    [
        ({}, True),
        ({"spark_master": MASTER}, False),
        ({"spark_remote": "sc://spark.example:15002"}, False),
        ({"spark_remote": "sc://localhost/;socket=%2Fs;token=t"}, True),
    ],
)
def test_what_counts_as_this_machine(given: dict[str, str], local: bool) -> None:
    settings = Settings(_env_file=None, **given)
    assert is_local(settings) is local
    # A cluster's number of shuffle partitions is its own.
    assert ("spark.sql.shuffle.partitions" in session_conf(settings)) is local


def test_the_archive_runs_what_tasks_need_and_the_same_code_has_the_same_bytes(tmp_path: Path) -> None:
    first = package_archive(tmp_path)
    content = first.read_bytes()
    again = package_archive(tmp_path)
    assert (again, again.read_bytes()) == (first, content)
    with zipfile.ZipFile(first) as archive:
        assert "omnisupport_ingest/lake/file_tasks.py" in archive.namelist()
    tasks = (
        "lake.file_tasks",
        "layers.events.event_tasks",
        "layers.dimension.fold_tasks",
        "layers.dimension.range_update",
        "cdc.history_update",
    )
    imports = "; ".join(f"import omnisupport_ingest.{name}" for name in tasks)
    code = f"{imports}; print(omnisupport_ingest.__file__)"
    said = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(first)}, cwd=tmp_path, text=True
    )
    assert said.startswith(str(first))


@pytest.mark.skipif(compiled_images is None, reason="installed without a C compiler")
def test_a_worker_that_got_the_package_as_an_archive_has_what_is_compiled(tmp_path: Path) -> None:
    archive = package_archive(tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(archive)!r})
from omnisupport_ingest import compiled as found
assert {archive.name!r} in found.__file__
print(not found.NOT_COMPILED)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
