"""What a local file is a copy of: noted in extended attributes of the file.

On a file system without attributes, files are uploaded or downloaded once more than necessary.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from omnisupport_ingest.storage import DRAFTS

_OBJECTS = "user.omnisupport.objects"
"""Extended attribute of a local file: the keys of the objects with the same bytes. All hard links of a file
share it."""
_VERSION = "user.omnisupport.version"

_READ_SECONDS = 3600.0
"""Age of the noted time of reading from which a read is noted again."""

_DRAFT = re.compile(rf"/{DRAFTS}/[0-9a-f]{{32}}/")
"""Matches the key of a draft (``lake.drafts``). The whole path counts, because a source or a table may have
the name of that folder."""


def objects_of(file: Path) -> list[str]:
    """Return the keys of the objects that have the bytes of ``file``, as far as noted. Raises
    ``FileNotFoundError``."""
    return (_attribute(file, _OBJECTS) or "").split()


def has_object(file: Path, key: str) -> bool:
    """Whether it is noted that the object ``key`` has the bytes of ``file``. A key may contain blanks. Raises
    ``FileNotFoundError``."""
    return f" {key} " in f" {_attribute(file, _OBJECTS)} "


def version_of(copy: Path) -> str | None:
    """Return the version of the object of which ``copy`` is a copy; None if it is not noted. Raises
    ``FileNotFoundError``."""
    return _attribute(copy, _VERSION)


def note_copy(copy: Path, key: str, version: str) -> None:
    """Note that ``copy`` has the bytes of the object ``key`` in this version."""
    _set_attribute(copy, _OBJECTS, key)
    _set_attribute(copy, _VERSION, version)


def note_object(file: Path, key: str) -> None:
    """Note that the object ``key``, too, has the bytes of ``file``."""
    # The key of a draft is left out: a draft is deleted soon.
    stay = [each for each in objects_of(file) if _DRAFT.search(each) is None]
    _set_attribute(file, _OBJECTS, " ".join([*stay, key]))


def note_read(copy: Path) -> None:
    """Give ``copy`` a new time of reading if its last one is old, so that the sweep of another process does
    not take it before it is opened. File systems do not note each read, with ``noatime`` none."""
    with contextlib.suppress(OSError):
        found = copy.stat()
        if max(found.st_mtime, found.st_atime) < time.time() - _READ_SECONDS:
            os.utime(copy, ns=(time.time_ns(), found.st_mtime_ns))


def _attribute(path: Path, name: str) -> str | None:
    try:
        return os.getxattr(path, name).decode()
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _set_attribute(path: Path, name: str, value: str) -> None:
    with contextlib.suppress(OSError):
        os.setxattr(path, name, value.encode())
