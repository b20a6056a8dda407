"""One home of the proof: random steps of the platform, and at rest every layer against the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from random import Random

from pyspark.sql import SparkSession

from omnisupport_ingest.stages.event_ref import EventRef
from omnisupport_ingest_tests.oracle.judging import Delivery, EventKey, Law
from omnisupport_ingest_tests.proof.compare import Difference, differences, quarantined
from omnisupport_ingest_tests.proof.delivery import Batch, schedule
from omnisupport_ingest_tests.proof.expected import Expected, Landed
from omnisupport_ingest_tests.proof.history import Told, lane
from omnisupport_ingest_tests.proof.platform import WINDOW, Platform
from omnisupport_ingest_tests.proof.tables import VERSIONS

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "late_arrival": ("replay_window",) * 4 + ("ingest", "quarantine"),
    "too_late_arrival": ("quarantine", "quarantine", "replay_window"),
    "duplicate_event": ("dedupe",) * 5 + ("replay_window",),
    "duplicate_position": ("dedupe",) * 4 + ("quarantine",),
    "out_of_order_event": ("quarantine", "quarantine", "accept"),
    "older_epoch": ("quarantine", "quarantine", "accept"),
}
"""Actions that a home's decision table may have, the usual ones more often."""

_RELEASABLE = frozenset(
    {"collision", "older_epoch", "out_of_order_event", "too_late_arrival", "late_arrival"}
)


class ProofFailed(AssertionError):
    """A layer holds what it must not; ``differences`` are the first ones, ``told`` the events of the history
    of one of them."""

    def __init__(self, when: str, found: list[Difference], told: list[str]) -> None:
        self.when, self.differences = when, found
        super().__init__("\n".join([when, *map(str, found), *told]))


@dataclass(frozen=True)
class Story:
    """What a home is about, drawn from its seeds.

    ``order``: of the files that events come in, null where capture follows a stream. ``batches``: in
    landing order. ``actions``: what its decision table says otherwise than the usual one.
    """

    seeds: range
    order: str | None
    epochs: int
    batches: list[Batch]
    actions: Mapping[str, str]

    @property
    def verdicts_follow_from_events(self) -> bool:
        """Whether it does not matter to any verdict when an event lands."""
        return self.order is None and self.epochs == 1 and self.actions["late_arrival"] != "quarantine"


@dataclass
class Tally:
    """What a run of homes has seen."""

    histories: int = 0
    homes: int = 0
    copies: int = 0
    comparisons: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    scenarios: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.homes += other.homes
        self.copies += other.copies
        self.comparisons += other.comparisons
        self.steps += other.steps
        self.scenarios += other.scenarios


def draw(seeds: range, slots: int | None = None) -> Story:
    """The story of ``seeds``: the same every time. ``slots``: at how many times something lands."""
    rng = Random(f"home {seeds.start} {len(seeds)}")
    order = rng.choice((None, None, None, "transaction", "lsn", "time"))
    epochs = rng.choice((1, 2))
    sure = order in (None, "transaction")
    lanes = {seed: lane(seed, epochs=epochs, sure_order=sure) for seed in seeds}
    batches = schedule(rng, lanes, slots or rng.randint(5, 8), order)
    actions = {scenario: rng.choice(actions) for scenario, actions in _CHOICES.items()}
    return Story(seeds, order, epochs, batches, actions)


def prove(story: Story, folder: Path, spark: SparkSession, *, say: Callable[[str], None]) -> Tally:
    """Run the story in homes below ``folder``; ``ProofFailed`` says what differs, and when."""
    home = _Home(story, folder / "home", spark, say)
    home.tell()
    return home.tally


