"""Row images of which the personal part is encrypted: how they land, and what they are again with the key.

A landed image is a flat JSON object. Of an encrypted one the readable members stay as they are, and all
others, as they stood, are one text that the key of their subject encrypted: the last member,
``"encrypted:1":"<base64 of key id, nonce and AES-GCM body>"``, empty where the key was destroyed before. So
an image costs one call of the cipher, however many columns are personal, and only who has the key sees which
of them are NULL.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from cryptography.exceptions import InvalidTag

from omnisupport_ingest.contracts.flat_images import MEMBER_VALUE
from omnisupport_ingest.contracts.subject_keys import ID_BYTES, SubjectKey
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, texts_only

MEMBER = "encrypted:1"
"""The name of the member; the number is the version of its form."""

MARK = f'"{MEMBER}":"'
"""Stands in an encrypted image, and in no other: within a text of JSON the quotes would be escaped."""

_ID_CHARACTERS = ID_BYTES * 4 // 3
_SUBJECT = "subject"
_REGEXES = 1_000


class EncryptedValueDamaged(IngestError):
    """What landed encrypted is not what its key encrypted."""

    exit_code = 3


@dataclass(frozen=True)
class Split:
    """How the images of one table are divided: the ``readable`` columns, and the ``subject`` among them."""

    readable: frozenset[str]
    subject: str


KeysOf = Callable[[Sequence[tuple[bool, str]]], Sequence[SubjectKey]]
"""The keys of distinct subjects: whether the text is of the subject's column, or else of the row's key; and
the text."""


def encrypt_images(
    images: pa.StringArray, rows: pa.StringArray, split: Split, of: bytes, keys_of: KeysOf
) -> pa.StringArray:
    """Encrypt what is not readable in each of ``images`` of the table ``of``.

    ``rows``: the key of each row, by which it is its own subject where its image does not say whose it is.
    The same image of the same row is the same again, whichever come with it. An image that is no object of
    texts is encrypted whole, as the text it is.
    """
    done: list[str | None] = [None] * len(images)
    places = [place for place, valid in enumerate(images.is_valid().to_pylist()) if valid]
    while places:
        left = images.take(pa.array(places, pa.int64()))
        names = _names(left[0].as_py())
        if not names or not (found := pc.extract_regex(left, _regex(names, split)))[0].is_valid:
            done[places[0]] = _one(left[0].as_py(), rows[places[0]].as_py(), split, of, keys_of)
            places = places[1:]
            continue
        alike = found.is_valid()
        here = [place for place, valid in zip(places, alike.to_pylist(), strict=True) if valid]
        places = [place for place, valid in zip(places, alike.to_pylist(), strict=True) if not valid]
        made = _alike(found.filter(alike), rows.take(pa.array(here, pa.int64())), names, split, of, keys_of)
        for place, text in zip(here, made, strict=True):
            done[place] = text
    return pa.array(done, pa.string())


def key_id(image: str) -> bytes | None:
    """The id of the key that an encrypted image names; null of one that landed after its destruction."""
    body = image.rpartition(MARK)[2]
    return None if body.startswith('"') else binascii.a2b_base64(body[:_ID_CHARACTERS])


def decrypted(image: str, key: SubjectKey, of: bytes) -> str:
    """An encrypted image of the table ``of`` as it was received, but for the order of its members."""
    head, _, tail = image.rpartition(MARK)
    try:
        body = binascii.a2b_base64(tail[:-2])
        text = key.decrypted(body[ID_BYTES:], of).decode()
    except (InvalidTag, ValueError):
        raise EncryptedValueDamaged(
            f"An image of {of.decode()} that landed encrypted is not what its key encrypted.",
            fix="Compare landing with its manifests: omnisupport-ingest landing check. Nothing was changed.",
        ) from None
    return f"{head}{text}}}" if head else text


def without_values(image: str, columns: Sequence[str], unsent: Sequence[str] | None) -> str:
    """An encrypted image of which the key is gone: NULL in each of ``columns`` that was sent."""
    head = image.rpartition(MARK)[0]
    row = json.loads(head.removesuffix(",") + "}") if head else {}
    gone = {name: None for name in columns if name not in row and name not in (unsent or ())}
    return json.dumps(row | gone, ensure_ascii=False, separators=(",", ":"))


def _names(image: str) -> tuple[str, ...] | None:
    """The names of the members of ``image``; null if it is no object of texts, or one stands twice."""
    try:
        pairs = json.loads(image, object_pairs_hook=lambda found: [*found])
    except (ValueError, RecursionError):
        return None
    if not image.startswith("{"):
        return None
    names = tuple(name for name, _ in pairs)
    return names if len(set(names)) == len(names) and MEMBER not in names else None


def _runs(names: Sequence[str], split: Split) -> list[tuple[str, list[str]]]:
    """``names`` in runs of those that are treated alike: ``readable``, ``subject``, ``encrypted``."""
    runs: list[tuple[str, list[str]]] = []
    for name in names:
        kind = _SUBJECT if name == split.subject else "readable" if name in split.readable else "encrypted"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(name)
    return runs


@lru_cache(_REGEXES)
def _regex(names: tuple[str, ...], split: Split) -> str:
    """What matches flat images with just these ``names`` in this order, a group for each run."""
    groups = (
        f"(?P<run{place}>"
        + ",".join(f"{re.escape(json.dumps(each, ensure_ascii=False))}:{MEMBER_VALUE}" for each in run)
        + ")"
        for place, (_, run) in enumerate(_runs(names, split))
    )
    return rf"\A\{{{','.join(groups)}\}}\z"


def _alike(
    found: pa.StructArray,
    rows: pa.StringArray,
    names: tuple[str, ...],
    split: Split,
    of: bytes,
    keys_of: KeysOf,
) -> list[str]:
    """Encrypt images that were ``found`` to be alike."""
    runs = _runs(names, split)
    texts = [found.field(place) for place in range(len(runs))]
    hidden = [text for (kind, _), text in zip(runs, texts, strict=True) if kind == "encrypted"]
    shown = [text for (kind, _), text in zip(runs, texts, strict=True) if kind != "encrypted"]
    if not hidden:
        return [f"{{{text}}}" for text in _joined(shown)]
    subjects = [text for (kind, _), text in zip(runs, texts, strict=True) if kind == _SUBJECT]
    whose = _subjects(subjects[0].to_pylist() if subjects else [None] * len(rows), rows)
    known = dict(zip(distinct := [*dict.fromkeys(whose)], keys_of(distinct), strict=True))
    bodies = [
        _body(known[subject], text.encode(), of) for subject, text in zip(whose, _joined(hidden), strict=True)
    ]
    if not shown:
        return [f'{{{MARK}{body}"}}' for body in bodies]
    return [f'{{{text},{MARK}{body}"}}' for text, body in zip(_joined(shown), bodies, strict=True)]


def _joined(runs: Sequence[pa.StringArray]) -> list[str]:
    joined: list[str] = (runs[0] if len(runs) == 1 else pc.binary_join_element_wise(*runs, ",")).to_pylist()
    return joined


def _subjects(fragments: Sequence[str | None], rows: pa.StringArray) -> list[tuple[bool, str]]:
    """Whose each row is, from the member of the subject's column in its image."""
    found = []
    for place, fragment in enumerate(fragments):
        value = None if fragment is None else _value(fragment)
        found.append((True, value) if value is not None else (False, rows[place].as_py() or ""))
    return found


