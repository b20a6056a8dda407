"""Sockets and temporary files stand where no other user of the machine can look, and do not pile up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnisupport_ingest.runtime.private_folders import (
    NoScratch,
    Scratch,
    remove_socket_folder,
    socket_answers,
    socket_folder,
)
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.other_user import NOBODY, as_another_user, open_folder

pytestmark = pytest.mark.full

_HOLDS = """
import sys
from pathlib import Path
from omnisupport_ingest.runtime.private_folders import Scratch
from omnisupport_ingest.settings import Settings
scratch = Scratch.take(Settings(home=Path(sys.argv[1])))
(scratch.path / "shuffle").write_text("rows")
print(scratch.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def a_process_with_scratch(home: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.communicate()


def test_what_spark_spills_is_the_owners_alone_whatever_the_umask() -> None:
    with open_folder() as folder:
        before = os.umask(0)
        try:
            scratch = Scratch.take(Settings(spark_local_dir=folder, _env_file=None))
        finally:
            os.umask(before)
        (scratch.path / "shuffle").write_text("rows")
        (scratch.path / "shuffle").chmod(0o666)
        assert as_another_user(lambda: [each.name for each in folder.iterdir()]) == [scratch.path.name]
        assert as_another_user(lambda: [each.name for each in scratch.path.iterdir()]) == "PermissionError"
        assert as_another_user((scratch.path / "shuffle").read_text) == "PermissionError"
        scratch.remove()
        assert list(folder.iterdir()) == []


def test_by_default_it_is_in_the_home(tmp_path: Path) -> None:
    scratch = Scratch.take(Settings(home=tmp_path / "home", _env_file=None))
    assert scratch.path.parent == tmp_path / "home" / "run"
    scratch.remove()


def test_what_a_killed_process_left_goes_at_the_next_start_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with a_process_with_scratch(home) as (killed, left), a_process_with_scratch(home) as (_, kept):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "shuffle").exists()
        scratch = Scratch.take(Settings(home=home, _env_file=None))
        assert not left.exists()
        assert (kept / "shuffle").read_text() == "rows"
        scratch.remove()


def test_folders_of_other_users_and_links_are_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    strange, target = tmp_path / "omnisupport-spark-strange", tmp_path / "target"
    for folder in (strange, target):
        folder.mkdir(mode=0o700)
        (folder / "file").touch()
    os.chown(strange, NOBODY, NOBODY)
    (tmp_path / "omnisupport-spark-link").symlink_to(target)
    Scratch.take(Settings(spark_local_dir=tmp_path, _env_file=None)).remove()
    assert (strange / "file").exists()
    assert (target / "file").exists()


def test_a_folder_that_is_not_there_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(NoScratch) as told:
        Scratch.take(Settings(spark_local_dir=tmp_path / "gone", _env_file=None))
    assert str(tmp_path / "gone") in told.value.problem
    assert "OMNISUPPORT_SPARK_LOCAL_DIR" in told.value.fix


def test_sockets_stand_in_the_home_unless_its_path_is_too_long_for_one(tmp_path: Path) -> None:
    short = Path("/tmp/home/run")
    assert socket_folder(short) == short
    run = tmp_path / ("long" * 30)
    run.mkdir()
    folder = socket_folder(run)
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "dagster-code-server.sock"))
        server.listen()
        assert socket_answers(folder / "dagster-code-server.sock")
    assert not socket_answers(folder / "dagster-code-server.sock")
    assert socket_folder(run) == folder, "the next start finds it again"
    remove_socket_folder(run)
    assert not folder.exists()
    again = socket_folder(run)
    assert again.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        # Somebody else made a folder of that name after the machine had swept its temporary folder.
        os.chown(again, NOBODY, NOBODY)
        assert socket_folder(run) != again
        again.rmdir()
    remove_socket_folder(run)
