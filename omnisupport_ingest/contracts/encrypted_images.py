"""Encrypt the personal part of row images before they land, and decrypt it with the key.

A landed image is a flat JSON object. In an encrypted image the readable members stay as they are. The text of
all other members is encrypted by the key of their subject and becomes the last member:
``"encrypted:1":"<base64 of key id, nonce and AES-GCM body>"``, empty where the key was destroyed before. So
an image costs one call of the cipher, however many columns are personal, and only the holder of the key sees
which of them are NULL.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cryptography.exceptions import InvalidTag

from omnisupport_ingest.contracts.flat_images import MEMBER_VALUE
from omnisupport_ingest.contracts.recent_keys import ID_BYTES
from omnisupport_ingest.contracts.subject_ciphers import SubjectKey, encrypt_each
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, texts_only
from omnisupport_ingest.json_values import compact

MEMBER = "encrypted:1"
"""Name of the encrypted member; the number is the version of its format."""

MARK = f'"{MEMBER}":"'
"""Occurs in every encrypted image and in no other: inside a JSON text the quotes would be escaped."""

_ID_CHARACTERS = ID_BYTES * 4 // 3
_REGEXES = 1_000

_WHOLE = "\0"
"""Prefix of an encrypted text that is a whole image, no object. No text of PostgreSQL has this character."""


class EncryptedValueDamaged(IngestError):
    """A value that landed encrypted cannot be decrypted with its key: the file that has it was changed or
    damaged.

    Fix: Find the file with ``omnisupport-ingest landing verify`` and restore it from a backup.
    """

    exit_code = 3


@dataclass(frozen=True)
class Split:
    """How the images of one table are divided: the ``readable`` columns, and the ``subject`` column among
    them."""

    readable: frozenset[str]
    subject: str


KeysOf = Callable[[Sequence[tuple[bool, str]]], Sequence[SubjectKey]]
"""Returns the keys of distinct subjects, each given as a pair: True and the text of the subject's column, or
False and the text of the row's key."""


@dataclass(frozen=True, slots=True)
class Whose:
    """The subjects of some images.

    ``distinct``: each subject once, as ``KeysOf`` takes it. ``places``: for each image the index of its
    subject in ``distinct``.
    """

    distinct: list[tuple[bool, str]]
    places: list[int]

    @classmethod
    def listed(cls, whose: Iterable[tuple[bool, str]]) -> Self:
        """Return the subjects of images, from one entry per image as ``KeysOf`` takes it."""
        found: dict[tuple[bool, str], int] = {}
        places = [found.setdefault(each, len(found)) for each in whose]
        return cls([*found], places)

    @classmethod
    def said(cls, subjects: pa.StringArray, rows: pa.StringArray) -> Self:
        """Return the subjects of images, from what their subject columns say.

        ``subjects``: the text within JSON quotes; null if the image names no subject. Then its row is the
        subject, by the key in ``rows``.
        """
        named = subjects.dictionary_encode()
        texts: list[str] = named.dictionary.to_pylist()
        if any("\\" in each for each in texts):
            # One subject may be spelled in two ways, so decode the texts.
            return cls.listed(
                (True, str(json.loads(f'"{subject}"'))) if subject is not None else (False, row or "")
                for subject, row in zip(subjects.to_pylist(), rows.to_pylist(), strict=True)
            )
        distinct, places = [(True, each) for each in texts], named.indices
        if subjects.null_count:
            silent = subjects.is_null()
            own = pc.fill_null(rows.filter(silent), "").dictionary_encode()
            places = pc.replace_with_mask(
                places, silent, pc.add(own.indices, pa.scalar(len(distinct), pa.int32()))
            )
            distinct += [(False, each) for each in own.dictionary.to_pylist()]
        return cls(distinct, places.to_pylist())


