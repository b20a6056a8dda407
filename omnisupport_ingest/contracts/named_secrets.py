"""Secrets that a definition names by a variable or a private file, and never contains."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Self

from omnisupport_ingest.contracts.documents import read_bytes
from omnisupport_ingest.errors import IngestError


class ConnectionMissing(IngestError):
    """The variable or file that a definition names for its connection, or for a secret, is not there, or
    others than its owner may read the file.

    Fix: Set the variable; or write the file, and let nobody but its owner read it (``chmod 600``).
    """

    exit_code = 2


class NamedSecret(str):
    """A secret that knows where a person finds it: ``place``, for messages; a variable, or ``the file …``."""

    __slots__ = ("place",)
    place: str

    def __new__(cls, text: str, place: str = "") -> Self:
        made = super().__new__(cls, text)
        made.place = place
        return made


def secret_in(how: str, name: str, named_by: str, what: str) -> NamedSecret:
    """Return the text in the variable (``how`` is ``env``) or the file (``file``) called ``name``.

    ``named_by``: the definition; ``what``: describes the text, for messages. Raises ``ConnectionMissing``.
    """
    if how == "file":
        return NamedSecret(_of_file(Path(name), named_by, what), f"the file {name}")
    return NamedSecret(_of_variable(name, named_by, what), name)


def _of_variable(name: str, named_by: str, what: str) -> str:
    # Spark's workers import this module and need no settings, which take a third of a second to import.
    from omnisupport_ingest.settings import named_variable

    text = named_variable(name)
    if not text:
        raise ConnectionMissing(
            f"The variable {name}, which {named_by} names for its {what}, is not set.",
            fix=f"Set {name} to the {what}, in the environment or in .env.",
        )
    return text


def _of_file(path: Path, named_by: str, what: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as problem:
        raise ConnectionMissing(
            f"{path}, which {named_by} names for its {what}, cannot be read: {problem.strerror}.",
            fix=f"Put the {what} there, in a file that only its owner may read.",
        ) from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConnectionMissing(
            f"{path} holds a {what}, and others than its owner may read it.",
            fix=f"chmod 600 {path}",
        )
    return read_bytes(path, ConnectionMissing).decode("utf-8", "replace").strip()
