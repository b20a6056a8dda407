"""Large blocks of images that another process encrypts: the same as here, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from omnisupport_ingest.contracts.encrypted_images import Whose, decrypted, encrypt_divided, key_id
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.sources.encrypting_apart import LEAST_ROWS, EncryptingProcess, KnownKeys
from omnisupport_ingest_tests.waiting import until

TABLE, SUBJECT = "public.customers", "customer"


def block(first: int, rows: int = LEAST_ROWS) -> pa.Table:
    """Images of ``rows`` customers; every tenth does not say whose it is."""
    numbers = range(first, first + rows)
    return pa.table(
        {
            "after": [json.dumps({"id": str(each)}, separators=(",", ":")) for each in numbers],
            "after_hidden": [f'{{"email":"{each}@example.org"}}' for each in numbers],
            "after_subject": [None if each % 10 == 0 else str(each) for each in numbers],
            "key": [f'["{each}"]' for each in numbers],
        }
    )


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys(tmp_path / "keys" / "subjects.sqlite")


@pytest.fixture
def apart(keys: SubjectKeys) -> Iterator[EncryptingProcess]:
    with closing(EncryptingProcess("desk", keys)) as process:
        yield process


def answered(apart: EncryptingProcess, images: pa.Table) -> pa.StringArray:
    """What the process makes of ``images``, once it is there."""
    return until(lambda: apart.encrypted(TABLE, SUBJECT, images))


def until_ended(process: psutil.Process) -> None:
    """Wait until ``process`` has ended; its exit code is left for who started it."""
    try:
        # A process of which only the first thread has ended is a zombie, too, and still holds its pipes.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        until(lambda: os.waitid(os.P_PID, process.pid, ended) is not None)
    except AssertionError as late:
        waits = [Path(f"/proc/{process.pid}/task/{each.id}/wchan").read_text() for each in process.threads()]
        raise AssertionError(f"{late}\nIts threads wait in {waits}, after {process.cpu_times()}.") from None


def test_it_encrypts_as_the_caller_does_and_by_the_same_keys(
    keys: SubjectKeys, apart: EncryptingProcess
) -> None:
    for first in (0, LEAST_ROWS // 2):
        images = block(first)
        there = answered(apart, images)
        readable, hidden, subjects, rows = (each.combine_chunks() for each in images.columns)
        keys_of = partial(KnownKeys("desk", keys).of, TABLE, SUBJECT)
        here = encrypt_divided(readable, hidden, Whose.said(subjects, rows), TABLE.encode(), keys_of)
        assert there.equals(here)
        assert "example.org" not in "".join(there.to_pylist())
        image = there[1].as_py()
        (key,) = keys.by_id([key_id(image) or b""]).values()
        assert json.loads(decrypted(image, key, TABLE.encode()))["email"] == f"{first + 1}@example.org"


def test_small_blocks_are_left_to_the_caller(apart: EncryptingProcess) -> None:
    assert apart.encrypted(TABLE, SUBJECT, block(0, LEAST_ROWS - 1)) is None
    assert apart.pid is None


def test_a_process_that_dies_is_missed_by_one_block_and_another_takes_its_place(
    apart: EncryptingProcess,
) -> None:
    answered(apart, block(0))
    first = psutil.Process(apart.pid)
    first.kill()
    until_ended(first)
    assert apart.encrypted(TABLE, SUBJECT, block(0)) is None
    assert len(answered(apart, block(0))) == LEAST_ROWS
    assert apart.pid != first.pid


def test_one_that_always_fails_is_not_started_for_ever(tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    with closing(EncryptingProcess("desk", SubjectKeys(no_folder / "subjects.sqlite"))) as apart:
        for _ in range(3):
            assert apart.encrypted(TABLE, SUBJECT, block(0)) is None
            until_ended(psutil.Process(apart.pid))
            assert apart.encrypted(TABLE, SUBJECT, block(0)) is None
        assert apart.encrypted(TABLE, SUBJECT, block(0)) is None
        assert apart.pid is None


@pytest.mark.full
def test_it_ends_when_it_is_idle_and_is_there_again_for_the_next_large_block(keys: SubjectKeys) -> None:
    with closing(EncryptingProcess("desk", keys, idle_seconds=0.2)) as apart:
        answered(apart, block(0))
        idle = psutil.Process(apart.pid)
        until_ended(idle)
        assert len(answered(apart, block(0))) == LEAST_ROWS
    assert apart.pid is None


@pytest.mark.full
def test_it_ends_with_a_capture_that_is_killed(keys: SubjectKeys) -> None:
    program = f"""
import sys, time
from pathlib import Path
from omnisupport_ingest_tests.sources.test_encrypting_apart import answered, block
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.sources.encrypting_apart import EncryptingProcess
apart = EncryptingProcess("desk", SubjectKeys(Path({str(keys.path)!r})))
answered(apart, block(0))
print(apart.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as capture:
        assert capture.stdout is not None
        pid = int(capture.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(capture.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
