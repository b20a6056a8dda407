"""A sync is killed at its failpoints; the next one ends with every row landed, and none twice in the fold."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest_tests.sources.query.tickets import Desk, lite_contract
from omnisupport_ingest_tests.waiting import PATIENCE

POINTS = (
    "landing.epoch.before",
    "landing.epoch.after",
    "landing.data.before",
    "landing.data.after",
    "landing.manifest.before",
    "landing.manifest.after",
    "query.state.before",
    "query.state.after",
)

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest_tests.sources.query.tickets import Desk, lite_contract
Desk(None, "", Path(sys.argv[1]), lite_contract(), 10).sync(reader=DialectReader(sys.argv[2]))
"""

_CASES = [
    pytest.param(*case, marks=() if case == ("query.state.before", 4) else pytest.mark.crash)
    for case in itertools.product(POINTS, (1, 4))
    if not case[0].startswith("landing.epoch") or case[1] == 1
]


def _killed_at(place: str, landing: Path, url: str, program: str = _PROGRAM) -> None:
    """Run ``program``, which syncs, in a process that is killed at the failpoint ``place``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    ends = subprocess.run(
        [sys.executable, "-c", program, str(landing), url],
        env={**inherited, VARIABLE: place},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr


@pytest.mark.full
@pytest.mark.parametrize(("point", "at"), _CASES)
def test_a_sync_that_is_killed_goes_on_where_it_was(tmp_path: Path, point: str, at: int) -> None:
    landing, base = tmp_path / "landing", tmp_path / "desk.db"
    landing.mkdir()
    url = f"sqlite:///{base}"
    with sqlite3.connect(base) as connection:
        connection.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
        rows = [(number, f"s{number}", f"2026-11-20 10:{number % 60:02}:00") for number in range(1, 46)]
        connection.executemany("INSERT INTO tickets VALUES (?, ?, ?)", rows)
    _killed_at(f"{point}:{at}", landing, url)
    desk = Desk(None, "", landing, lite_contract(), 10)
    for _ in range(2):
        assert desk.sync(reader=DialectReader(url)).finished
    events = [each for each in desk.events() if each["op"] == "r"]
    assert {json.loads(each["key"])[0] for each in events} == {str(number) for number in range(1, 46)}
    # What landed twice is the same event twice.
    places = {(each["ordinal"], each["identity"]) for each in events}
    contents = {(each["ordinal"], each["identity"], each["after"], each["window"]) for each in events}
    assert len(places) == len(contents) == 45


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    [
        "landing.schema_changes.after",
        pytest.param("landing.schema_changes.before", marks=pytest.mark.crash),
        pytest.param("landing.data.before", marks=pytest.mark.crash),
        pytest.param("landing.manifest.after", marks=pytest.mark.crash),
    ],
)
def test_a_change_is_told_once_wherever_the_sync_that_sees_it_is_killed(tmp_path: Path, point: str) -> None:
    landing, base = tmp_path / "landing", tmp_path / "desk.db"
    landing.mkdir()
    url = f"sqlite:///{base}"
    desk = Desk(None, "", landing, lite_contract(), 10)
    with sqlite3.connect(base) as connection:
        connection.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
        connection.execute("INSERT INTO tickets VALUES (1, 'one', '2026-11-20 10:00:00')")
        connection.commit()
        assert desk.sync(reader=DialectReader(url)).finished
        connection.execute("ALTER TABLE tickets ADD size INTEGER")
        connection.execute("INSERT INTO tickets VALUES (2, 'two', '2026-11-20 10:01:00', 2)")
    _killed_at(f"{point}:1", landing, url)
    for _ in range(2):
        assert desk.sync(reader=DialectReader(url)).finished
    changes = SchemaChanges(desk.store.folder).all()
    assert [(each.kind, each.column) for each in changes] == [("column_added", "size")]


_READ_ANEW = """
import sys
from pathlib import Path
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest_tests.sources.query.test_killed import by_id_and_subject
from omnisupport_ingest_tests.sources.query.tickets import Desk
desk = Desk(None, "", Path(sys.argv[1]), by_id_and_subject(), 10)
desk.refresh()
desk.sync(reader=DialectReader(sys.argv[2]))
"""


def by_id_and_subject() -> TableContract:
    """The contract with another key."""
    found = lite_contract()
    columns = tuple(replace(each, nullable=False) for each in found.columns)
    return replace(found, key=("id", "subject"), columns=columns)


@pytest.mark.parametrize(
    ("point", "at"),
    [
        pytest.param(*case, marks=() if case == ("source.landed_keys.before", 3) else pytest.mark.crash)
        # The key begins, is seen to be unique, and is put in force.
        for case in itertools.product(("source.landed_keys.before", "source.landed_keys.after"), (1, 2, 3))
    ]
    + [
        pytest.param(each, 1, marks=pytest.mark.crash)
        for each in POINTS
        if not each.startswith("query.state") and each != "landing.data.after"
    ],
)
def test_a_reading_by_another_key_that_is_killed_is_ended_by_the_next_one(
    tmp_path: Path, point: str, at: int
) -> None:
    landing, base = tmp_path / "landing", tmp_path / "desk.db"
    landing.mkdir()
    url = f"sqlite:///{base}"
    with sqlite3.connect(base) as connection:
        connection.execute(
            "CREATE TABLE tickets (id INTEGER NOT NULL, subject TEXT NOT NULL, updated_at DATETIME,"
            " PRIMARY KEY (id, subject), UNIQUE (id))"
        )
        rows = [(number, f"s{number}", f"2026-11-20 10:{number % 60:02}:00") for number in range(1, 16)]
        connection.executemany("INSERT INTO tickets VALUES (?, ?, ?)", rows)
    assert Desk(None, "", landing, lite_contract(), 10).sync(reader=DialectReader(url)).finished
    _killed_at(f"{point}:{at}", landing, url, _READ_ANEW)
    desk = Desk(None, "", landing, by_id_and_subject(), 10)
    if desk.sync(reader=DialectReader(url)).tables[0].blocked:
        # No row has landed by a key that nothing records.
        assert {len(json.loads(each["key"])) for each in desk.events() if each["key"]} == {1}
        desk.refresh()
        desk.sync(reader=DialectReader(url))
    assert desk.sync(reader=DialectReader(url)).finished
    keys = LandedKeys(desk.store.folder).of("main.tickets")
    assert keys is not None and keys.newest == ("id", "subject") and not keys.waits
    held = replace(desk.table, key_eras=keys.eras, key_era=keys.in_force)
    events = [
        each
        for each in desk.events()
        if each["key"] and held.has_key_at((each["epoch"], each["commit_lsn"], each["ordinal"]))
    ]
    assert {tuple(json.loads(each["key"])) for each in events} == {(str(n), f"s{n}") for n, *_ in rows}
