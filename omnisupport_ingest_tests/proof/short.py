"""Short homes: each does a part of what a whole one does, by lot, and so takes a minute and not several.

Nearly all of a home's time is the processor's, for the plans of Spark: as much for six histories as for
sixty, and the same for each run of the layers and for each making of histories. A whole home runs the layers
more than a dozen times. Most of its comparisons look at the same rows again, after one more step.
So a short home does less between two landings and has some of the stages alone, or brings its histories in by
one way; what one leaves out, others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from omnisupport_ingest_tests.proof.by_alters import WHOLE, Extent
from omnisupport_ingest_tests.proof.story import (
    COMPARE,
    DECISIONS,
    ERASE,
    ERASE_SUBJECTS,
    HISTORIES,
    IN_BETWEEN,
    LATER_STEPS,
    LOOSEN,
    OTHERWISE,
    POLICIES,
    REBUILD,
    REVIEW,
    STEPS,
    Source,
    Story,
    draw,
)
from omnisupport_ingest_tests.proof.ways import CAPTURE, WAYS

_LANDINGS = 2
_LAYERS = 0.7
"""The share of homes that are about the layers; the others are about a way."""

_OTHERWISE = 0.25
"""Of these, the share of those whose events are delivered otherwise in the end; the hashes must agree."""

_STAGES = {IN_BETWEEN: 0.4, REVIEW: 0.4, ERASE: 0.25, REBUILD: 0.3}
"""The share of the others that has each stage."""

_GAPS = 0.4
"""Of the gaps that are drawn, the share that stays: each has the home compared once more."""

_ALTERS = Extent(tables=2, rounds=2)


@dataclass(frozen=True)
class Part:
    """What a home does. ``story``: null: nothing but bringing its histories in by ``ways``, with tables of
    ``extent`` that ALTERs change."""

    story: Story | None
    ways: Sequence[str] = ()
    extent: Extent = WHOLE


def short(seeds: range, landings: int | None = None) -> Part:
    """The part that a short home of ``seeds`` does: the same every time."""
    rng = Random(f"short {seeds.start} {len(seeds)}")
    if rng.random() > _LAYERS:
        # Of the ways, half of the turns are for the one that has a workload of its own.
        return Part(None, (rng.choice((*WAYS, *[CAPTURE] * (len(WAYS) - 2))),), _ALTERS)
    slots, late_steps = landings or _LANDINGS, rng.randint(0, 1)
    without = {COMPARE, HISTORIES}
    if rng.random() < _OTHERWISE:
        without |= {POLICIES, ERASE_SUBJECTS, REVIEW, DECISIONS}
        # Two homes take more time than one, so no step follows what is late.
        story = draw(seeds, slots, 1, 0, _kinds(without), Source(None, 1))
        actions = {**story.actions, "late_arrival": "replay_window"}
        # What lands encrypted is other bytes in each home, so there hashes say nothing.
        return Part(replace(story, actions=actions, protecting=0, gaps=(), stages=(OTHERWISE,)))
    story = draw(seeds, slots, 1, late_steps, _kinds(without))
    stages = tuple(name for name, share in _STAGES.items() if rng.random() < share)
    gaps = story.gaps if rng.random() < _GAPS else ()
    return Part(replace(story, gaps=gaps, stages=stages))


def _kinds(without: set[str]) -> tuple[str, ...]:
    return tuple(each for each in (*STEPS, *LATER_STEPS, ERASE_SUBJECTS, LOOSEN) if each not in without)
