"""The file with the cursors: what it says of rows that landed plain, and of which database it speaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.errors import AnotherDatabase
from omnisupport_ingest.sources.query.events import image_hash
from omnisupport_ingest.sources.query.state import FILE, LandedVersion, Progress, QueryState
from omnisupport_ingest_tests.sources.query.tickets import GRID, SOURCE, contract

PLAIN, ENCRYPTED = image_hash('{"id":"1","email":"a@x.org"}'), image_hash('{"id":"1","encrypted:1":"…"}')


def _bytes_of(image: int) -> bytes:
    # SQLite's integers are big-endian, and this one needs all eight bytes.
    return image.to_bytes(8, "big", signed=True)


@pytest.mark.parametrize("how", ["lands again", "below the lookback"])
def test_no_hash_of_a_plain_image_stays_in_the_file(tmp_path: Path, how: str) -> None:
    progress = Progress(1, "bigint")
    with QueryState(tmp_path) as state:
        state.save(
            "public.people", progress, [LandedVersion('["1"]', 7, PLAIN), LandedVersion('["2"]', 7, 2)]
        )
        assert _bytes_of(PLAIN) in (tmp_path / FILE).read_bytes()
        if how == "lands again":
            state.save("public.people", progress, [LandedVersion('["1"]', 7, ENCRYPTED)], replaced=True)
            assert state.versions("public.people", ['["1"]']) == {
                '["1"]': [LandedVersion('["1"]', 7, ENCRYPTED)]
            }
            assert state.versions("public.people", ['["2"]']) == {'["2"]': [LandedVersion('["2"]', 7, 2)]}
        else:
            state.save("public.people", progress, below=8)
    assert _bytes_of(PLAIN) not in (tmp_path / FILE).read_bytes()


def test_cursors_of_another_database_are_refused_until_every_table_is_read_anew(tmp_path: Path) -> None:
    tables = contract(), replace(contract(), table="people")
    inlet = Inlet(LandingStore(tmp_path, SOURCE), GRID, tables, "desk.json")
    with QueryState(inlet.store.folder) as state:
        state.claim("one")
        for table in tables:
            state.save(table.full_name, Progress(1, "bigint"))
        refresh(inlet, state, tables[:1], "moved")
        with pytest.raises(AnotherDatabase, match="leads to the database two; the cursors are of one"):
            state.claim("two")
        refresh(inlet, state, tables[1:], "moved")
        state.claim("two")
        with pytest.raises(AnotherDatabase):
            state.claim("one")
