"""What a checkpoint repeats of its batches does not depend on the order in which they are met."""

from __future__ import annotations

from pathlib import Path

from omnisupport_ingest.layers.batch_facts import facts_of_parts
from omnisupport_ingest_tests.layers.story import FIRST, Change, Commit, Story


def test_of_two_batches_with_the_same_events_the_later_one_is_named(tmp_path: Path):
    story = Story(tmp_path)
    insert = Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})])
    batches = [story.land(insert), story.land_again(insert)]
    parts = story.store.parts(FIRST)
    facts = facts_of_parts(parts)
    assert facts.last_batch_id == batches[1].batch_id
    assert facts == facts_of_parts(reversed(parts))
