"""Short homes: together they have every stage, kind of step and way, and each has a part of them."""

from __future__ import annotations

from collections import Counter

from omnisupport_ingest_tests.proof.short import short
from omnisupport_ingest_tests.proof.story import ERASE_SUBJECTS, LATER_STEPS, LOOSEN, STAGES, STEPS
from omnisupport_ingest_tests.proof.ways import CAPTURE, WAYS

PARTS = [short(range(start, start + 2)) for start in range(0, 400, 2)]
STORIES = [part.story for part in PARTS if part.story is not None]


def test_a_part_is_the_same_whenever_it_is_drawn() -> None:
    assert [short(range(start, start + 2)).ways for start in range(0, 400, 2)] == [
        each.ways for each in PARTS
    ]


def test_each_home_is_about_the_layers_or_about_one_way() -> None:
    by = Counter(way for part in PARTS for way in part.ways)
    assert set(by) == set(WAYS) and by.most_common(1)[0][0] == CAPTURE
    assert all((part.story is None) == (len(part.ways) == 1) for part in PARTS)
    assert len(PARTS) / 2 < len(STORIES) < len(PARTS)


def test_every_stage_is_drawn_but_the_comparison_that_another_one_repeats() -> None:
    drawn = Counter(stage for story in STORIES for stage in story.stages)
    assert set(drawn) == set(STAGES) - {"compare at the end of the schedule"}
    assert all(len(story.stages) < len(STAGES) - 1 for story in STORIES)
    assert any(story.gaps for story in STORIES)


def test_every_kind_of_step_may_come_that_is_no_comparison() -> None:
    kinds = {kind for story in STORIES for kind in story.kinds or ()}
    every = {*STEPS, *LATER_STEPS, ERASE_SUBJECTS, LOOSEN}
    assert kinds == every - {"compare", "make histories"}


def test_what_is_told_otherwise_is_compared_by_hashes() -> None:
    otherwise = [story for story in STORIES if "deliver it otherwise" in story.stages]
    assert otherwise
    for story in otherwise:
        assert story.verdicts_follow_from_events and story.protecting == 0
        # What lands encrypted is other bytes in each home.
        assert story.kinds is not None and "other policies" not in story.kinds
