"""What a home of the proof is about, drawn from its seeds: its events, how they land, what is done between.

What was added later is drawn from lots of its own, so that the stories of known seeds stay what they were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from omnisupport_ingest_tests.proof.cut import WHOLE, Cut, cut_for
from omnisupport_ingest_tests.proof.delivery import Batch, Gap, gaps, in_time, schedule
from omnisupport_ingest_tests.proof.history import lane
from omnisupport_ingest_tests.proof.policies import PROTECTIONS
from omnisupport_ingest_tests.proof.quality import drawn
from omnisupport_ingest_tests.proof.tables import SHAPES, VERSIONS, Terms, spelled, types_of

LAND_ON, RUN_SOME, STOP, REPLAY = (
    "land on",
    "run some windows",
    "stop between layers",
    "replay some windows",
)
OVERLAPPING, RUN_ALL, TWO_WRITERS = "overlapping replays", "run all, late ones too", "two writers"
CONTRACTS, HISTORIES, COMPARE = "other contracts", "make histories", "compare"
ERASE, REVIEW, DECISIONS = "erase", "review", "another decision table"
STEPS = (
    LAND_ON,
    RUN_SOME,
    STOP,
    REPLAY,
    OVERLAPPING,
    RUN_ALL,
    TWO_WRITERS,
    CONTRACTS,
    HISTORIES,
    COMPARE,
    ERASE,
    REVIEW,
    DECISIONS,
)
"""The kinds of steps that are dealt between the landings."""

POLICIES, LEARN = "other policies", "learn a column"
LATER_STEPS = (POLICIES, LEARN)
"""Kinds that are dealt by lots of their own."""

ERASE_SUBJECTS = "erase subjects"
"""The kind of steps by which subjects are erased; by lots of its own too."""

LOOSEN = "loosen a rule"
"""The kind of steps by which a contract gets a looser rule; likewise."""

IN_BETWEEN, AT_THE_END = "compare before what is late", "compare at the end of the schedule"
OTHERWISE, REBUILD = "deliver it otherwise", "make the lake again"
STAGES = (IN_BETWEEN, AT_THE_END, OTHERWISE, REVIEW, ERASE, REBUILD)
"""What a home does at its end, and before the last of what is late lands."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "late_arrival": ("replay_window",) * 4 + ("ingest", "quarantine"),
    "too_late_arrival": ("quarantine", "quarantine", "replay_window"),
    "duplicate_event": ("dedupe",) * 5 + ("replay_window",),
    "duplicate_position": ("dedupe",) * 4 + ("quarantine",),
    "out_of_order_event": ("quarantine", "quarantine", "accept"),
    "older_epoch": ("quarantine", "quarantine", "accept"),
}
"""Actions that a home's decision table may have, the usual ones more often."""


_REJECTING = 0.4
"""The share of homes in which rules may reject a batch."""


@dataclass(frozen=True)
class Story:
    """What a home is about, drawn from its seeds.

    ``order``: of the files that events come in, null where capture follows a stream. ``batches``: in
    landing order. ``actions``: what its decision table says otherwise than the usual one. ``steps``: how many
    there are after each landing. ``in_time``: after so many landings, only late events land.
    ``late_steps``: how many there are after one of those. ``kinds``: of steps; null: all.
    ``gaps``: in the chain of batches. ``cut``: how Spark's work is. ``protecting``: what its contracts say of
    personal data at first, of ``PROTECTIONS``. ``versions``: of its contracts, with their rules. ``stages``:
    those of ``STAGES`` that it has.
    """

    seeds: range
    order: str | None
    epochs: int
    batches: list[Batch]
    actions: Mapping[str, str]
    steps: int
    late_steps: int
    in_time: int
    kinds: Collection[str] | None = None
    gaps: tuple[Gap, ...] = ()
    cut: Cut = WHOLE
    protecting: int = 0
    versions: tuple[Mapping[str, Terms], ...] = VERSIONS
    stages: Collection[str] = STAGES

    @property
    def verdicts_follow_from_events(self) -> bool:
        """Whether it does not matter to any verdict when an event lands."""
        return self.order is None and self.epochs == 1 and self.actions["late_arrival"] != "quarantine"


@dataclass(frozen=True)
class Source:
    """``order``: of its files, null for a stream. ``epochs``: how many its events are of."""

    order: str | None
    epochs: int


def draw(
    seeds: range,
    slots: int | None = None,
    steps: int = 2,
    late_steps: int | None = None,
    kinds: Collection[str] | None = None,
    source: Source | None = None,
) -> Story:
    """The story of ``seeds``: the same every time. ``slots``: at how many times something lands.

    ``steps``: how many there are after each, of which ``kinds`` (null: all); ``late_steps``: after those that
    bring late events alone (null: as many). ``source``: null: drawn.
    """
    rng = Random(f"home {seeds.start} {len(seeds)}")
    late = steps if late_steps is None else late_steps
    order = rng.choice((None, None, None, "transaction", "lsn", "time"))
    epochs = rng.choice((1, 2, 2, 3))
    if source is not None:
        order, epochs = source.order, source.epochs
    sure = order in (None, "transaction")
    lanes = {seed: lane(seed, epochs=epochs, sure_order=sure) for seed in seeds}
    slots = slots or rng.randint(5, 8)
    batches = schedule(rng, lanes, slots, order)
    actions = {scenario: rng.choice(actions) for scenario, actions in CHOICES.items()}
    versions = versions_with_rules(Random(f"rules {seeds.start} {len(seeds)}"))
    rejects = Random(f"batches that rules reject {seeds.start} {len(seeds)}").random() < _REJECTING
    return Story(
        seeds,
        order,
        epochs,
        batches,
        actions,
        steps,
        late,
        in_time(slots),
        kinds,
        gaps(Random(f"gaps {seeds.start} {len(seeds)}"), batches),
        cut_for(Random(f"cut {seeds.start} {len(seeds)}"), len(seeds)),
        Random(f"policies {seeds.start} {len(seeds)}").choice((0, *range(len(PROTECTIONS)))),
        versions if rejects else rejecting_nothing(versions),
    )


def rejecting_nothing(versions: Sequence[Mapping[str, Terms]]) -> tuple[Mapping[str, Terms], ...]:
    """The versions with rules that have single rows wait where they would have whole batches wait.

    Which batches are rejected depends on how events land, so the same events delivered otherwise come to
    other contents.
    """
    return tuple({table: terms.rejecting_nothing() for table, terms in each.items()} for each in versions)


def versions_with_rules(rng: Random) -> tuple[Mapping[str, Terms], ...]:
    """The versions of the contracts with rules whose policies are drawn, and what histories leave out."""
    starts = ("short gone", "gone", "long gone")
    numbers = [number for number in range(0, 1100, 5) if number % 23]
    gone = [str(spelled("gone", f"{each} {number}")) for each in starts for number in numbers]
    only = {shape.name: rng.random() < 0.5 for shape in SHAPES}
    found = []
    for version in VERSIONS:
        with_rules = {}
        for shape in SHAPES:
            terms = version[shape.name]
            source = terms.source_of(shape)
            types = {name: types_of(source).get(name, "text") for name in source.columns}
            rules = drawn(rng, shape.name, terms.rules, types, gone)
            with_rules[shape.name] = replace(terms, rules=rules, changed_only=only[shape.name])
        found.append(with_rules)
    return tuple(found)
