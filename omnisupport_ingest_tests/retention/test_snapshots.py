"""Landing and raw of full snapshots without a cursor are given up by age, and what comes later goes in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.lake_checks import tables_fresh
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.removed import LANDING, RAW, WindowSealed, refuse_sealed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import NET_CHANGES
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest.windows import KEY_FORMAT, WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.retention.given_up import (
    KEPT,
    give_up,
    made_again,
    reasons,
    sealed,
    shown,
    take_all,
)
from omnisupport_ingest_tests.sources.manifests.deliveries import as_before, content

SOURCE = "support_files"
FIRST = datetime(2026, 11, 1, tzinfo=UTC)


def on(day: int, hour: int = 2) -> datetime:
    """A moment of the night of a day of November."""
    return FIRST + timedelta(days=day - 1, hours=hour)


def window_of(day: int) -> str:
    return on(day).strftime(KEY_FORMAT)


class Nights:
    """A home that gets whole tables every night, whose contracts give up layers as ``kept`` says."""

    def __init__(
        self, folder: Path, *tables: str, kept: Mapping[str, str] = MappingProxyType(KEPT), **terms: Any
    ) -> None:
        contracts = folder / "contracts"
        contracts.mkdir(parents=True)
        document = json.loads(program_file("contracts/data/legacy_tickets.json").read_text())
        for table in tables or ("legacy_tickets",):
            document["x-cdc"] |= {"table": table, "retention": {**kept}}
            document["x-cdc"]["events"] |= terms
            (contracts / f"{table}.json").write_text(json.dumps(document))
        settings = Settings(home=folder / "home", contracts_dir=contracts, _env_file=None)
        Home.open(settings.home, WindowSize(60), now=FIRST + timedelta(minutes=1))
        self.workspace, self.folder, self.number = Workspace.open(settings), folder, 0

    def deliver(
        self, rows: dict[int, str], as_of: datetime | None, *, table: str = "legacy_tickets", now: datetime
    ) -> Manifest:
        """Land ``rows``, subjects by number, as all of ``table``."""
        path, contracts = self.written(rows, as_of, table), self.workspace.contracts
        names = frozenset(each.full_name for each in contracts.of_source(SOURCE))
        store = self.workspace.landing(SOURCE)
        into = Inlet(store, self.workspace.grid, clock=lambda: now, tables=names)
        return land(load_manifest(path, contracts), into).batches[0]

    def written(self, rows: dict[int, str], as_of: datetime | None, table: str) -> Path:
        """Write a delivery of ``rows``; return its manifest."""
        self.number += 1
        data = self.folder / f"{self.number}.jsonl"
        data.write_bytes(content([_row(*each) for each in rows.items()], ".jsonl"))
        document = json.loads(program_file("data/seed_manifests/legacy_tickets_2025.json").read_text())
        document["contract"]["table"] = table
        document["gates"]["checksum"] = "accept"
        document["files"][0] |= {"path": data.name, "rows": len(rows)}
        document |= {} if as_of is None else {"as_of": as_of.isoformat()}
        path = self.folder / f"{self.number}.json"
        path.write_text(json.dumps(document))
        return path

    def rows(self, spark: SparkSession, table: str = "legacy_tickets") -> dict[int, tuple[str, bool]]:
        """Subject of each row in the dimension, and whether it is alive."""
        (contract,) = (each for each in self.workspace.contracts.of_source(SOURCE) if each.table == table)
        snapshot = self.workspace.dimension(contract).open()
        found = snapshot.read(spark, snapshot.files("")).collect()
        assert not any(row["_cdc_unresolved"] for row in found)
        return {int(row["ticket_ref"][-5:]): (row["subject"], not row["_cdc_is_deleted"]) for row in found}


def _row(number: int, subject: str) -> dict[str, Any]:
    return {
        "ticket_ref": f"HD-2025-{number:05d}",
        "organization": "o",
        "subject": subject,
        "status": "open",
        "escalated": False,
        "opened_at": "2025-01-01T00:00:00Z",
    }


@pytest.mark.slow
def test_full_snapshots_go_in_as_before_once_their_windows_are_given_up(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Nights(tmp_path)
    at = home.workspace
    first = home.deliver({1: "one", 2: "two"}, on(2), now=on(2, 3))
    home.deliver({1: "one", 2: "changed", 3: "three"}, on(3), now=on(3, 3))
    home.deliver({1: "one", 3: "three"}, on(22), now=on(22, 3))
    take_all(at, SOURCE, spark)
    wanted = {1: ("one", True), 2: ("changed", False), 3: ("three", True)}
    assert home.rows(spark) == wanted
    before = shown(at, SOURCE)
    planned = give_up(at, SOURCE)
    assert {(each.layer, each.window) for each in planned.doomed} == {
        (layer, window_of(day)) for layer in (LANDING, RAW) for day in (2, 3)
    }
    assert planned.refused == () and planned.watermark == on(22)
    assert sealed(at, SOURCE) == {window_of(2), window_of(3)}
    assert shown(at, SOURCE) == before

    # (a) The same delivery lands nothing, also without its files.
    assert home.deliver({1: "one", 2: "two"}, on(2), now=on(23)) == first
    # (b) The next night goes in, above all that was sealed.
    home.deliver({1: "one", 2: "again", 4: "four"}, on(23), now=on(23, 3))
    take_all(at, SOURCE, spark)
    wanted = {1: ("one", True), 2: ("again", True), 3: ("three", False), 4: ("four", True)}
    assert home.rows(spark) == wanted

    # (c) A snapshot of a moment in a sealed window is not held back: it lands where the watermark stands.
    # The order of deliveries counts, so it is the table now.
    older = home.deliver({1: "old", 5: "five"}, on(2), now=on(23, 4))
    assert older.windows == (window_of(23),) and older.arrival.watermark == on(23)
    take_all(at, SOURCE, spark)
    wanted |= {1: ("old", True), 2: ("again", False), 4: ("four", False), 5: ("five", True)}
    assert home.rows(spark) == wanted
    assert reasons(at, SOURCE) == {}
    # (d) So does one while the clock is set back.
    back = home.deliver({1: "new"}, None, now=on(4))
    assert back.windows == (window_of(23),) and back.arrival.watermark == on(23)
    take_all(at, SOURCE, spark)
    wanted |= {1: ("new", True), 5: ("five", False)}
    assert home.rows(spark) == wanted
    assert reasons(at, SOURCE) == {}

    # (e) A replay is refused; what is made again is the same.
    with pytest.raises(WindowSealed, match=window_of(2)):
        refuse_sealed(at, SOURCE, [window_of(2)])
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before

    # (f) The windows that took in what was late grow old like others.
    home.deliver({1: "new"}, on(36), now=on(36, 3))
    take_all(at, SOURCE, spark)
    give_up(at, SOURCE)
    assert sealed(at, SOURCE) == {window_of(day) for day in (2, 3, 22, 23)}
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before


def thinned(workspace: Workspace) -> dict[str, int]:
    """Retention, until it has nothing more to do: what one call seals the next may thin. Windows by layer."""
    found: dict[str, int] = {}
    for _ in range(4):
        at = Workspace.open(workspace.settings)
        carried = carry_out(at, plan_retention(at, SOURCE), removed_by="test")
        if not carried:
            return found
        for each in carried:
            found[each.layer] = found.get(each.layer, 0) + each.windows
    raise AssertionError("retention does not come to an end")


def net_rows(workspace: Workspace) -> dict[int, int]:
    """How many rows of net changes each night has."""
    snapshot = workspace.net_changes(workspace.contracts.of_source(SOURCE)[0]).open()
    return {
        datetime.strptime(window, KEY_FORMAT).day: sum(file.rows for file in snapshot.files(window))
        for window in snapshot.windows()
    }


@pytest.mark.slow
def test_net_changes_of_full_snapshots_leave_that_later_ones_supersede_and_nothing_else_changes(
    tmp_path: Path, spark: SparkSession
) -> None:
    thin, whole = (
        Nights(tmp_path / "thin", kept=KEPT | {"net_changes": "P10D"}),
        Nights(tmp_path / "whole"),
    )

    def all_of(rows: dict[int, str], day: int, *, as_of: int | None = None) -> None:
        for home in (thin, whole):
            home.deliver(rows, on(as_of or day), now=on(day, 3 + (as_of is not None)))
            take_all(home.workspace, SOURCE, spark)

    def the_same(again: bool = False) -> list[str]:
        assert thin.rows(spark) == whole.rows(spark)
        before = shown(whole.workspace, SOURCE)
        assert shown(thin.workspace, SOURCE) == before
        if again:
            (contract,) = thin.workspace.contracts.of_source(SOURCE)
            made = dimensions.update(thin.workspace, spark, contract, "again", whole=True)
            assert [made.content_hash] == before, "made again from the net changes that are left"
        return before

    all_of({1: "one", 2: "two", 3: "three"}, 2)
    all_of({1: "one", 2: "changed", 3: "three"}, 3)
    all_of({1: "one", 2: "changed"}, 4)
    all_of({1: "one", 2: "changed", 4: "four"}, 22)
    assert thinned(whole.workspace).keys() == {LANDING, RAW}
    assert thinned(thin.workspace) == {LANDING: 3, RAW: 3, NET_CHANGES: 2}
    # Each snapshot has a row for its end. The third says of its key that it is gone; its last row stays.
    assert net_rows(whole.workspace) == {2: 4, 3: 4, 4: 3, 22: 4}
    assert net_rows(thin.workspace) == {2: 1, 3: 2, 4: 3, 22: 4}
    the_same(again=True)

    # A row that had left comes again, others change or go, above all that was thinned.
    all_of({1: "new", 3: "back"}, 23)
    the_same(again=True)
    # A snapshot of a moment in a thinned window lands where the watermark stands, so nothing comes between.
    all_of({2: "of old"}, 23, as_of=3)
    assert reasons(thin.workspace, SOURCE) == {}
    the_same(again=True)
    # What is made of all deduped events has all rows again; the next retention looks at it anew.
    before = the_same()
    assert made_again(thin.workspace, SOURCE, spark) == before
    assert net_rows(thin.workspace) == net_rows(whole.workspace)
    all_of({1: "new", 2: "of old"}, 36)
    assert NET_CHANGES in thinned(thin.workspace)
    thinned(whole.workspace)
    assert sum(net_rows(thin.workspace).values()) < sum(net_rows(whole.workspace).values())
    the_same(again=True)


@pytest.mark.slow
def test_a_row_that_waits_for_a_person_keeps_the_net_changes_above_it(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Nights(tmp_path, kept=KEPT | {"net_changes": "P10D"})
    at = home.workspace
    home.deliver({1: "x" * 501, 2: "two"}, on(2), now=on(2, 3))
    for day in (3, 4, 22):
        home.deliver({1: "one", 2: "two"}, on(day), now=on(day, 3))
    take_all(at, SOURCE, spark)
    # The first night may be judged again, so rows of those above it might be asked for.
    assert thinned(at) == {LANDING: 3, RAW: 2}
    (why,) = {each.why for each in plan_retention(at, SOURCE).refused if each.layer == NET_CHANGES}
    assert why == "raw has its events, and it may be judged again (files.legacy_tickets)"
    assert net_rows(at) == {2: 3, 3: 3, 4: 3, 22: 3}


@pytest.mark.slow
def test_a_table_that_comes_seldom_keeps_all_of_its_source_and_loses_nothing(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Nights(tmp_path, "legacy_tickets", "second_tickets")
    at = home.workspace
    home.deliver({1: "one"}, on(2), now=on(2, 3))
    home.deliver({1: "second"}, on(2), table="second_tickets", now=on(2, 3))
    home.deliver({1: "two"}, on(22), now=on(22, 3))
    take_all(at, SOURCE, spark)
    planned = plan_retention(at, SOURCE)
    assert planned.watermark == on(2) and planned.doomed == ()
    # Late, by its file; not below what the source has been complete to.
    seldom = home.deliver({2: "second"}, on(20), table="second_tickets", now=on(23))
    assert seldom.windows == (window_of(20),)
    take_all(at, SOURCE, spark)
    planned = give_up(at, SOURCE)
    assert {each.window for each in planned.of(RAW)} == {window_of(2)}
    home.deliver({3: "second"}, on(2), table="second_tickets", now=on(23))
    take_all(at, SOURCE, spark)
    assert home.rows(spark) == {1: ("two", True)}
    assert home.rows(spark, "second_tickets") == {
        1: ("second", False),
        2: ("second", False),
        3: ("second", True),
    }
    assert reasons(at, SOURCE) == {}
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before


@pytest.mark.slow
def test_a_home_of_an_earlier_version_gives_nothing_up_before_its_next_delivery(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Nights(tmp_path)
    for day in (2, 3, 22):
        batch = home.deliver({1: "one", day: "of the day"}, on(day), now=on(day, 3))
        as_before(home.workspace.landing(SOURCE).folder, batch)
        home.workspace = Workspace.open(home.workspace.settings)
    at = home.workspace
    take_all(at, SOURCE, spark)
    before = home.rows(spark)
    assert plan_retention(at, SOURCE).watermark is None and plan_retention(at, SOURCE).doomed == ()

    # Their facts are frozen: none of them becomes late by the watermark that begins now.
    home.deliver({1: "one", 22: "of the day", 23: "of the day"}, on(23), now=on(23, 3))
    take_all(at, SOURCE, spark)
    assert home.rows(spark) == before | {23: ("of the day", True)}
    planned = give_up(at, SOURCE)
    assert {each.window for each in planned.of(RAW)} == {window_of(2), window_of(3)}
    before_that = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before_that


@pytest.mark.slow
def test_only_a_contract_says_how_old_a_delivered_table_may_be(tmp_path: Path, spark: SparkSession) -> None:
    home = Nights(tmp_path)
    home.deliver({1: "one"}, on(2), now=on(2, 3))
    take_all(home.workspace, SOURCE, spark)
    found = tables_fresh(home.workspace, SOURCE, on(20))["legacy_tickets"]
    assert found.passed and "lag_seconds" not in found.numbers
    path = tmp_path / "contracts" / "legacy_tickets.json"
    document = json.loads(path.read_text())
    document["x-cdc"]["quality"] = {"freshness": {"max_lag": "PT26H"}}
    path.write_text(json.dumps(document))
    at = Workspace.open(home.workspace.settings)
    assert tables_fresh(at, SOURCE, on(3))["legacy_tickets"].passed
    missed = tables_fresh(at, SOURCE, on(4))["legacy_tickets"]
    assert not missed.passed and "2 days behind" in missed.summary


@pytest.mark.slow
def test_deleted_rows_of_full_snapshots_are_purged(tmp_path: Path, spark: SparkSession) -> None:
    home = Nights(tmp_path, purge_deleted_after="P2D")
    at = home.workspace
    home.deliver({1: "one", 2: "two"}, on(2), now=on(2, 3))
    home.deliver({1: "one"}, on(3), now=on(3, 3))
    take_all(at, SOURCE, spark)
    assert home.rows(spark) == {1: ("one", True), 2: ("two", False)}
    # Not before `lateness.max`, a week.
    home.deliver({1: "one", 3: "three"}, on(11), now=on(11, 3))
    take_all(at, SOURCE, spark)
    assert home.rows(spark) == {1: ("one", True), 3: ("three", True)}
    # A later delivery that has the row brings it back.
    home.deliver({1: "one", 2: "back"}, on(12), now=on(12, 3))
    take_all(at, SOURCE, spark)
    assert home.rows(spark)[2] == ("back", True)
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before


def test_the_command_line_names_the_tables_that_hold_the_watermark(tmp_path: Path) -> None:
    tables = "legacy_tickets", "second_tickets"
    home = Nights(tmp_path, *tables)
    now = datetime.now(UTC).replace(microsecond=0)
    settings = home.workspace.settings
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):

        def loaded(table: str, as_of: datetime) -> str:
            done = command("manifest", "load", str(home.written({1: "one"}, as_of, table)))
            assert done.code == 0, done.output
            return command("retention", "plan", "--source", SOURCE).out

        shown = loaded(tables[0], now - timedelta(hours=3))
        assert "it has no watermark" in shown
        assert "its watermark waits for a whole delivery of files.second_tickets" in shown
        shown = loaded(tables[1], now - timedelta(hours=2))
        assert "it has no watermark" not in shown
        assert "its watermark waits for a whole delivery of files.legacy_tickets" in shown
        (document,) = json.loads(command("retention", "plan", "--source", SOURCE, "--json").out)
        assert document["watermark"] == (now - timedelta(hours=3)).isoformat()
        assert document["watermark_held_by"] == ["files.legacy_tickets"]
        assert "its watermark waits" not in loaded(tables[0], now - timedelta(hours=2))
