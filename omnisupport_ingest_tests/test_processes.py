"""A process is told from every other that has or will have its number, whatever the clock does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.processes import ProcessIdentity, remove_all_left_behind, scratch_folder
from omnisupport_ingest_tests.waiting import until

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the kernel of Linux")


def test_a_living_process_lives_and_an_ended_one_does_not_also_before_it_was_waited_for() -> None:
    process = subprocess.Popen(["sleep", "600"])
    identity = ProcessIdentity.of(process.pid)
    try:
        assert identity is not None
        assert identity.lives()
    finally:
        process.kill()
    until(lambda: not identity.lives(), every=0.01)
    # Until here nobody has asked for its end: it is a zombie.
    process.wait()
    assert not identity.lives()
    assert ProcessIdentity.of(process.pid) is None


@LINUX
def test_it_is_the_kernels_count_of_ticks_and_the_id_of_the_boot() -> None:
    me = ProcessIdentity.current()
    assert me.pid == os.getpid()
    assert str(me.started) == Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    assert me.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


@LINUX
def test_another_process_of_the_same_number_is_another() -> None:
    me = ProcessIdentity.current()
    assert me.started is not None
    assert not replace(me, started=me.started - 1).lives()
    assert not replace(me, boot="0" * 32).lives()


@LINUX
def test_a_name_with_parentheses_and_blanks_is_read_past(tmp_path: Path) -> None:
    program = tmp_path / "a ) S 1 ("
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "600"])
    try:
        found = ProcessIdentity.of(process.pid)
        assert found is not None
        assert found.started is not None
        assert found.started >= (ProcessIdentity.current().started or 0)
    finally:
        process.kill()
        process.wait()


def test_a_record_of_an_earlier_version_is_a_number_alone_and_whoever_has_it_is_meant() -> None:
    assert ProcessIdentity.parse(f"{os.getpid()}\n") == ProcessIdentity(os.getpid())
    assert ProcessIdentity(os.getpid()).lives()
    assert not ProcessIdentity(999_999_999).lives()
    assert not ProcessIdentity(2**70).lives()


@pytest.mark.parametrize("text", ["", "x", "-1", "1.2", "1.x.y", "1.2.3.4", "²"])
def test_what_is_no_identity_is_none(text: str) -> None:
    assert ProcessIdentity.parse(text) is None


@given(st.integers(0), st.one_of(st.none(), st.tuples(st.integers(0), st.text("0123456789abcdef"))))
def test_an_identity_is_read_back_as_it_was_written(pid: int, start: tuple[int, str] | None) -> None:
    identity = ProcessIdentity(pid, *(start or (None, None)))
    assert ProcessIdentity.parse(identity.text) == identity
    assert not set(identity.text) & set("/:-% ")


def test_what_a_killed_process_left_goes_when_a_scratch_folder_is_made_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, living = tmp_path / f"proof-{ended.pid}-abc", tmp_path / f"proof-{os.getpid()}-abc"
    other = tmp_path / f"as-of-{ended.pid}-abc"
    for folder in (left, living, other):
        folder.mkdir()
        (folder / "customers.parquet").write_bytes(b"rows")
    (tmp_path / "spark-connect.json").touch()
    with scratch_folder(tmp_path, "proof-") as made:
        assert made.name.startswith(f"proof-{ProcessIdentity.current().text}-")
        assert not left.exists() and other.exists()
        remove_all_left_behind(tmp_path)
        assert not other.exists() and made.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [living.name, "spark-connect.json"]
