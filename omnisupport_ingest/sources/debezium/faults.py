"""What is wrong with a file of events or with one of its lines; never with a value in the message."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class FileRefused(IngestError):
    """A file that does not land. Nothing of it has landed."""


class SourceRefused(FileRefused):
    """A source that takes no files of events, whatever is in them."""

    exit_code = 2


class LineFault(ValueError):
    """A line that is no event that can land: what is wrong, and the fix a person can carry out."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


class AnotherLife(LineFault):
    """A line that shows that its connector was set up anew, which a person must confirm: it is never an odd
    line among others."""


class ValueFault(ValueError):
    """A value that is no value of its column's type; the message says why, without the value."""
