"""The rule that recommends a setting, and what it writes: drawn points, and any text of an ``.env``."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from omnisupport_ingest.settings import env_with
from omnisupport_ingest.tuning.curve import drawn, picture
from omnisupport_ingest.tuning.points import (
    ALIKE,
    Bounds,
    Percentiles,
    Point,
    Setting,
    recommend,
    settings_to_try,
)

BAND = 0.9
"""The grey of the range, where 1 is white."""

NAME = "OMNISUPPORT_BATCH_MAX_SECONDS"


def a_point(
    seconds: float, p95: float, *, batches: int = 10, by_size: bool = False, cpu: float = 0.1
) -> Point:
    """A point of 36 seconds, so that each batch is a hundred an hour."""
    setting = Setting(seconds, 1024, by_size)
    landing = Percentiles(p95 / 2, p95, p95 * 1.2)
    return Point(setting, 100.0, 100.0, 3600, batches, 2 * batches, 36.0, cpu, landing)


POINTS = st.lists(
    st.builds(
        a_point,
        st.sampled_from((0.2, 1.0, 5.0)),
        st.floats(0.01, 20),
        batches=st.integers(1, 60),
        by_size=st.booleans(),
        cpu=st.floats(0, 1),
    ),
    max_size=6,
)
BOUNDS = st.builds(Bounds, st.floats(100, 6000), st.floats(100, 12_000), st.floats(0.05, 1))


@given(POINTS, BOUNDS)
def test_what_is_recommended_keeps_every_bound_and_nothing_that_keeps_them_is_much_faster(
    points: list[Point], bounds: Bounds
) -> None:
    allowed = [each for each in points if not each.setting.by_size and not list(bounds.broken_by(each))]
    chosen = recommend(points, bounds)
    if chosen is None:
        assert allowed == []
        return
    assert chosen in allowed
    assert all(chosen.latency.p95 <= ALIKE * each.latency.p95 for each in allowed)
    for each in allowed:
        if each.batches_per_hour < chosen.batches_per_hour:
            assert each.latency.p95 > ALIKE * min(other.latency.p95 for other in allowed)


@given(POINTS, BOUNDS, st.randoms(use_true_random=False))
def test_the_order_of_the_points_does_not_count(points: list[Point], bounds: Bounds, random: object) -> None:
    chosen = recommend(points, bounds)
    assert recommend(random.sample(points, len(points)), bounds) == chosen  # type: ignore[attr-defined]


@given(POINTS, BOUNDS, st.floats(1, 3))
def test_more_room_never_makes_it_slower_than_the_tenth_that_counts_as_alike(
    points: list[Point], bounds: Bounds, factor: float
) -> None:
    chosen = recommend(points, bounds)
    wider = Bounds(bounds.batches_per_hour * factor, bounds.files_per_hour * factor, bounds.cpu * factor)
    if chosen is not None:
        found = recommend(points, wider)
        assert found is not None
        assert found.latency.p95 <= ALIKE * chosen.latency.p95


def test_a_difference_that_is_noise_buys_no_batches() -> None:
    wide = Bounds(10_000, 10_000, 1)
    few, many = a_point(2.0, 1.05, batches=5), a_point(1.0, 1.0, batches=10)
    assert recommend([few, many], wide) is few
    assert recommend([replace(few, landing=Percentiles(1, 1.2, 1.3)), many], wide) is many


def test_a_size_is_never_recommended_and_the_dimension_counts_where_it_was_measured() -> None:
    wide = Bounds(10_000, 10_000, 1)
    assert recommend([a_point(5.0, 0.1, by_size=True)], wide) is None
    slow = replace(a_point(0.2, 0.3), dimension=Percentiles(5, 9, 9))
    fast = replace(a_point(1.0, 1.2), dimension=Percentiles(4, 6, 7))
    assert recommend([slow, fast], wide) is fast


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rate": 89.0}, "89 of 100 changes/s reached"),
        ({"batches": 41, "files": 1}, "4,100 batches/h, at most 4,000"),
        ({"files": 130}, "13,000 files/h, at most 12,000"),
        ({"cpu": 0.31}, "31 % of a core, at most 25"),
    ],
)
def test_a_bound_that_is_broken_is_named(changed: dict[str, float], why: str) -> None:
    bounds, point = Bounds(4000, 12_000, 0.25), a_point(1.0, 1.0)
    assert list(bounds.broken_by(point)) == []
    broken = replace(point, **changed)  # type: ignore[arg-type]
    assert list(bounds.broken_by(broken)) == [why]
    assert recommend([broken], bounds) is None


def test_sizes_are_tried_with_the_longest_interval() -> None:
    assert settings_to_try([5.0, 1.0, 5.0], [10], 1000) == [
        Setting(1.0, 1000),
        Setting(5.0, 1000),
        Setting(5.0, 10, by_size=True),
    ]


LINES = st.lists(
    st.sampled_from(
        (
            "",
            "# a comment",
            "OTHER=1",
            "  SPACED = 'two words' # why",
            "export EXPORTED=x",
            f"{NAME}=9",
            f"export {NAME} = '9' # old",
            f"{NAME.lower()}=9",
            f"#{NAME}=7",
            f'LONG="first\n{NAME}=inside\nlast"',
        )
    ),
    max_size=8,
)


@given(LINES, st.sampled_from(("", "\n")))
def test_only_the_setting_changes_in_an_env_file(lines: list[str], end: str) -> None:
    before = "\n".join(lines) + end
    after = env_with(before, {NAME: "2.5"})
    old, new = (dotenv_values(stream=io.StringIO(text), interpolate=False) for text in (before, after))
    ours = [name for name in new if name.upper() == NAME]
    assert ours
    assert all(new[name] == "2.5" for name in ours)
    assert {name: new[name] for name in new if name not in ours} == {
        name: old[name] for name in old if name.upper() != NAME
    }
    assert [each for each in before.splitlines() if each.startswith("#")] == [
        each for each in after.splitlines() if each.startswith("#")
    ]
    assert env_with(after, {NAME: "2.5"}) == after


def test_the_curve_marks_the_range_of_the_literature_on_both_axes() -> None:
    points = [a_point(0.2, 0.3), a_point(1.0, 1.2), a_point(1.0, 0.2, batches=50, by_size=True)]
    root = ET.fromstring(drawn(points))
    bands = [each for each in root.iter() if each.get("class") == "band"]
    assert len(bands) == 2
    assert all(float(each.get("width", "0")) > 0 for each in bands)
    # Both axes reach over the range: it ends where they do.
    assert {float(each.get("x", "0")) + float(each.get("width", "0")) for each in bands} == {704.0}
    words = {each.text for each in root.iter() if each.text}
    assert {"literature: 1 to 5 minutes", "literature: 50,000 to 100,000 rows"} <= words
    assert {"cut by age, p95, 360: 1.2 s", "commit to durable batch, p95, 1: 1.2 s"} <= words


def test_the_picture_has_both_charts_and_marks_the_range_in_each() -> None:
    points = [a_point(0.2, 0.3), a_point(1.0, 1.2), a_point(1.0, 0.2, batches=50, by_size=True)]
    pixels = imread(io.BytesIO(picture(points)), format="png")[:, :, :3]
    height, _, _ = pixels.shape
    for half in (pixels[: height // 2], pixels[height // 2 :]):
        grey = abs(half - BAND).max(axis=2) < 0.01
        # A tall stretch at the right, beyond what was measured.
        assert grey.sum(axis=0).max() > height // 4
        # Three percentiles, each in a colour of its own.
        coloured = half[half.max(axis=2) - half.min(axis=2) > 0.5]
        assert len({tuple(each) for each in coloured.round(1)}) >= 3