def encrypt_images(
    images: pa.StringArray, rows: pa.StringArray, split: Split, of: bytes, keys_of: KeysOf
) -> pa.StringArray:
    """Encrypt what is not readable in each of ``images`` of the table ``of``.

    ``rows``: the key of each image's row. A row whose image names no subject is its own subject, by this key.
    The result depends on the image and its row alone, whatever other images come with it. An image that is no
    object of texts is encrypted whole, as text.
    """
    done: list[str | None] = [None] * len(images)
    places = np.flatnonzero(np.asarray(images.is_valid()))
    while len(places):
        first = images[places[0]].as_py()
        names = _names(first)
        left = images if len(places) == len(images) else images.take(pa.array(places))
        if not names or not (alike := np.asarray(pc.match_substring_regex(left, _proof(names))))[0]:
            done[places[0]] = _one(first, rows[places[0]].as_py(), split, of, keys_of)
            places = places[1:]
            continue
        here, places = places[alike], places[~alike]
        whole = len(here) == len(images)
        chosen, of_rows = (each if whole else each.take(pa.array(here)) for each in (images, rows))
        encrypted = _alike(chosen, of_rows, names, split).encrypted(of, keys_of)
        if whole:
            return encrypted
        for place, text in zip(here.tolist(), encrypted.to_pylist(), strict=True):
            done[place] = text
    return pa.array(done, pa.string())


def encrypt_divided(
    readable: pa.StringArray, hidden: pa.StringArray, whose: Whose, of: bytes, keys_of: KeysOf
) -> pa.StringArray:
    """Encrypt images that come divided, as ``encrypt_images`` does.

    ``readable`` and ``hidden``: flat, compact JSON objects with different names; the hidden ones are not
    empty.
    """
    # A member ends in a quote or in null, so this trims only the braces of the object.
    return _Parts(pc.ascii_trim(readable, "{}"), pc.ascii_trim(hidden, "{}"), whose).encrypted(of, keys_of)


def encrypt_whole(
    texts: Sequence[str], whose: Sequence[tuple[bool, str]], of: bytes, keys_of: KeysOf
) -> list[str]:
    """Encrypt each of ``texts`` whole, whatever it is. ``whose``: the subjects, as ``keys_of`` takes them."""
    whole = pa.array([_WHOLE + each for each in texts], pa.string())
    found: list[str] = _Parts(None, whole, Whose.listed(whose)).encrypted(of, keys_of).to_pylist()
    return found


def key_id(image: str) -> bytes | None:
    """Return the id of the key that an encrypted image names; None if the image landed after its
    destruction."""
    body = image.rpartition(MARK)[2]
    return None if body.startswith('"') else binascii.a2b_base64(body[:_ID_CHARACTERS])


def decrypted(image: str, key: SubjectKey, of: bytes) -> str:
    """Return an encrypted image of the table ``of`` as it was received, except for the order of its members.

    Raises ``EncryptedValueDamaged`` if ``key`` does not decrypt it.
    """
    head, _, tail = image.rpartition(MARK)
    try:
        body = binascii.a2b_base64(tail[:-2])
        text = key.decrypted(body[ID_BYTES:], of).decode()
    except (InvalidTag, ValueError):
        raise EncryptedValueDamaged(
            f"An image of {of.decode()} that landed encrypted is not what its key encrypted.",
            fix="Compare landing with its manifests: omnisupport-ingest landing verify. Nothing was changed.",
        ) from None
    return text.removeprefix(_WHOLE) if text.startswith(_WHOLE) else f"{head}{text}}}"


def without_values(image: str, columns: Sequence[str], unsent: Sequence[str] | None) -> str:
    """Return an encrypted image whose key is gone, with NULL in each of ``columns`` that was sent."""
    head = image.rpartition(MARK)[0]
    row = json.loads(head.removesuffix(",") + "}")
    gone = {name: None for name in columns if name not in row and name not in (unsent or ())}
    return compact(row | gone)


def _names(image: str) -> tuple[str, ...] | None:
    """Return the names of the members of ``image``; None if it is no object of texts or repeats a name."""
    try:
        pairs = json.loads(image, object_pairs_hook=lambda found: [*found])
    except (ValueError, RecursionError):
        return None
    if not image.startswith("{"):
        return None
    names = tuple(name for name, _ in pairs)
    return names if len(set(names)) == len(names) and MEMBER not in names else None


@lru_cache(_REGEXES)
def _proof(names: tuple[str, ...]) -> str:
    """Return the regular expression of flat images that have exactly ``names`` in this order."""
    members = (f"{re.escape(_name(each))}:{MEMBER_VALUE}" for each in names)
    return rf"\A\{{{','.join(members)}\}}\z"


