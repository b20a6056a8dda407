"""The key of a contract while its table waits to be read by another one, and after that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.cli.contracts_changes import write
from omnisupport_ingest.contracts.landed_keys import (
    FILE,
    KeysOfTable,
    LandedKeys,
    LandedKeysUnreadable,
    by_landed_keys,
)
from omnisupport_ingest.contracts.model import Column, Contracts, KeyEra, TableContract
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.next_contract import NextContract
from omnisupport_ingest.storage import is_kept
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, contract

BY_ID = KeysOfTable.first(("id",))
BY_N = BY_ID.begin(KeyEra(("n",), 1, Lsn(100), -5))
BEGINS = (1, 100, -5)


def table(*key: str, columns: tuple[str, ...] = ("id", "n", "v")) -> TableContract:
    made = contract("tickets", columns, key)
    return replace(made, columns=tuple(Column(name, "text", name == "v") for name in columns))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "landing" / SOURCE).mkdir(parents=True)
    return tmp_path


def in_force(home: Path, keys: KeysOfTable, of_file: TableContract) -> TableContract:
    LandedKeys(home / "landing" / SOURCE).update(lambda _: {"public.tickets": keys})
    [found] = by_landed_keys(home, Contracts((of_file,)))
    return found


def test_the_former_key_is_in_force_until_the_table_has_been_read_by_the_new_one(home: Path) -> None:
    edited = in_force(home, BY_ID, table("n"))
    assert (edited.key, edited.next_key, edited.other_keys) == (("id",), ("n",), ())
    begun = in_force(home, BY_N, table("n"))
    assert (begun.key, begun.next_key, begun.other_keys) == (("id",), ("n",), ((BEGINS, None),))
    assert begun.as_captured.key == ("n",) and begun.has_key_at((1, 99, 0)) and not begun.has_key_at(BEGINS)
    read = in_force(home, BY_N.settled, table("n"))
    assert (read.key, read.next_key, read.other_keys) == (("n",), (), (((0, 0, 0), BEGINS),))
    assert read.key_since == BY_N.eras[1] and read.has_key_at(BEGINS) and not read.has_key_at((1, 99, 0))
    # What was made by one of them is made again by the next.
    assert len({table("n").fingerprint, edited.fingerprint, read.fingerprint}) == 3
    assert edited.fingerprint == begun.fingerprint


@pytest.mark.parametrize("keys", [BY_ID, BY_N])
def test_nothing_counts_while_the_contract_has_no_column_of_the_former_key(
    home: Path, keys: KeysOfTable
) -> None:
    """Else the values of the former key would be shown as those of the new one."""
    found = in_force(home, keys, table("n", columns=("n", "v")))
    assert (found.key, found.next_key) == (("n",), ("n",))
    assert not found.has_key_at((1, 50, 0)) and found.has_key_at(BEGINS) is (keys is BY_N)


def test_a_table_that_gets_its_first_key_again_begins_anew(home: Path) -> None:
    back = BY_N.settled.begin(KeyEra(("id",), 1, Lsn(200), -3))
    assert in_force(home, back, table("id")).other_keys[0] == ((0, 0, 0), BEGINS)
    found = in_force(home, back.settled, table("id"))
    assert found.other_keys == (((0, 0, 0), (1, 200, -3)),) and found.next_key == ()


def test_a_renamed_column_is_the_same_key_unless_another_key_waits(home: Path) -> None:
    path = home / "tickets.json"
    renamed = NextContract({"properties": {}}, (), (), ("number",))
    landed = LandedKeys(home / "landing" / SOURCE)
    write(home, replace(in_force(home, BY_ID, table("id")), path=str(path)), renamed)
    assert landed.all() == {"public.tickets": KeysOfTable.first(("number",))}
    waits = replace(in_force(home, BY_ID, table("id", "n")), path=str(path))
    write(home, waits, replace(renamed, renamed_key=("number", "n")))
    assert landed.all() == {"public.tickets": BY_ID}


def test_the_record_goes_where_landing_goes_and_a_damaged_one_is_named(home: Path) -> None:
    file = home / "landing" / SOURCE / FILE
    assert is_kept(home, file)
    file.write_text("{")
    with pytest.raises(LandedKeysUnreadable, match=r"keys\.json"):
        by_landed_keys(home, Contracts((table("id"),)))
