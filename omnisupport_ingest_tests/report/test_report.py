"""The report: its numbers from batches and commits, and a page that needs nothing beside itself."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.freshness import ServiceLevel
from omnisupport_ingest.report import figures, page
from omnisupport_ingest.report.facts import (
    Batch,
    Promise,
    SourceFacts,
    TableCommit,
    TableFacts,
    WindowCounts,
    commits_of,
)
from omnisupport_ingest.report.figures import Latency, percentile
from omnisupport_ingest.report.page import collect, document, html
from omnisupport_ingest.report.svg import Axis, Marks, Series, chart
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHOP, TABLE = "shop", "public.orders"


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def batch(lsn: int, committed: float, landed: float, events: int = 1) -> Batch:
    """A span of the stream with ``events`` of one table; times in seconds after noon."""
    place = Position(1, Lsn(lsn), 0)
    return Batch(
        f"s{lsn}", "stream", at(landed), events, 100, at(committed), at(committed - 1), ("w",),
        {TABLE: events}, {TABLE: place},
    )  # fmt: skip


def commit(version: int, lsn: int, second: float, run: str = "run") -> TableCommit:
    """Version 1 is the first with rows."""
    return TableCommit(version, at(second), run, Position(1, Lsn(lsn), 0), 1000, 1000 * version)


def facts(
    batches: list[Batch], commits: list[TableCommit], windows: tuple[WindowCounts, ...] = ()
) -> SourceFacts:
    table = TableFacts("dim_orders", TABLE, 5, tuple(commits))
    return SourceFacts(SHOP, tuple(batches), 0, (table,), windows)


def test_a_percentile_counts_every_event_and_none_has_none() -> None:
    held = [Latency(NOON, 1.0, 98), Latency(NOON, 5.0, 1), Latency(NOON, 60.0, 1)]
    assert [percentile(held, rank) for rank in (50, 98, 99, 100)] == [1.0, 1.0, 5.0, 60.0]
    assert percentile([], 50) is None


def test_a_batch_is_fresh_when_the_dimension_first_shows_it_from_its_first_commit_on() -> None:
    told = facts(
        [batch(10, 0, 1, events=3), batch(20, 10, 11)],
        [commit(1, 10, 5), commit(2, 10, 9), commit(3, 20, 30)],
    )
    assert [(each.seconds, each.events) for each in figures.to_dimension(told)] == [(5.0, 3), (20.0, 1)]
    assert [each.seconds for each in figures.to_landing(told)] == [1.0, 1.0]


def test_a_batch_reaches_the_dimensions_when_the_last_of_them_shows_it() -> None:
    both = replace(batch(20, 10, 11, events=3), tables={TABLE: 2, "public.items": 1})
    both = replace(both, last={TABLE: Position(1, Lsn(20), 0), "public.items": Position(1, Lsn(15), 0)})
    told = facts([batch(10, 0, 1), both], [commit(1, 10, 5), commit(2, 20, 30)])
    items = TableFacts("dim_items", "public.items", 5, (commit(1, 15, 40),))
    behind = replace(items, commits=(commit(1, 10, 40),))
    for other, reached in ((items, ((1.0, 5.0), (3.0, 30.0))), (behind, ((1.0, 5.0),))):
        landed, shown = figures.size_and_latency(replace(told, tables=(*told.tables, other)))
        assert landed.points == ((1.0, 1.0), (3.0, 1.0))
        assert shown.points == reached


def test_what_no_version_shows_is_not_fresh_and_a_version_before_landing_shows_nothing() -> None:
    assert figures.to_dimension(facts([batch(20, 0, 10)], [commit(1, 20, 5), commit(2, 10, 20)])) != []
    assert figures.to_dimension(facts([batch(20, 0, 10)], [commit(1, 20, 5)])) == []
    assert figures.to_dimension(facts([batch(20, 0, 10)], [commit(1, 10, 15)])) == []


def test_a_batch_that_an_earlier_commit_may_have_shown_has_no_latency() -> None:
    """Of a long log only the newest commits are read."""
    batches = [batch(lsn, lsn, lsn + 1) for lsn in (10, 20, 30, 40)]
    commits = [commit(number, 10 * number, 10 * number + 4) for number in (3, 4)]
    assert [each.seconds for each in figures.to_dimension(facts(batches, commits))] == [4.0]
    whole = [commit(number, 10 * number, 10 * number + 4) for number in (1, 2, 3, 4)]
    assert [each.seconds for each in figures.to_dimension(facts(batches, whole))] == [4.0] * 4


def test_a_run_costs_the_time_between_its_commits_and_what_it_wrote() -> None:
    (cost,) = figures.runs(facts([], [commit(1, 10, 5), commit(2, 10, 9)]))
    assert (cost.seconds, cost.written, cost.commits) == (4.0, 2000, 2)


def test_the_size_of_a_table_is_followed_back_through_its_log(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    note = '"omnisupport_ingest": {"run_id": "r", "windows": [{"position": "1:0/A:0"}]}'
    for version, actions in enumerate(
        (
            '{"add": {"path": "a", "size": 70}}',
            '{"add": {"path": "b", "size": 50}}\n{"remove": {"path": "a", "size": 70}}',
        )
    ):
        (log / f"{version:020d}.json").write_text(
            f'{{"commitInfo": {{"timestamp": 1000, {note}}}}}\n{actions}\n'
        )
    found = list(commits_of(tmp_path, 1, 50))
    assert [(each.version, each.size, each.written) for each in found] == [(0, 70, 70), (1, 50, 50)]
    assert [each.version for each in commits_of(tmp_path, 1, 50, most=1)] == [1]


class _Links(HTMLParser):
    """What a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "img", "object"):
            self.found.append(tag)
        self.found += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]


