"""One home of the proof: random steps of the platform, and at rest every layer against the oracle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import SparkSession

from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.oracle.judging import (
    ACCEPTED,
    QUARANTINED,
    REJECT_BATCH,
    Delivery,
    EventKey,
    JudgingRules,
)
from omnisupport_ingest_tests.oracle.model import Event, Key, Position
from omnisupport_ingest_tests.proof.compare import (
    Difference,
    differences,
    differences_of_events,
    folded_by_columns,
    quarantined,
)
from omnisupport_ingest_tests.proof.cut import cutting
from omnisupport_ingest_tests.proof.delivery import Batch
from omnisupport_ingest_tests.proof.erasing import (
    AskedSubject,
    Span,
    complete,
    erase_some,
    erase_subjects,
    in_the_home,
)
from omnisupport_ingest_tests.proof.expected import Expected
from omnisupport_ingest_tests.proof.history import Told
from omnisupport_ingest_tests.proof.landed import Landed, Subject
from omnisupport_ingest_tests.proof.platform import WINDOW, Platform
from omnisupport_ingest_tests.proof.policies import PROTECTIONS
from omnisupport_ingest_tests.proof.privacy import exposed_files, hidden_by
from omnisupport_ingest_tests.proof.story import (
    AT_THE_END,
    CHOICES,
    COMPARE,
    CONTRACTS,
    DECISIONS,
    ERASE,
    ERASE_SUBJECTS,
    HISTORIES,
    IN_BETWEEN,
    LAND_ON,
    LEARN,
    LOOSEN,
    OTHERWISE,
    OVERLAPPING,
    POLICIES,
    REBUILD,
    REPLAY,
    REVIEW,
    RUN_ALL,
    RUN_SOME,
    STOP,
    TWO_WRITERS,
    Story,
)
from omnisupport_ingest_tests.proof.subjects import Left
from omnisupport_ingest_tests.proof.tables import (
    KEY,
    LEARNABLE,
    NO_VALUE,
    SHAPES,
    SOURCE,
    Terms,
    shapes_of,
    sources_of,
    types_of,
)
from omnisupport_ingest_tests.proof.tally import Tally, in_histories

_RELEASABLE = frozenset(
    {"collision", "older_epoch", "out_of_order_event", "too_late_arrival", "late_arrival", "batch_rejected"}
)

_WAITS_FOR_RULES = frozenset({"row_rule", "batch_rejected"})


ELSEWHERE = "  another machine goes on"
"""What is said when one does (``Platform.go_on_elsewhere``)."""


class ProofFailed(AssertionError):
    """A layer holds what it must not; ``differences`` are the first ones, ``told`` the events of the history
    of one of them."""

    def __init__(self, when: str, found: list[Difference], told: list[str]) -> None:
        self.when, self.differences = when, found
        super().__init__("\n".join([when, *map(str, found), *told]))


@dataclass(frozen=True)
class Proved:
    """What a home has seen, and its layers as they were in the end, with what they had to hold."""

    tally: Tally
    workspace: Workspace
    expected: Expected


def prove(
    story: Story,
    folder: Path,
    spark: SparkSession,
    *,
    say: Callable[[str], None],
    tally: Tally | None = None,
) -> Proved:
    """Run the story in homes below ``folder``; ``ProofFailed`` says what differs, and when.

    ``tally``: an empty one, which counts what happens, up to a failure too.
    """
    home = _Home(story, folder / "home", spark, say, Tally() if tally is None else tally)
    with cutting(spark, story.cut) as grouped:
        try:
            expected = home.tell()
        finally:
            home.tally.did("frames in several partitions", sum(parts > 1 for parts in grouped))
            home.count()
    return Proved(home.tally, home.workspace, expected)


class _Home:
    def __init__(
        self, story: Story, folder: Path, spark: SparkSession, say: Callable[[str], None], tally: Tally
    ) -> None:
        self._story, self._folder, self._spark, self._say = story, folder, spark, say
        self._rng = Random(f"steps {story.seeds.start} {len(story.seeds)}")
        self._version, self._protecting = 0, story.protecting
        self._versions = [dict(each) for each in story.versions]
        self._learned: dict[str, dict[str, str | None]] = {shape.name: {} for shape in SHAPES}
        self._actions = dict(story.actions)
        self._reviews: dict[EventKey, str] = {}
        self._erasures: dict[tuple[str, Key], set[Span]] = defaultdict(set)
        self._held_back: dict[str, dict[tuple[str, str], str]] = {}
        # Of its own, so that what came later leaves the steps of known seeds what they were.
        self._lots = Random(f"erasures and types {story.seeds.start} {len(story.seeds)}")
        self._later_lots = Random(f"policies and learned columns {story.seeds.start} {len(story.seeds)}")
        self._subject_lots = Random(f"subjects {story.seeds.start} {len(story.seeds)}")
        self._rule_lots = Random(f"looser rules {story.seeds.start} {len(story.seeds)}")
        self._waited_for_rules: set[int] = set()
        self._loosened = False
        self._subjects: set[Subject] = set()
        self._asked: list[AskedSubject] = []
        self._purged: dict[tuple[str, Key], Position] = {}
        self._landed = Landed()
        self._platform = Platform(folder, spark, self._terms, story.actions)
        self._dealt: list[str] = []
        self._dealt_later: list[str] = []
        self._changed_later = False
        self._held: Counter[str] = Counter()
        self._lost: dict[int, str] = {}
        self._landings = 0
        self.tally = tally
        tally.histories, tally.homes = len(story.seeds), 1

    @property
    def workspace(self) -> Workspace:
        return self._platform.workspace

    @property
    def _terms(self) -> dict[str, Terms]:
        """The contracts as they are in force."""
        protecting = PROTECTIONS[self._protecting]
        versions = self._versions[self._version].items()
        return {table: each.under(protecting, table, self._learned[table]) for table, each in versions}

    def tell(self) -> Expected:
        """The whole story; what the layers had to hold in the end."""
        story = self._story
        told_otherwise = story.verdicts_follow_from_events and OTHERWISE in story.stages
        landings = groupby(story.batches, key=lambda batch: batch.landed_at.replace(second=0))
        for number, (_, batches) in enumerate(landings):
            if number == story.in_time:
                self._before_what_is_late()
            for batch in batches:
                self._land(batch)
            late = number >= story.in_time
            for _ in range(story.late_steps if late else story.steps):
                self._step()
        expected = None
        if told_otherwise or AT_THE_END in story.stages:
            expected = self._settle("at the end of the schedule")
        if told_otherwise:
            self._tell_otherwise()
        if REVIEW in story.stages:
            self._review()
        if ERASE in story.stages:
            self._erase()
        if elsewhere := self._platform.go_on_elsewhere():
            self._say(ELSEWHERE)
        if expected is None or elsewhere or {REVIEW, ERASE} & {*story.stages}:
            expected = self._settle("after the last reviews and erasures")
        if REBUILD in story.stages:
            expected = self._rebuild()
        if story.cut.few == 0:
            for shape in expected.shapes:
                groups = folded_by_columns(self.workspace, shape)
                self.tally.did("groups folded by whole columns", groups)
        return expected

    def _before_what_is_late(self) -> None:
        """What happens once at least, before the last landings, which bring only what is late."""
        stages = self._story.stages
        if self._story.order is not None and ERASE in stages:
            # So that some of what is late is of rows that were erased.
            self._erase()
        if not self._changed_later:
            self._later_step()
        if not self.tally.things["erasures of subjects completed"] and not self._asked:
            self._erase_subjects()
        if not self._loosened:
            self._loosen()
        if IN_BETWEEN in stages:
            self._settle("before the last of what is late")

    def count(self) -> None:
        """Count what is not counted as it happens."""
        self.tally.things += self._held
        watch = self._platform.watch
        self.tally.did("replays", self._platform.replays)
        self.tally.did("windows closed", watch.closed)
        self.tally.did("windows folded", watch.folded)
        self.tally.did("replays of closed windows", watch.replayed_closed)
        self.tally.did("replays of folded windows", watch.replayed_folded)

    def _land(self, batch: Batch) -> None:
        platform = self._platform
        closed = platform.watch.closed_windows(platform.workspace)
        folded = platform.watch.folded_windows(platform.workspace)
        before, encrypted = len(self._landed.deliveries), self._landed.encrypted
        batch_id = platform.land(batch).batch_id
        self._landed.take(batch, batch_id, self._terms)
        self._lose_or_find(batch_id)
        self.tally.copies += len(batch.told)
        self.tally.did("copies that landed encrypted", self._landed.encrypted - encrypted)
        self.tally.did("idle batches", not batch.told)
        for each in self._landed.deliveries[before:]:
            event = each.event
            self.tally.did("events into closed windows", each.window in closed)
            self.tally.did("events into folded windows", each.window in folded)
            purged = event.key and self._purged.get((event.table, event.key))
            self.tally.did("events below a purged delete", bool(purged and event.at < purged))
            self.tally.did("events of rows that were erased before", self._was_erased(event))
            whose = self._landed.copies[each.number].whose.values()
            self.tally.did("events of subjects that were erased before", not self._subjects.isdisjoint(whose))

    def _was_erased(self, event: Event) -> bool:
        spans = self._erasures[event.table, event.key] if event.key else ()
        return any(event.at <= last and (above is None or event.at > above) for above, last in spans)

    def _lose_or_find(self, batch_id: str) -> None:
        """After a batch has landed: it is lost, or one that was lost is back."""
        self._landings += 1
        for gap in self._story.gaps:
            if gap.lost == self._landings - 1:
                self._say("  a batch is lost")
                self._lost[gap.lost] = batch_id
                self._platform.lose(batch_id)
                self._landed.lose(batch_id)
            if gap.back == self._landings:
                self._settle("with a gap in the chain")
                self._say("  the batch is back")
                self._platform.find(self._lost[gap.lost])
                self._landed.find(self._lost[gap.lost])
                self.tally.did("gaps filled again")

    def _step(self) -> None:
        """Something that a platform does, or its users, between two times at which batches land.

        Steps are dealt like cards, so that each kind has its turn before one comes again.
        """
        rng, platform = self._rng, self._platform
        windows = platform.windows
        some = rng.sample(windows, rng.randint(1, len(windows))) if windows else []
        steps: dict[str, Callable[[], None]] = {
            LAND_ON: lambda: None,
            RUN_SOME: lambda: platform.run(some),
            STOP: lambda: self._stop_between_layers(some),
            REPLAY: lambda: self._replay([some]),
            OVERLAPPING: lambda: self._replay([some, [*some[1:], *windows[:2]]]),
            RUN_ALL: lambda: platform.catch_up(backfill_late=False),
            TWO_WRITERS: lambda: self._two_writers(some),
            CONTRACTS: self._change_contracts,
            HISTORIES: self._make_histories,
            COMPARE: self._settle_in_between,
            ERASE: self._erase,
        }
        if not self._story.verdicts_follow_from_events:
            steps |= {REVIEW: self._review, DECISIONS: self._change_decisions}
        if not self._dealt:
            kinds = [name for name in sorted(steps) if name in (self._story.kinds or steps)]
            self._dealt = rng.sample(kinds, len(kinds))
        name = self._dealt.pop()
        self._say(f"  {name}")
        steps[name]()
        if self._later_lots.random() < 0.4:
            self._later_step()
        if self._subject_lots.random() < 0.15:
            self._erase_subjects()
        if self._rule_lots.random() < 0.1:
            self._loosen()

    def _later_step(self) -> None:
        """Something more, dealt by lots of its own: at random steps, and once at least."""
        steps = {POLICIES: self._change_policies, LEARN: self._learn}
        if not self._dealt_later:
            kinds = [name for name in sorted(steps) if name in (self._story.kinds or steps)]
            self._dealt_later = self._later_lots.sample(kinds, len(kinds))
        if self._dealt_later:
            self._changed_later = True
            name = self._dealt_later.pop()
            self._say(f"  {name}")
            steps[name]()

    def _settle_in_between(self) -> None:
        self._settle("in the middle of the schedule")

    def _stop_between_layers(self, windows: list[str]) -> None:
        self._platform.run(windows, layers=self._rng.randint(1, 3))
        self.tally.did("runs stopped between layers")

    def _replay(self, several: list[list[str]]) -> None:
        if len(several) == 1:
            self._platform.run(several[0], replay=True)
        else:
            self._platform.run_together([(windows, True) for windows in several])
            self.tally.did("overlapping replays")

    def _two_writers(self, windows: list[str]) -> None:
        self._platform.run_together([(windows, False), (windows, self._rng.random() < 0.5)])
        self.tally.did("two writers")

    def _make_histories(self) -> None:
        self.tally.did("history rebuilds", self._platform.make_histories())

    def _change_contracts(self) -> None:
        self._require("while tables wait for a person", self._have_not_waited())
        before = sources_of(self._terms)
        others = [each for each in range(len(self._versions)) if each != self._version]
        self._version = self._rng.choice(others)
        for old, new in zip(before, sources_of(self._terms), strict=True):
            self.tally.did("columns new to a contract", len(set(new.columns) - set(old.columns)))
            self.tally.did("columns gone from a contract", len(set(old.columns) - set(new.columns)))
            both = set(old.columns) & set(new.columns)
            types = types_of(old), types_of(new)
            self.tally.did(
                "columns of another type", sum(len({each.get(n) for each in types}) > 1 for n in both)
            )
        self.tally.did("contract changes")
        self._take_contracts(self._lots)

    def _change_policies(self) -> None:
        """Say something else of personal data, in all contracts."""
        self._require("while tables wait for a person", self._have_not_waited())
        before = PROTECTIONS[self._protecting]
        # A table keeps its subject once a key of it is destroyed: other contracts are refused.
        bound = {each for each in before.subjects if self._subjects}
        others = [
            each
            for each, protecting in enumerate(PROTECTIONS)
            if each != self._protecting and bound <= protecting.subjects.keys()
        ]
        if not others:
            return
        self._protecting = self._later_lots.choice(others)
        self.tally.did("policy changes")
        self.tally.did("other keys of hashes", PROTECTIONS[self._protecting].key != before.key)
        self._take_contracts(self._later_lots)

    def _learn(self) -> None:
        """Let a contract learn a column that some histories have from some event on."""
        self._require("while tables wait for a person", self._have_not_waited())
        left = [(t, name) for t, names in LEARNABLE.items() for name in names if name not in self._learned[t]]
        if left:
            table, column = self._later_lots.choice(left)
            self._learned[table] = self._learned[table] | {column: LEARNABLE[table][column]}
            self._platform.learn(table, column)
            self.tally.did("columns that contracts learned")
        self._take_contracts(self._later_lots)

    def _loosen(self) -> None:
        """Have a rule of a contract be looser: what waited for it comes in by itself, in its order."""
        if LOOSEN not in (self._story.kinds or (LOOSEN,)):
            return
        # What waits has been judged by the rule as it was, so nothing else makes its window stale.
        self._ask_for_types()
        self._platform.catch_up()
        expected = self._expected()
        self._require("before a rule gets looser", differences_of_events(self.workspace, expected), expected)
        self._held |= in_histories(expected)
        held = expected.of(QUARANTINED)
        waiting = {number: each for number, each in held.items() if each.reason in _WAITS_FOR_RULES}
        places = {(each.delivery.event.table, name) for each in waiting.values() for name in each.rules}
        found = [
            (table, rule)
            for table, terms in self._terms.items()
            for rule in terms.rules
            if rule.withholds and (table, rule.name) in places
        ]
        if not found:
            return
        self._say(f"  {LOOSEN}")
        table, rule = self._rule_lots.choice(found)
        terms = self._versions[self._version][table]
        rules = tuple(each.loosened(self._rule_lots) if each is rule else each for each in terms.rules)
        self._versions[self._version][table] = replace(terms, rules=rules)
        self._loosened = True
        self.tally.did("rules loosened")
        self._take_contracts(self._rule_lots)
        # Only what the looser rule lets in: other contracts and releases let in more.
        self._waited_for_rules |= waiting.keys() & self._expected().of(ACCEPTED).keys()

    def _take_contracts(self, lots: Random) -> None:
        """Have the contracts be in force; a person asks at once for types that wait, or not."""
        self._platform.change_law(self._terms, self._actions)
        # By other contracts the same row names other keys, so the same command is another one.
        self._asked = []
        for contract in self._platform.waiting():
            self.tally.did("tables that wait for a person")
            self._held_back[contract.name] = self._platform.content_of(contract)
        if lots.random() < 0.5:
            self._ask_for_types()

    def _ask_for_types(self) -> None:
        """A person asks for the types that tables wait for, which nothing has touched till then."""
        self._require("while tables wait for a person", self._have_not_waited())
        self._platform.ask_for_types()

    def _have_not_waited(self) -> Iterator[Difference]:
        """What was done to tables that wait, since their contract changed; they are forgotten then."""
        for contract in self._platform.waiting():
            yield from _contents_differ(self._platform.content_of(contract), self._held_back[contract.name])
        self._held_back = {}

    def _erase(self) -> None:
        """Have some rows erased that have ended, and ask for some that have not."""
        self._ask_for_types()
        self._platform.catch_up()
        asked, wrong = erase_some(self._lots, self._platform, self._expected())
        self._require("as rows were erased", iter(wrong))
        for each in asked:
            self.tally.did("rows erased" if each.spans else "erasures refused")
            self.tally.did("former keys erased", max(len(each.spans) - 1, 0))
            for key, span in each.spans:
                self._erasures[each.table, key].add(span)

    def _erase_subjects(self) -> None:
        """Have a subject of each table erased whose contract says encrypted."""
        if ERASE_SUBJECTS not in (self._story.kinds or (ERASE_SUBJECTS,)):
            return
        if all(each.subject is None for each in self._terms.values()):
            return
        self._ask_for_types()
        self._platform.catch_up()
        asked, wrong = erase_subjects(self._subject_lots, self._platform, self._left())
        self._require("as subjects were erased", iter(wrong))
        if asked:
            self._say(f"  {ERASE_SUBJECTS}")
            self._asked += asked
            self._subjects |= {subject for each in asked for subject in each.subjects}
            self.tally.did("subjects erased", len(asked))
            self.tally.did("images of erased subjects", sum(each.images for each in asked))

    def _complete_erasures(self, expected: Expected) -> None:
        """Give the same commands again, at rest: former versions are swept, and the values are nowhere."""
        # What is held back by a gap waits to be judged, so nothing is swept.
        if not self._asked or self._landed.has_gap:
            return
        left, completed = self._left(), set[Subject]()
        for each in self._asked:
            done, wrong = complete(self._platform, each, left)
            self._require("as erasures were completed", iter(wrong), expected)
            self.tally.did("erasures of subjects completed", done)
            completed |= each.subjects if done else set()
        # Of others, former versions have not been swept.
        lost = Left(self._landed, completed, self._terms).lost_values
        self._require("as erasures were completed", in_the_home(self.workspace, lost), expected)
        self.tally.did("values of erased subjects", sum(len(each.sought) for each in lost.values()))
        self._asked = []

    def _change_decisions(self) -> None:
        scenario = self._rng.choice(sorted(CHOICES))
        others = sorted(set(CHOICES[scenario]) - {self._actions[scenario]})
        self._actions[scenario] = self._rng.choice(others)
        self._platform.change_law(self._terms, self._actions)
        self.tally.did("decision table changes")

    def _judging_rules(self) -> JudgingRules:
        terms, decisions = self._terms, self._platform.decisions
        return JudgingRules(
            actions={name: each.action for name, each in decisions.decisions.items()},
            to_review=frozenset(n for n, each in decisions.decisions.items() if each.needs_manual_review),
            lateness={table: each.lateness for table, each in terms.items()},
            longest={},
            rules={table: each.rules for table, each in terms.items()},
            key_columns={shape.name: KEY for shape in SHAPES},
            no_values={each.name: dict.fromkeys(types_of(each), (NO_VALUE,)) for each in sources_of(terms)},
            window_length=WINDOW.length,
            reviews=dict(self._reviews),
            erasures=dict(self._erasures),
        )

    def _expected(self) -> Expected:
        return self._expected_of(self._left(), self._platform)

    def _left(self) -> Left:
        return Left(self._landed, self._subjects, self._terms)

    def _expected_of(self, left: Left, platform: Platform) -> Expected:
        """What the layers of ``platform`` must hold of what is ``left`` of its landing."""
        shapes = shapes_of(self._terms, platform.tokens)
        rules, since = self._judging_rules(), self._shown_since(left.landed.watermark)
        return Expected(left, rules, shapes, since, hidden_by(self._terms, shapes))

    def _shown_since(self, watermark: datetime | None) -> dict[str, datetime | None]:
        return {table: each.shown_since(watermark) for table, each in self._terms.items()}

    def _settle(self, when: str) -> Expected:
        """Let everything be run that is pending, and compare."""
        platform = self._platform
        if platform.waiting():
            # First without the tables that wait: these stay as they were, and ask for nothing.
            platform.catch_up()
            self._make_histories()
            self._ask_for_types()
        platform.catch_up()
        self._make_histories()
        self._require(when, _made_again(platform))
        expected = self._expected()
        self._require(when, differences(platform.workspace, expected), expected)
        self.tally.comparisons += 1
        self.tally.did(
            "deliveries held back by a gap", len(self._landed.deliveries) - len(self._landed.taken)
        )
        # The most of each that any comparison had: what waits for a review is decided sooner or later.
        self._held |= in_histories(expected)
        back = self._waited_for_rules & expected.of(ACCEPTED).keys()
        self._waited_for_rules -= back
        self.tally.did("events back by a looser rule", len(back))
        self._purged = {}
        for shape in expected.shapes:
            purged = expected.purged(shape)
            self._purged |= {(shape.name, key): position for key, position in purged.items()}
            self.tally.did("versions compared", len(expected.versions(shape)))
            of_group = Counter((window, event.key) for window, event in expected.events(shape.name))
            most = self._story.cut.rows_of_a_batch
            self.tally.did("rows of several Arrow batches", sum(each > most for each in of_group.values()))
            self.tally.did("values of a default", expected.of_defaults(shape))
        hidden = sum(len(each.sought) for each in expected.under_policies.values())
        self.tally.did("values under a policy", hidden)
        self.tally.did("rows purged", len(self._purged))
        self._complete_erasures(expected)
        return expected

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
                self.tally.did(f"{decision}s", len(chosen))

    def _chosen(self, decision: str) -> dict[EventKey, EventRef]:
        numbered = {each.number: each for each in self._landed.deliveries}
        taken = {key[:2] for key, decided in self._reviews.items() if decided == "release"}
        chosen: dict[EventKey, EventRef] = {}
        for row in sorted(quarantined(self._platform.workspace), key=lambda row: row["lsn"]):
            delivery = numbered[row["lsn"]]
            if row["reason"] == "duplicate_position" or self._rng.random() > 0.25:
                continue
            if decision == "release" and not _can_be_released(row, delivery):
                continue
            if decision == "release" and delivery.key[:2] in taken:
                continue
            taken.add(delivery.key[:2])
            place = (row["epoch"], row["commit_lsn"], row["ordinal"], row["event_hash"])
            chosen[delivery.key] = EventRef.of(*place)
        return chosen

    def _rebuild(self) -> Expected:
        """The lake deleted and made again in one pass: the same content in every window of every layer."""
        before = self._platform.content()
        self._platform.forget_the_lake()
        self.tally.did("rebuilds from landing")
        self._say("  rebuild")
        expected = self._settle("after a rebuild")
        self._require("after a rebuild", _contents_differ(self._platform.content(), before))
        if self._platform.has_folders:
            self._require("after a rebuild", _exposed_in_files(self.workspace, expected))
        self._require("after a rebuild", in_the_home(self.workspace, expected.of_erased_subjects))
        return expected

    def _tell_otherwise(self) -> None:
        """The same copies in other batches, in any order: the same content in every window and layer, unless
        that depends on the batches; then what these come to.

        But for dimensions that purge, where the clocks of the two leave them at other watermarks.
        """
        self._say("  the same told otherwise")
        folder, landed = self._folder.with_name("otherwise"), Landed()
        other = Platform(folder, self._spark, self._versions[0], self._story.actions)
        for table, columns in self._learned.items():
            for column in columns:
                other.learn(table, column)
        other.change_law(self._terms, self._actions)
        other.like(self._platform)
        for batch in _cut_otherwise(self._rng, self._landed.batches):
            landed.take(batch, other.land(batch).batch_id, self._terms)
            if self._rng.random() < 0.3:
                other.run(other.windows, replay=self._rng.random() < 0.5)
        other.catch_up()
        other.make_histories()
        self.tally.did("told otherwise")
        here, there = (self._shown_since(each.watermark) for each in (self._landed, landed))
        apart = {f"{SOURCE}/dim_{table}" for table in here if here[table] != there[table]}
        when = "the same copies in other batches"
        rejects = any(each.policy == REJECT_BATCH for terms in self._terms.values() for each in terms.rules)
        if self._landed.encrypted or landed.encrypted or rejects:
            # Of what landed encrypted each home has other bytes, and other batches are rejected.
            self._require(
                when, differences(other.workspace, self._expected_of(Left(landed, (), self._terms), other))
            )
        else:
            ours, theirs = (_without(each.content(), apart) for each in (self._platform, other))
            self._require(when, _contents_differ(theirs, ours))
            self.tally.did("delivered otherwise with equal hashes")
        self.tally.comparisons += 1


def _made_again(platform: Platform) -> Iterator[Difference]:
    """Work that was done for nothing: what has all its inputs is left alone."""
    if platform.make_histories():
        yield Difference("history", "made twice of the same events", "written", "left alone")
    for each in platform.watch.vain:
        yield Difference("windows", each, "made again", "left alone, for nothing above it had changed")


def _exposed_in_files(workspace: Workspace, expected: Expected) -> Iterator[Difference]:
    """Values that a policy hides, in any file of a lake that was made by today's policies alone."""
    for name, found in exposed_files(workspace, expected.under_policies):
        yield Difference(name, "values that a policy hides", found, [])


def _without(content: Mapping[tuple[str, str], str], tables: set[str]) -> dict[tuple[str, str], str]:
    return {place: held for place, held in content.items() if place[0] not in tables}


def _can_be_released(row: Mapping[str, Any], delivery: Delivery) -> bool:
    # Of a rejected batch these are the rules of another row.
    own = row["reason"] != "batch_rejected" and row["rules"]
    return row["reason"] in _RELEASABLE and not own and not delivery.malformed


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
