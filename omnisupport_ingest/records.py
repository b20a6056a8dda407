"""Records on disk: frozen dataclasses, each one JSON document, all written and read by this module.

A note has no version. Programs of other versions read it too, so a member that its class does not have is
ignored, and a missing one gets its default. A record with a version (``Format``) is read by the rules of its
version; a record that is newer than the program is refused. The caller writes the bytes of ``encode`` to the
file at once and durably (``durable``, ``storage``), and adds file and fix to an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from omnisupport_ingest.foreign import Unreadable, parse_json, read_file
from omnisupport_ingest.json_values import FieldProblem, compact, from_note, from_plain, to_plain

T = TypeVar("T")

Document = dict[str, Any]
"""A parsed JSON object."""

MAX_NOTE_BYTES = 16 * 1024 * 1024
"""The largest note that is read, in bytes."""

_VERSION = "format_version"


def encode(record: object) -> bytes:
    """Return the document of ``record``, a dataclass or members by name, as the bytes of a file.

    A byte that is no character (in a name or argument that is not UTF-8) becomes ``?``, so that the record
    can always be written and read.
    """
    text = json.dumps(to_plain(record), indent=1, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def encode_line(record: object) -> str:
    """Return the document of ``record``, a dataclass, as one line of a ledger, without its end.

    A byte that is no character becomes ``?``, as in ``encode``.
    """
    text = compact(to_plain(record))
    return text.encode(errors="replace").decode()


def read_note(kind: type[T], path: Path) -> T:
    """Return the note of type ``kind`` in the file ``path``.

    Raises:
        OSError: the system's error; ``FileNotFoundError`` if there is no file.
        Unreadable: it is no file or no JSON, or (``FieldProblem``) a field has a wrong value.
    """
    return decode_note(kind, read_file(path, limit=MAX_NOTE_BYTES))


def decode_note(kind: type[T], content: bytes | str) -> T:
    """Return the note of type ``kind`` in the document ``content``. Raises ``Unreadable`` as ``read_note``
    does."""
    return from_note(kind, parse_json(content))


class NewerFormat(Unreadable):
    """Raised for a record of a newer format version than this program knows."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"has format version {version}; this program reads up to {newest}")


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """The format of the records of one kind, which have a member ``format_version``.

    ``newest``: the version that this program writes. ``upgrades``: by version, a function that makes a
    document of the next version; a version that is missing there has the members of the next one. ``strict``:
    every member must be present and known; otherwise members are read like those of a note.
    """

    kind: type[T]
    newest: int
    upgrades: Mapping[int, Callable[[Document], Document]] = field(default_factory=dict)
    strict: bool = True

    def decode(self, content: bytes | str) -> T:
        """Return the record in the document ``content``.

        Raises:
            NewerFormat: its version is above ``newest``.
            Unreadable: it is no such document; ``FieldProblem`` names the field.
        """
        document = parse_json(content)
        version = _version_of(document)
        if version > self.newest:
            raise NewerFormat(version, self.newest)
        for number in range(version, self.newest):
            if number in self.upgrades:
                document = self.upgrades[number](document)
        if not self.strict:
            return from_note(self.kind, document)
        return from_plain(self.kind, document | {_VERSION: self.newest})


def _version_of(document: Any) -> int:
    version = document.get(_VERSION) if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise FieldProblem(_VERSION, "is not a version number")
    return version
