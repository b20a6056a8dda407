"""Says of any error what a person may know of it: problem and fix, or at least its class and place.

The text of an error that is not the program's own is never repeated: a driver's or a library's may quote a
row.
"""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.spark_errors import name_spark_error
from omnisupport_ingest.settings import Settings

_OF_DAMAGE = frozenset({"DeltaError", "ArrowInvalid", "InvalidInputException", "IOException"})
_READERS = frozenset({"deltalake", "_internal", "pyarrow", "duckdb", "_duckdb"})
"""Class and package of the errors that readers raise for a damaged file. Named as texts, because importing
them takes a second."""

_OURS = Path(__file__).parents[1]


def known_error(error: BaseException) -> IngestError | None:
    """Return what is wrong and how to fix it; None if the program does not know the error."""
    if isinstance(error, IngestError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return IngestError(
            f"No space left on the disk{_at(error)}.",
            fix="Free some space and run the same command again: it continues where it stopped.",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return IngestError(
            f"Not permitted: {os.strerror(error.errno)}{_at(error)}.",
            fix="Give this user the right, or set OMNISUPPORT_HOME to a folder it may write.",
        )
    classes = type(error).__mro__
    if any(of.__name__ in _OF_DAMAGE and of.__module__.partition(".")[0] in _READERS for of in classes):
        return IngestError(
            f"A table or a file cannot be read ({type(error).__name__}).",
            fix="omnisupport-ingest doctor names a damaged one: restore it from a backup. If it names none, "
            "run the command again as `omnisupport-ingest --debug …` and report the traceback.",
        )
    with suppress(ValidationError, IngestError):
        return name_spark_error(error, Settings())
    return None


def what_and_where(error: BaseException) -> str:
    """Return the class of ``error``, where it was raised, and which code of this program led there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename).is_relative_to(_OURS)]
    named = dict.fromkeys(
        f"{each.name} ({Path(each.filename).name}:{each.lineno})" for each in (*frames[-1:], *ours[-1:])
    )
    return f"unexpected {type(error).__name__}{''.join(f' in {each}' for each in named)}"


def _at(error: OSError) -> str:
    return f" at {error.filename}" if error.filename else ""