def _value(member: str) -> str | None:
    """The text in ``"name":"text"``; null of ``"name":null``."""
    if "\\" not in member and member.endswith('"'):
        return member[member.rindex('"', 0, -1) + 1 : -1]
    value: str | None = next(iter(json.loads(f"{{{member}}}").values()))
    return value


def _body(key: SubjectKey, text: bytes, of: bytes) -> str:
    if key.secret is None:
        return ""
    return binascii.b2a_base64(key.encrypted(text, of), newline=False).decode()


def _one(image: str, row: str | None, split: Split, of: bytes, keys_of: KeysOf) -> str:
    """Encrypt an image that is not flat and compact: another program's, or one that is none."""
    try:
        read = texts_only(image)
    except Unreadable:
        read = None
    if not isinstance(read, dict):
        (key,) = keys_of([(False, row or "")])
        return f'{MARK}{_body(key, image.encode(), of)}"}}'
    shown = {name: value for name, value in read.items() if name in split.readable}
    hidden = {name: value for name, value in read.items() if name not in split.readable}
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    if not hidden:
        return text
    value = shown.get(split.subject)
    (key,) = keys_of([(True, str(value)) if value is not None else (False, row or "")])
    inner = json.dumps(hidden, ensure_ascii=False, separators=(",", ":"))[1:-1]
    return f'{text[:-1]}{"," if shown else ""}{MARK}{_body(key, inner.encode(), of)}"}}'
