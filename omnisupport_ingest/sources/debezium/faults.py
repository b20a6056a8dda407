"""Errors of a file of events or of one of its lines. Their messages never contain a value."""

from __future__ import annotations

from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged
from omnisupport_ingest.errors import IngestError


class FileRefused(IngestError):
    """A file of events cannot land. Nothing of it has landed.

    Fix: Correct the line that the message names, and give the file again.
    """


class FileChanged(FileRefused):
    """A file was written to or replaced while it was read. Nothing of it has landed, and it stays where it
    is.

    Fix: Land it when its writer has finished.
    """


class SourceTakesNoFiles(FileRefused):
    """A source takes no files of events: capture or another way in feeds it, or no contract names it.

    Fix: Land them as a source of their own: contracts with another ``x-cdc.source``.
    """

    exit_code = 2


class FilesPaused(IngestError):
    """Somebody has paused a source of files. Nothing of the file has landed, and it stays where it is.

    Fix: End the pause: ``omnisupport-ingest source resume NAME``.
    """


class LineFault(ValueError):
    """Raised for a line that cannot land: the problem, and a fix that a person can carry out."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


class NoEvent(LineFault):
    """A line that is not recognisably an event. A file with nothing but such lines is no file of events."""


class AnotherLife(LineFault):
    """A line that shows that its connector was set up anew, which a person must confirm: it is never an odd
    line among others."""


class TableParked(LineFault):
    """A line of a table that is left out until its contract has the key of what has landed of it. It is never
    an odd line: it lands when the contract is right. ``table``: its full name; ``why``: the error to raise
    where nothing else can go on."""

    def __init__(self, table: str, why: LandedKeyChanged) -> None:
        super().__init__(why.problem, why.fix)
        self.table, self.why = table, why


class ValueFault(ValueError):
    """Raised for a value that its column's type cannot hold.

    The message gives the reason without the value.
    """
