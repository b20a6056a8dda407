"""How a command ends: with an exit code and, for an error, the problem and the fix, without a traceback.

An ``IngestError`` has an exit code of its own; ``EXIT_CODES`` says what each code means.
"""

from __future__ import annotations

import re
import traceback
from contextvars import ContextVar
from typing import NamedTuple

import click
from pydantic import ValidationError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.known_errors import known_error, what_and_where
from omnisupport_ingest.settings import PREFIX

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
        "a contract that `contracts validate` finds wrong, a capture that has failed",
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
    name = NAMED_LOG.get()
    NAMED_LOG.set(None)
    if name is not None and not re.search(rf"\b{re.escape(name)}\b", known.fix):
        click.echo(
            f"Note: this concerns the source {name}: add that name to the commands above. Its connection is "
            "its own (sources list), not OMNISUPPORT_SOURCE_DSN.",
            err=True,
        )
    return known.exit_code


def _known(error: BaseException) -> IngestError | None:
    if isinstance(error, ValidationError) and error.title == "Settings":
        # Only the name and the rule are shown: the value may be a password.
        faults = "; ".join(f"{PREFIX}{_name(fault['loc'])}: {fault['msg']}" for fault in error.errors())
        return SettingsRefused(
            f"Settings that cannot be used: {faults}.",
            fix="Correct the variable, or its line in .env; `omnisupport-ingest settings` lists them all.",
        )
    return known_error(error)


def _unexpected(error: BaseException) -> str:
    return (
        f"Error: {what_and_where(error)}.\n"
        "Fix: Run the command again as `omnisupport-ingest --debug …` and report the traceback."
    )


def _name(location: tuple[int | str, ...]) -> str:
    return "_".join(str(part) for part in location).upper()
