"""Doing something as another user of the machine: one who may enter no folder of ours."""

from __future__ import annotations

# Looked up when a host is named; the other user may not be able to read the modules of this Python.
import encodings.idna  # noqa: F401
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

NOBODY = 65_534


def as_another_user(what: Callable[[], object]) -> object:
    """What ``what`` returns, as JSON, or the name of the error it raises, when another user calls it.

    Skips the test where that cannot be tried: only root may take another user's place.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can try something as another user")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = json.dumps(what())
        except BaseException as error:
            said = json.dumps(type(error).__name__)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; that of pytest is closed, and would hide what stands open in it."""
    folder = Path(tempfile.mkdtemp(prefix="omnisupport-open-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        rmtree(folder)
