"""How a command ends: with an exit code and, for an error, the problem and the fix, without a traceback.

An ``IngestError`` has an exit code of its own; ``EXIT_CODES`` says what each code means.
"""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import click
from pydantic import ValidationError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.spark_errors import name_spark_error
from omnisupport_ingest.settings import PREFIX, Settings

FINDINGS = 1
"""The command did its work, and found something that a person must look at: a difference, damage, a refused
file."""

WARNED = 8
"""A look found a warning, and an option requested this exit code for it."""

UNEXPECTED_EXIT_CODE = 70
"""For an error that the program did not expect (``EX_SOFTWARE`` of BSD's ``sysexits.h``)."""

INTERRUPTED_EXIT_CODE = 130
"""After Ctrl-C: 128 + SIGINT, as in a shell."""


class ExitCode(NamedTuple):
    """The meaning of an exit code: a ``word`` or two, and the full text."""

    word: str
    meaning: str


EXIT_CODES = {
    0: ExitCode("done", "done, and nothing found; `up` and `capture` after Ctrl-C"),
    1: ExitCode(
        "a problem",
        "a problem that is named with its fix; or something was found: a difference, damage, a refused file, "
        "a capture that has failed",
    ),
    2: ExitCode("wrong input", "wrong usage, setting, contract, seed manifest or connection string"),
    3: ExitCode("the home", "the home is not there, does not fit, or has a file that cannot be used"),
    4: ExitCode(
        "missing or silent",
        "something needed is missing, unusable or does not answer: Java, PostgreSQL, Spark, Kafka, an object "
        "store, a library, a disk",
    ),
    5: ExitCode("not set up", "a source or target is not set up, or refuses; a port is taken"),
    6: ExitCode("in use", "in use: home, slot, capture"),
    7: ExitCode(
        "a gap, or a service",
        "a gap in the source, or another source; a service of `up`, `demo` or `tune` failed",
    ),
    WARNED: ExitCode("a warning", "a warning, where `status --strict` asks for it"),
    UNEXPECTED_EXIT_CODE: ExitCode("not foreseen", "an error that was not foreseen; `--debug` shows more"),
    INTERRUPTED_EXIT_CODE: ExitCode("Ctrl-C", "Ctrl-C"),
}

NAMED_LOG: ContextVar[str | None] = ContextVar("named_log", default=None)
"""The log that the command names, if it is not the home's own. The fixes of errors are written for the home's
own source; a note then names this log."""


class SettingsRefused(IngestError):
    """A variable or a line of ``.env`` has a value that its setting cannot have.

    Fix: Correct the value; ``omnisupport-ingest settings`` lists every setting.
    """

    exit_code = 2


class HomeMissing(IngestError):
    """There is no home in the folder, and this command makes none.

    Fix: Set ``OMNISUPPORT_HOME`` to your home, or make one with ``omnisupport-ingest up``.
    """

    exit_code = 3


def report(error: BaseException, *, debug: bool) -> int:
    """Print ``error`` on standard error and return the exit code of the command."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.exceptions.Abort)):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED_EXIT_CODE
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True)
    known = _known(error)
    if known is None:
        click.echo(_unexpected(error), err=True)
        return UNEXPECTED_EXIT_CODE
    click.echo(f"Error: {known}", err=True)
    if name := NAMED_LOG.get():
        NAMED_LOG.set(None)
        click.echo(
            f"Note: this concerns the source {name}: add that name to the commands above. Its connection is "
            "its own (sources list), not OMNISUPPORT_SOURCE_DSN.",
            err=True,
        )
    return known.exit_code


_OF_DAMAGE = frozenset({"DeltaError", "ArrowInvalid", "InvalidInputException", "IOException"})
_READERS = frozenset({"deltalake", "_internal", "pyarrow", "duckdb", "_duckdb"})
"""Class and package of the errors that readers raise for a damaged file. Named as texts, because importing
them takes a second."""


def _known(error: BaseException) -> IngestError | None:
    if isinstance(error, IngestError):
        return error
    if isinstance(error, ValidationError) and error.title == "Settings":
        # Only the name and the rule are shown: the value may be a password.
        faults = "; ".join(f"{PREFIX}{_name(fault['loc'])}: {fault['msg']}" for fault in error.errors())
        return SettingsRefused(
            f"Settings that cannot be used: {faults}.",
            fix="Correct the variable, or its line in .env; `omnisupport-ingest settings` lists them all.",
        )
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


def _unexpected(error: BaseException) -> str:
    # The exception's message is left out: a driver's message may quote a row.
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" in {last[0].name} ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    return (
        f"Error: unexpected {type(error).__name__}{where}.\n"
        "Fix: Run the command again as `omnisupport-ingest --debug …` and report the traceback."
    )


def _at(error: OSError) -> str:
    return f" at {error.filename}" if error.filename else ""


def _name(location: tuple[int | str, ...]) -> str:
    return "_".join(str(part) for part in location).upper()
