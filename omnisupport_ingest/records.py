"""Records on disk: frozen dataclasses, each one JSON document, all written and read here.

A note has no version: programs of other versions read it too, so a member that its class does not have is
passed over, and one that is missing has its default. A record with a version (``Format``) is read as its
version says, and one that is newer than the program is refused. Whoever keeps a document writes the bytes of
``encode`` to its place, at once and durably (``durable``, ``storage``), and names the file and the fix where
it cannot be read.
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
"""A JSON object, parsed."""

MAX_NOTE_BYTES = 16 * 1024 * 1024
"""The largest note that is read."""

_VERSION = "format_version"


def encode(record: object) -> bytes:
    """Return the document of ``record``, a dataclass or members by name, as a file has it.

    What is no character (a byte of a name or of an argument that is not UTF-8) becomes ``?``: it keeps no
    record from being written, nor from being read.
    """
    text = json.dumps(to_plain(record), indent=1, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def encode_line(record: object) -> str:
    """Return the document of ``record``, a dataclass, as one line without its end, as ledgers have it.

    What is no character becomes ``?``, as in ``encode``.
    """
    text = compact(to_plain(record))
    return text.encode(errors="replace").decode()


def read_note(kind: type[T], path: Path) -> T:
    """Return the note of type ``kind`` in the file ``path``.

    Raises:
        OSError: as the system says it, ``FileNotFoundError`` if there is none.
        Unreadable: it is no file, no JSON, or (``FieldProblem``) a field of it is not what it must be.
    """
    return decode_note(kind, read_file(path, limit=MAX_NOTE_BYTES))


def decode_note(kind: type[T], content: bytes | str) -> T:
    """Return the note of type ``kind`` whose document is ``content``; ``Unreadable`` as of ``read_note``."""
    return from_note(kind, parse_json(content))


class NewerFormat(Unreadable):
    """Raised for a record of a newer format version than this program knows."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"has format version {version}; this program reads up to {newest}")


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """The form of the records of one kind, with ``format_version`` among their members.

    ``newest``: the version that this program writes. ``upgrades``: by version, what makes of a document of it
    one of the next version; a version that is not among them has the members of the next one. ``strict``:
    every member is there and known; otherwise members are taken as a note's are.
    """

    kind: type[T]
    newest: int
    upgrades: Mapping[int, Callable[[Document], Document]] = field(default_factory=dict)
    strict: bool = True

    def decode(self, content: bytes | str) -> T:
        """Return the record whose document is ``content``.

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
