"""Keys of subjects that are made many at once: found wherever they are by then, and destroyed there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path

import pytest

from omnisupport_ingest.contracts import recent_keys
from omnisupport_ingest.contracts.subject_ciphers import SubjectKey
from omnisupport_ingest.contracts.subject_keys import SubjectKeys

CUSTOMERS = [("desk", "customer", str(number)) for number in range(100)]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SubjectKeys:
    """Of which ten make a block, and 35 in blocks go into the tree."""
    monkeypatch.setattr(recent_keys, "FEW", 10)
    monkeypatch.setattr(recent_keys, "_LEAST", 35)
    monkeypatch.setattr(recent_keys, "_MOST", 35)
    return SubjectKeys(tmp_path / "home" / "keys" / "subjects.sqlite")


def rows(keys: SubjectKeys, table: str) -> int:
    with closing(sqlite3.connect(keys.path)) as base:
        (count,) = base.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


def made(keys: SubjectKeys) -> Iterator[SubjectKey]:
    """Of all ``CUSTOMERS``, 15 at a time, each time with some that have one."""
    for start in range(0, len(CUSTOMERS), 15):
        known = max(0, start - 4)
        yield from keys.keys_of(CUSTOMERS[known : start + 15])[start - known :]


def test_a_key_is_the_same_before_and_after_it_leaves_its_block(keys: SubjectKeys) -> None:
    first = keys.keys_of(CUSTOMERS[:15])
    assert (rows(keys, "recent"), rows(keys, "keys")) == (1, 0)
    assert keys.keys_of(CUSTOMERS[10:12]) == first[10:12] and rows(keys, "recent") == 1
    few = keys.keys_of(CUSTOMERS[98:])
    assert (rows(keys, "recent"), rows(keys, "keys")) == (1, 2), "a few go straight into the tree"
    every = [*made(keys)]
    assert every[:15] == first and every[98:] == few
    assert rows(keys, "recent") < 7 and rows(keys, "keys") > 60
    assert keys.keys_of(CUSTOMERS) == every
    assert keys.by_id(each.id for each in every) == {each.id: each for each in every}
    assert len({each.secret for each in every}) == len({each.id for each in every}) == len(CUSTOMERS)
    assert keys.living([each.id for each in every]) == {each.id for each in every}


def test_a_key_is_destroyed_in_its_block_and_stays_so_in_the_tree(keys: SubjectKeys) -> None:
    first = keys.keys_of(CUSTOMERS[:15])
    gone = first[7]
    assert gone.secret is not None and gone.secret in keys.path.read_bytes()
    assert keys.destroy([gone.id, gone.id]) == 1 and keys.destroy([gone.id]) == 0
    assert gone.secret not in keys.path.read_bytes()
    expected = [*first[:7], SubjectKey(gone.id, None), *first[8:]]
    assert keys.keys_of(CUSTOMERS[:15]) == expected
    assert rows(keys, "recent") == 1
    assert [*made(keys)][:15] == expected and rows(keys, "keys") > 60
    assert keys.living([each.id for each in first]) == {each.id for each in first} - {gone.id}


def test_a_key_that_another_process_moves_meanwhile_is_not_missed(
    keys: SubjectKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look into the tree and one into the blocks all of them go into the tree."""
    made = keys.keys_of(CUSTOMERS[:15])
    ids = [each.id for each in made]
    look_into_blocks, tried = recent_keys._in_blocks, list[str]()

    def after_a_move(
        base: sqlite3.Connection, wanted: Sequence[bytes]
    ) -> Iterator[tuple[int, list[tuple[bytes, int]]]]:
        with (
            closing(sqlite3.connect(keys.path, timeout=0, isolation_level=None)) as other,
            suppress(sqlite3.OperationalError),
        ):
            tried.append("moved")
            other.execute("BEGIN IMMEDIATE")
            recent_keys._move(other)
            # Waits, in another process, until whoever reads is done.
            other.execute("COMMIT")
        yield from look_into_blocks(base, wanted)

    monkeypatch.setattr(recent_keys, "_in_blocks", after_a_move)
    assert keys.living(ids) == {*ids} and tried
    assert keys.by_id(ids) == {each.id: each for each in made}


def test_ids_that_differ_in_the_last_byte_alone_are_told_apart(keys: SubjectKeys) -> None:
    keys.keys_of(CUSTOMERS[:1])
    ids = [b"\0" * 8 + bytes([last]) for last in range(0, 40, 2)]
    secrets = b"".join(bytes([number]) * recent_keys.SECRET_BYTES for number in range(len(ids)))
    with closing(sqlite3.connect(keys.path)) as base:
        recent_keys.add(base, ids, secrets)
        found = recent_keys.find(base, [ids[3], ids[19], b"\0" * 8 + b"\x03", b"\xff" * 9])
    assert found == {ids[3]: b"\x03" * recent_keys.SECRET_BYTES, ids[19]: b"\x13" * recent_keys.SECRET_BYTES}


def test_a_file_of_a_former_version_is_taken_on(keys: SubjectKeys) -> None:
    (ada,) = keys.keys_of(CUSTOMERS[:1])
    with closing(sqlite3.connect(keys.path)) as base:
        base.execute("DROP TABLE recent")
        (secret,) = base.execute("SELECT secret FROM store").fetchone()
    # As it was made before: another id would be another key, and bring erased subjects back.
    assert ada.id == blake2b(b"desk\0customer\0" + b"0", key=secret, digest_size=9).digest()
    assert keys.by_id([ada.id]) == {ada.id: ada}
    assert keys.keys_of(CUSTOMERS[:15])[0] == ada and rows(keys, "recent") == 1