def _name(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _runs(names: Sequence[str], split: Split) -> list[tuple[str, str]]:
    """Return the runs of ``names`` that are treated alike: ``shown``, ``subject`` or ``hidden``, and the text
    that begins the run."""
    runs: list[tuple[str, str]] = []
    for name in names:
        kind = "subject" if name == split.subject else "shown" if name in split.readable else "hidden"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, f",{_name(name)}:"))
    return runs


@dataclass(frozen=True, slots=True)
class _Parts:
    """Divided images.

    ``shown``, ``hidden``: their members of each kind, as text; None if no image has any. ``whose``: their
    subjects.
    """

    shown: pa.StringArray | None
    hidden: pa.StringArray | None
    whose: Whose

    def encrypted(self, of: bytes, keys_of: KeysOf) -> pa.StringArray:
        if self.hidden is None:
            return pc.binary_join_element_wise("{", self.shown, "}", "")
        keys = keys_of(self.whose.distinct)
        bodies = encrypt_each(map(keys.__getitem__, self.whose.places), self.hidden, of)
        if self.shown is None:
            return pc.binary_join_element_wise(f"{{{MARK}", bodies, '"}', "")
        empty = pc.equal(self.shown, "")
        comma = pc.if_else(empty, "", ",") if empty.true_count else ","
        return pc.binary_join_element_wise("{", self.shown, comma, MARK, bodies, '"}', "")


def _alike(images: pa.StringArray, rows: pa.StringArray, names: Sequence[str], split: Split) -> _Parts:
    """Divide images that are proven to have exactly ``names`` in this order, by whole columns.

    ``,"name":`` always begins a member: inside a text the quotes would be escaped. A member ends in a quote
    or in ``null``, so only the braces of the object are trimmed.
    """
    rest = pc.ascii_trim(images, "{}")
    firsts = pa.array(np.arange(len(images)) * 2)
    runs = _runs(names, split)
    found: list[tuple[str, str, pa.StringArray]] = []
    for (kind, begin), following in zip(runs, [*runs[1:], None], strict=True):
        # The text of the first run still has its name.
        name, text = begin[1:] if found else "", rest
        if following is not None:
            both = pc.split_pattern(rest, pattern=following[1], max_splits=1).flatten()
            text, rest = both.take(firsts), both.take(pc.add(firsts, 1))
        found.append((kind, name, text))
    values: list[str | None] = [None] * len(images)
    for (kind, name, text), (_, begin) in zip(found, runs, strict=True):
        if kind == "subject":
            skipped = 0 if name else len(begin) - 1
            values = [_value(each[skipped:]) for each in text.to_pylist()]
    whose = [
        (True, value) if value is not None else (False, rows[place].as_py() or "")
        for place, value in enumerate(values)
    ]
    shown = [(name, text) for kind, name, text in found if kind != "hidden"]
    hidden = [(name, text) for kind, name, text in found if kind == "hidden"]
    return _Parts(_joined(shown), _joined(hidden), Whose.listed(whose))


def _joined(runs: Sequence[tuple[str, pa.StringArray]]) -> pa.StringArray | None:
    if not runs:
        return None
    pieces: list[object] = []
    for name, text in runs:
        pieces += [f",{name}" if pieces else name, text]
    return pc.binary_join_element_wise(*pieces, "")


def _value(text: str) -> str | None:
    """Return the value of the JSON text ``"text"``; None for ``null``."""
    if "\\" in text:
        value: str = json.loads(text)
        return value
    return text[1:-1] if text.startswith('"') else None


def _one(image: str, row: str | None, split: Split, of: bytes, keys_of: KeysOf) -> str:
    """Encrypt an image that is not flat and compact: one that another program wrote, or a text that is no
    image."""
    try:
        read = texts_only(image)
    except Unreadable:
        read = None
    if not isinstance(read, dict):
        return encrypt_whole([image], [(False, row or "")], of, keys_of)[0]
    shown = {name: value for name, value in read.items() if name in split.readable}
    hidden = {name: value for name, value in read.items() if name not in split.readable}
    text = compact(shown)
    if not hidden:
        return text
    value = shown.get(split.subject)
    whose = Whose.listed([(True, str(value)) if value is not None else (False, row or "")])
    inner = compact(hidden)[1:-1]
    parts = _Parts(pa.array([text[1:-1]]), pa.array([inner]), whose)
    found: str = parts.encrypted(of, keys_of)[0].as_py()
    return found