def test_the_page_is_one_file_and_text_from_outside_is_escaped() -> None:
    windows = (WindowCounts("w", NOON, 2, 1, 0),)
    told = facts([batch(10, 0, 1)], [commit(1, 10, 5)], windows)
    html = page.html("/home/<script>alert(1)</script>", [told], made=NOON)
    links = _Links()
    links.feed(html)
    assert links.found == []
    assert "url(" not in html
    assert "@import" not in html
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawings) == 9
    for each in drawings:
        ET.fromstring(each)
    assert "duplicates, 2026-01-01 12:00:00 UTC: 2" in html
    assert "withheld, " not in html


def test_the_page_tells_which_service_levels_are_kept() -> None:
    levels = (
        Promise("dim_orders", ServiceLevel(True, 60.0, 61.0, None, None, ("it is late",)), None),
        Promise("dim_customers", ServiceLevel(False, 900.0, 3.0, None, 5.0, ()), "equal to the source"),
    )
    told = replace(facts([batch(10, 0, 1)], [commit(1, 10, 5)]), promises=levels)
    html = page.html("/home", [told], made=NOON)
    assert "<td>dim_orders</td><td>BROKEN</td>" in html and "never compared by checksums" in html
    assert "<td>dim_customers</td><td>kept (default)</td>" in html and "equal to the source" in html
    numbers = page.document("/home", [told])["sources"][0]["service_levels"]
    assert [(each["table"], each["kept"]) for each in numbers] == [
        ("dim_orders", False),
        ("dim_customers", True),
    ]


def test_a_page_of_a_home_without_batches_says_so() -> None:
    assert "Nothing has landed yet." in page.html("/home", [])


@pytest.mark.parametrize("marks", Marks)
def test_a_chart_of_nothing_is_empty_and_one_of_a_single_point_or_zeros_is_drawn(marks: Marks) -> None:
    axes = Axis("time", time=True), Axis("seconds")
    assert chart([Series("a", ())], *axes, marks) == ""
    for points in (((0.0, 0.0),), ((1.0, 0.0), (2.0, 0.0)), ((5.0, 3.0),)):
        drawn = chart([Series("<b>", points)], *axes, marks)
        assert "nan" not in drawn
        assert "&lt;b&gt;" in drawn


def test_no_line_is_drawn_over_a_pause() -> None:
    points = ((0.0, 1.0), (10.0, 1.0), (100.0, 1.0))
    assert [len(each) for each in Series("a", points, apart=20.0).stretches()] == [2, 1]
    assert [len(each) for each in Series("a", points).stretches()] == [3]


def test_ticks_are_round_numbers_that_hold_the_highest_point() -> None:
    size = Axis("size", lambda value: f"{value:g} bytes", base=1024)
    drawn = chart([Series("a", ((0.0, 3.2 * 1024 * 1024),))], Axis("n"), size)
    assert ">4.1943e+06 bytes<" in drawn


def test_events_in_quarantine_without_a_window_are_counted() -> None:
    window = WindowCounts("w", NOON, 0, 0, 2)
    found = replace(facts([batch(10, 0, 1)], [], (window,)), out_of_range=3)
    (source,) = document("home", [found])["sources"]
    assert (source["withheld"], source["out_of_range"]) == (5, 3)
    assert "of them in no window" in html("home", [found])


def test_a_table_whose_log_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one"})]))
    for contract in story.workspace.contracts.of_source(SOURCE):
        log = story.workspace.dimension(contract).folder / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020d}.json").write_bytes(bytes(100))
    (found,) = collect(story.workspace)
    assert len(found.batches) == 1
    assert found.problem is not None and "dim_notes cannot be read (DeltaError)" in found.problem
