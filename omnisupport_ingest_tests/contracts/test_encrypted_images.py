"""Images of which a part is encrypted: what is readable, what comes back, what is the same again."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.contracts.encrypted_images import (
    MARK,
    EncryptedValueDamaged,
    Split,
    Whose,
    decrypted,
    encrypt_divided,
    encrypt_images,
    key_id,
    without_values,
)
from omnisupport_ingest.contracts.subject_ciphers import SubjectKey, _in_base64
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest_tests.examples import examples

SPLIT = Split(frozenset(("id", "plan")), "id")
OF = b"public.people"
TEXTS = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=6)
NAMES = st.sampled_from(["id", "plan", "email", "full name", 'odd"\\', "é"])


def key_of(whose: tuple[bool, str]) -> SubjectKey:
    """A key that follows from whose it is."""
    of = repr(whose).encode()
    return SubjectKey(of[:9].ljust(9, b"."), of[:64].ljust(64, b"."))


def keys_of(whose: Sequence[tuple[bool, str]]) -> list[SubjectKey]:
    assert len(set(whose)) == len(whose), "each subject is asked for once"
    return [key_of(each) for each in whose]


def encrypt(*images: str | None, row: str = '["1"]') -> list[str | None]:
    found = encrypt_images(pa.array(images, pa.string()), pa.array([row] * len(images)), SPLIT, OF, keys_of)
    return found.to_pylist()


def compact(row: object) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


@given(st.lists(st.none() | st.dictionaries(NAMES, TEXTS), max_size=6))
@settings(max_examples=examples(100))
def test_an_image_comes_back_whatever_comes_with_it(rows: list[dict[str, str | None] | None]) -> None:
    images = [None if row is None else compact(row) for row in rows]
    together = encrypt(*images)
    assert together == [encrypt(image)[0] for image in images]
    for row, landed in zip(rows, together, strict=True):
        if row is None or landed is None:
            assert row is None and landed is None
            continue
        shown = {name: value for name, value in row.items() if name in SPLIT.readable}
        if shown == row:
            assert json.loads(landed) == row
            continue
        assert {name: value for name, value in json.loads(landed).items() if name in row} == shown
        whose = (True, row["id"]) if row.get("id") is not None else (False, '["1"]')
        key = key_of(whose)  # type: ignore[arg-type]
        assert key_id(landed) == key.id
        assert json.loads(decrypted(landed, key, OF)) == row


@given(st.lists(st.dictionaries(NAMES, TEXTS, min_size=1), min_size=1, max_size=8))
@settings(max_examples=examples(100))
def test_images_that_come_divided_are_encrypted_as_whole_ones(rows: list[dict[str, str | None]]) -> None:
    keys = [f'["{number % 3}"]' for number in range(len(rows))]
    parts = [
        tuple(
            {name: value for name, value in row.items() if (name in SPLIT.readable) == shown}
            for shown in (True, False)
        )
        for row in rows
    ]
    kept = [place for place, (_, hidden) in enumerate(parts) if hidden]
    readable, hidden = ([compact(parts[place][which]) for place in kept] for which in (0, 1))
    subjects = [None if (it := parts[place][0].get("id")) is None else compact(it)[1:-1] for place in kept]
    of_rows = pa.array([keys[place] for place in kept], pa.string())
    divided = encrypt_divided(
        pa.array(readable, pa.string()),
        pa.array(hidden, pa.string()),
        Whose.said(pa.array(subjects, pa.string()), of_rows),
        OF,
        keys_of,
    )
    whole = [
        encrypt(compact(shown | rest), row=key)[0] for (shown, rest), key in zip(parts, keys, strict=True)
    ]
    assert divided.to_pylist() == [whole[place] for place in kept]


def test_one_subject_in_two_spellings_is_one() -> None:
    subjects = pa.array(["\\u0041", "A", None, "A", None], pa.string())
    whose = Whose.said(subjects, pa.array(["1", "1", "2", "3", None]))
    assert [whose.distinct[place] for place in whose.places] == [
        *[(True, "A")] * 2,
        (False, "2"),
        (True, "A"),
        (False, ""),
    ]
    assert len(set(whose.distinct)) == len(whose.distinct)
    plain = Whose.said(subjects.slice(1), pa.array(["1", "2", "3", None]))
    assert [plain.distinct[place] for place in plain.places] == [
        (True, "A"),
        (False, "2"),
        (True, "A"),
        (False, ""),
    ]


@given(st.lists(st.binary(max_size=7), max_size=9))
@settings(max_examples=examples(100))
def test_base64_of_many_is_that_of_each(bodies: list[bytes]) -> None:
    assert _in_base64(bodies).to_pylist() == [b64encode(each).decode() for each in bodies]


def test_an_image_of_another_spelling_is_encrypted_all_the_same() -> None:
    landed = encrypt('{"id": 7, "email": "ada@x.org", "age": 1.50}', "no JSON: ada@x.org", '["ada@x.org"]')
    assert all("ada@" not in str(each) and json.loads(str(each)) for each in landed)
    assert json.loads(decrypted(str(landed[0]), key_of((True, "7")), OF)) == {
        "id": "7",
        "email": "ada@x.org",
        "age": "1.50",
    }


def test_a_text_that_looks_like_the_member_is_a_text() -> None:
    row = {"id": "1", "plan": f"{MARK}AAAA", "email": f'{MARK}"}}'}
    (landed,) = encrypt(compact(row))
    assert json.loads(decrypted(str(landed), key_of((True, "1")), OF)) == row


def test_without_its_key_each_personal_column_that_was_sent_is_null() -> None:
    (landed,) = encrypt(compact({"id": "1", "email": "ada@x.org", "phone": None}))
    found = json.loads(without_values(str(landed), ("email", "phone", "note"), ["note"]))
    assert found == {"id": "1", "email": None, "phone": None}


def test_what_was_changed_on_disk_or_is_of_another_table_is_refused_without_a_value() -> None:
    (landed,) = encrypt(compact({"id": "1", "email": "ada@x.org"}))
    key = key_of((True, "1"))
    for image, of in ((str(landed), b"public.other"), (str(landed).replace('=="', 'A="'), OF)):
        if image == landed and of == OF:
            continue
        with pytest.raises(EncryptedValueDamaged) as refused:
            decrypted(image, key, of)
        assert "ada" not in str(refused.value)


def test_a_subject_has_one_key_until_it_is_destroyed_and_none_afterwards(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    ada, eve = ("desk", "customer", "1"), ("desk", "customer", "2")
    (first,) = keys.keys_of([ada])
    again, other = keys.keys_of([ada, eve])
    assert again == first and other.id != first.id and other.secret != first.secret
    assert keys.path.stat().st_mode & 0o777 == 0o600 and keys.path.parent.stat().st_mode & 0o777 == 0o700
    assert first.secret is not None and first.secret in keys.path.read_bytes()
    assert keys.destroy([first.id]) == 1 and keys.destroy([first.id]) == 0
    assert first.secret not in keys.path.read_bytes()
    assert keys.keys_of([ada, eve]) == [SubjectKey(first.id, None), other]
    assert b"customer" not in keys.path.read_bytes()


def test_a_key_that_is_missing_and_was_not_destroyed_is_a_loss(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    with pytest.raises(SubjectKeysUnreadable, match="knows of no destruction"):
        keys.by_id([b"123456789"])
    keys.keys_of([("desk", "customer", "1")])
    with pytest.raises(SubjectKeysUnreadable, match="knows of no destruction"):
        keys.by_id([b"123456789"])