class _Home:
    def __init__(self, story: Story, folder: Path, spark: SparkSession, say: Callable[[str], None]) -> None:
        self._story, self._folder, self._spark, self._say = story, folder, spark, say
        self._rng = Random(f"steps {story.seeds.start} {len(story.seeds)}")
        self._version = 0
        self._actions = dict(story.actions)
        self._reviews: dict[EventKey, str] = {}
        self._landed = Landed()
        self._platform = Platform(folder, spark, VERSIONS[0], story.actions)
        self.tally = Tally(histories=len(story.seeds), homes=1)

    def tell(self) -> None:
        told_otherwise = self._story.verdicts_follow_from_events
        for _, batches in groupby(self._story.batches, key=lambda batch: batch.landed_at.replace(second=0)):
            for batch in batches:
                self._land(batch)
            for _ in range(self._rng.randint(1, 2)):
                self._step(reviews=not told_otherwise)
        self._settle("at the end of the schedule")
        if told_otherwise:
            self._tell_otherwise()
        self._review()
        self._settle("after the last reviews")
        self._rebuild()

    def _land(self, batch: Batch) -> None:
        self._platform.land(batch)
        self._landed.take(batch)
        self.tally.copies += len(batch.told)

    def _step(self, *, reviews: bool) -> None:
        """Something that a platform does, or its users, between two times at which batches land."""
        rng, platform = self._rng, self._platform
        windows = platform.windows
        some = rng.sample(windows, rng.randint(1, len(windows))) if windows else []
        steps: dict[str, Callable[[], None]] = {
            "land on": lambda: None,
            "run some windows": lambda: platform.run(some),
            "stop between layers": lambda: platform.run(some, layers=rng.randint(1, 3)),
            "replay some windows": lambda: platform.run(some, replay=True),
            "run all, late ones too": lambda: platform.catch_up(backfill_late=False),
            "two writers": lambda: platform.run_together(some, replays=(False, rng.random() < 0.5)),
            "another law": self._change_law,
            "compare": lambda: self._settle("in the middle of the schedule"),
        }
        if reviews:
            steps["review"] = self._review
        name = rng.choice(sorted(steps))
        self._did(name)
        steps[name]()

    def _did(self, name: str) -> None:
        self.tally.steps[name] += 1
        self._say(f"  {name}")

    def _change_law(self) -> None:
        self._version = self._rng.choice([each for each in range(len(VERSIONS)) if each != self._version])
        if self._rng.random() < 0.5 and not self._story.verdicts_follow_from_events:
            scenario = self._rng.choice(sorted(_CHOICES))
            self._actions[scenario] = self._rng.choice(_CHOICES[scenario])
        self._platform.change_law(VERSIONS[self._version], self._actions)

    def _law(self) -> Law:
        terms, decisions = VERSIONS[self._version], self._platform.decisions
        return Law(
            actions={name: each.action for name, each in decisions.decisions.items()},
            to_review=frozenset(n for n, each in decisions.decisions.items() if each.needs_manual_review),
            lateness={table: each.lateness for table, each in terms.items()},
            longest={table: each.longest for table, each in terms.items()},
            window_length=WINDOW.length,
            reviews=dict(self._reviews),
        )

    def _settle(self, when: str) -> None:
        """Let everything be run that is pending, and compare."""
        self._platform.catch_up()
        expected = Expected(self._landed.deliveries, self._law())
        self._require(when, differences(self._platform.workspace, expected), expected)
        self.tally.comparisons += 1
        self.tally.scenarios = Counter(
            str(each.reason) for each in expected.verdicts.values() if each.reason is not None
        )

    def _require(self, when: str, found: Iterator[Difference], expected: Expected | None = None) -> None:
        first = [each for each, _ in zip(found, range(8), strict=False)]
        if not first:
            return
        seed = next((each.lane for each in first if each.lane is not None), None)
        told = [] if seed is None or expected is None else [f"History {seed}:", *expected.of_lane(seed)]
        raise ProofFailed(when, first, told)

    def _review(self) -> None:
        """Release or discard some of what is in quarantine, sometimes what was decided otherwise before."""
        self._platform.catch_up()
        for decision in ("release", "discard"):
            chosen = self._chosen(decision)
            if chosen:
                self._platform.review(decision, chosen.values())
                self._reviews |= dict.fromkeys(chosen, decision)
                self.tally.steps[decision] += len(chosen)

    def _chosen(self, decision: str) -> dict[EventKey, EventRef]:
        numbered = {each.number: each for each in self._landed.deliveries}
        taken = {key[:2] for key, decided in self._reviews.items() if decided == "release"}
        chosen: dict[EventKey, EventRef] = {}
        for row in sorted(quarantined(self._platform.workspace), key=lambda row: row["lsn"]):
            delivery = numbered[row["lsn"]]
            if row["reason"] == "duplicate_position" or self._rng.random() > 0.25:
                continue
            if decision == "release" and not _can_be_released(row["reason"], row["rules"], delivery):
                continue
            if decision == "release" and delivery.key[:2] in taken:
                continue
            taken.add(delivery.key[:2])
            place = (row["epoch"], row["commit_lsn"], row["ordinal"], row["event_hash"])
            chosen[delivery.key] = EventRef.of(*place)
        return chosen

    def _rebuild(self) -> None:
        """The lake deleted and made again in one pass: the same content in every window of every layer."""
        before = self._platform.content()
        self._platform.forget_the_lake()
        self._did("rebuild")
        self._settle("after a rebuild")
        self._require("after a rebuild", _contents_differ(self._platform.content(), before))

    def _tell_otherwise(self) -> None:
        """The same copies in other batches, in any order: the same content in every window and layer."""
        other = Platform(self._folder.with_name("otherwise"), self._spark, VERSIONS[0], self._story.actions)
        other.change_law(VERSIONS[self._version], self._actions)
        for batch in _cut_otherwise(self._rng, self._story.batches):
            other.land(batch)
            if self._rng.random() < 0.3:
                other.run(other.windows, replay=self._rng.random() < 0.5)
        other.catch_up()
        self._did("the same told otherwise")
        found = _contents_differ(other.content(), self._platform.content())
        self._require("the same copies in other batches", found)
        self.tally.comparisons += 1


def _can_be_released(reason: str, rules: list[str] | None, delivery: Delivery) -> bool:
    return reason in _RELEASABLE and not rules and not delivery.malformed


def _contents_differ(
    found: Mapping[tuple[str, str], str], expected: Mapping[tuple[str, str], str]
) -> Iterator[Difference]:
    for table, window in sorted(found.keys() | expected.keys()):
        place = table, window
        if found.get(place) != expected.get(place):
            yield Difference(table, f"content of {window}", found.get(place), expected.get(place))


def _cut_otherwise(rng: Random, batches: list[Batch]) -> Iterator[Batch]:
    """Every copy of ``batches`` once, in other batches, by the latest clock: no time is ahead of that."""
    now = max(batch.landed_at for batch in batches)
    parts: dict[tuple[int, str], list[Told]] = {}
    for batch in batches:
        for told in batch.told:
            parts.setdefault((rng.randrange(4), batch.kind), []).append(told)
    for (_, kind), members in sorted(parts.items()):
        rng.shuffle(members)
        yield replace(batches[0], kind=kind, landed_at=now, told=tuple(members))
