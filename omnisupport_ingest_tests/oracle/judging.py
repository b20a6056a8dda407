"""How landed events must be judged, by the simplest means: one event after the other, in landing order.

Written from the specification's sections 2, 3 and 6. What the watermark was when a batch landed is
worked out here anew, from the batches alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position

OUT_OF_RANGE = "out-of-range"
ACCEPTED, DUPLICATE, QUARANTINED = "accepted", "duplicate", "quarantined"

_IN_ORDER = (
    "out_of_range",
    "collision",
    "older_epoch",
    "malformed_image",
    "schema_mismatch",
    "row_rule",
    "batch_rejected",
    "out_of_order_event",
    "too_late_arrival",
    "late_arrival",
    "discarded_event",
)
"""The reasons, in the order in which they count: an event has one."""

FOUND_BY = {
    "out_of_range": "window",
    "collision": "dedupe_key",
    "duplicate_position": "dedupe_key",
    "older_epoch": "epoch",
    "malformed_image": "envelope",
    "schema_mismatch": "contract",
    "row_rule": "contract",
    "batch_rejected": "contract",
    "out_of_order_event": "sequence_or_ts",
    "too_late_arrival": "max_lateness",
    "late_arrival": "watermark_gap",
    "discarded_event": "review_ledger",
}
"""What finds each of them."""

ACCEPT, WARN, QUARANTINE, REJECT_BATCH = "accept", "warn", "quarantine", "reject_batch"
"""What a contract may say of the rows that break a rule."""

REJECTING = "rejects"
"""The rule of the row for which a batch is rejected, where nobody says which."""

_STRICTEST_FIRST = ("discard", "discard copies", "release")
"""What may be decided of an event."""

_PASSING = {"accept", "ingest", "replay_window", "dedupe"}

EventKey = tuple[Position, str | None, tuple[object, ...]]
"""Position, identity and content: one event, however often it lands."""


@dataclass(frozen=True)
class RowRule:
    """A rule of a table's rows.

    ``breaks``: whether the texts of ``columns`` break it, all of which were sent; NULL is ``None``.
    ``policy``: what becomes of a row that does. With ``accept`` nobody asks.
    """

    name: str
    policy: str
    columns: tuple[str, ...]
    breaks: Callable[..., bool]

    def broken_by(self, image: Image) -> bool:
        if self.policy == ACCEPT or not all(name in image for name in self.columns):
            return False
        return self.breaks(*(image[name] for name in self.columns))


@dataclass(frozen=True)
class Arrival:
    """What was so when a batch landed. ``newest_epoch_before``: highest of which an event had landed."""

    landed_at: datetime
    watermark_before: datetime | None
    newest_epoch_before: int
    from_file: bool


@dataclass(frozen=True)
class Delivery:
    """One copy of an event as it landed; ``number`` counts copies in landing order.

    ``unreadable``: the text that came instead of a row image. ``misplaced``: its file contradicts its
    time where nothing else orders the source.

    Where the subject of a copy at its position was erased: ``event`` is what is left of it, ``judged`` what
    rules see of it, ``landed`` what it was, ``was_unreadable`` whether nothing is left of a text that was no
    image, ``same`` what two copies of one event share, and ``order`` which of those that are judged alike
    stands for them. ``of_erased``: its images that landed plain and are of an erased subject, each with the
    columns that stay readable.

    ``batch``: when the batch landed that brought it, its name, and the line. Of copies with the same facts
    the first by that says which batch an event came in.
    """

    number: int
    event: Event
    window: str
    arrival: Arrival
    unreadable: str | None = None
    misplaced: bool = False
    judged: Event | None = None
    landed: Delivery | None = None
    was_unreadable: bool = False
    same: tuple[object, ...] | None = None
    order: tuple[Any, ...] = ()
    of_erased: tuple[tuple[str, frozenset[str]], ...] = ()
    batch: tuple[datetime, str, int] | None = None

    @property
    def alike(self) -> EventKey:
        """What the copies of one event share, as far as it is known by now."""
        return self.key if self.same is None else (self.event.at, self.event.identity, self.same)

    @property
    def key(self) -> EventKey:
        if self.landed is not None:
            return self.landed.key
        return self.event.at, self.event.identity, (*self.event.content, self.unreadable)

    @property
    def malformed(self) -> bool:
        event = self.event
        keys = (event.key, *([event.moved_from] if event.moved_from is not None else []))
        keyless = event.op in "crud" and any(key is None or None in key for key in keys)
        return keyless or self.without_image

    @property
    def without_image(self) -> bool:
        return self.unreadable is not None or (self.event.op in "cur" and self.event.after is None)


@dataclass(frozen=True)
class JudgingRules:
    """What events are judged by.

    ``actions`` and ``to_review``: of the decision table. ``lateness``: by table, how long a window stays
    open after its end, and how far behind an event may land. ``longest``: by table and column, the most
    characters that a value may have. ``no_values``: by table and column, texts that are no value of its type.
    ``key_columns``: by table. ``reviews``: what was decided last of an event; ``discard copies``
    says nothing of the copy that landed first. ``erasures``: by table
    and key, between which positions (above the first one, up to the second) a row was erased. ``rules``: by
    table, those of its rows beside ``longest`` and types, which have rows wait. ``rejected``: the numbers of
    deliveries whose batch is rejected, with the rules for which it is; ``rules`` may reject more.
    ``uncontracted``: the tables without a contract. ``columns``: by table that waits for its contract, the
    columns that a row may have, and those that it must have.
    """

    actions: Mapping[str, str]
    to_review: frozenset[str]
    lateness: Mapping[str, tuple[timedelta, timedelta]]
    longest: Mapping[str, Mapping[str, int]]
    window_length: timedelta
    reviews: Mapping[EventKey, str] = field(default_factory=dict)
    key_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_values: Mapping[str, Mapping[str, Collection[str]]] = field(default_factory=dict)
    erasures: Mapping[tuple[str, Key], Collection[tuple[Position | None, Position]]] = field(
        default_factory=dict
    )
    rules: Mapping[str, Sequence[RowRule]] = field(default_factory=dict)
    rejected: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    uncontracted: Collection[str] = frozenset()
    columns: Mapping[str, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)

    def passes(self, scenario: str) -> bool:
        return self.actions[scenario] in _PASSING


@dataclass(frozen=True)
class Verdict:
    """What became of one copy. ``rules``: row rules that it breaks, whatever the reason. ``erased``: its
    row was erased, so what is kept of it has no values. ``batch``: the one in which the event came.
    ``of_copy``: another copy stands for the event."""

    delivery: Delivery
    verdict: str
    reason: str | None
    state: str | None
    rules: tuple[str, ...]
    late: bool
    erased: bool = False
    batch: str | None = None
    of_copy: bool = False

    @property
    def kept(self) -> Event:
        """The event as it is kept: of one that was erased, only that it was there."""
        return self.left_of(self.delivery.event)

    def left_of(self, event: Event) -> Event:
        """What is kept of ``event``: the delivered one, or what policies for personal data leave of it."""
        for name, readable in self.delivery.of_erased:
            image: Image | None = getattr(event, name)
            if image is not None:
                image = {column: text if column in readable else None for column, text in image.items()}
                event = replace(event, before=image) if name == "before" else replace(event, after=image)
        if not self.erased:
            return event
        gone = frozenset(event.after or ()) if self.delivery.unreadable is None else frozenset[str]()
        left: Image | None = None if event.after is None or self.delivery.unreadable is not None else {}
        return replace(event, before=None, after=left, unchanged=event.unchanged | gone)

    @property
    def told(self) -> Event:
        """The event as the fold takes it: one in quarantine is withheld."""
        return replace(self.kept, quarantined=self.verdict == QUARANTINED)


class Clockwork:
    """The watermark of a source and the newest epoch begun, batch by batch, in landing order."""

    def __init__(self) -> None:
        self._marks: dict[int, datetime | None] = {}
        self._begun = 0

    def arrive(
        self,
        epoch: int,
        times: Iterable[datetime],
        landed_at: datetime,
        *,
        moves: bool,
        from_file: bool,
        begins: bool,
    ) -> Arrival:
        """The facts of a batch with events of these ``times``, and the step it is.

        ``moves``: a snapshot's batch does not move the watermark. ``begins``: it has events, so that its
        epoch has begun.
        """
        earlier = [each for each in self._marks if each <= epoch]
        before = self._marks[max(earlier)] if earlier else None
        arrival = Arrival(landed_at, before, self._begun, from_file)
        reached = [min(each, landed_at) for each in times]
        held = self._marks.get(epoch)
        if moves:
            self._marks[epoch] = max([*reached, *([held] if held else [])], default=None)
        if begins:
            self._begun = max(self._begun, epoch)
        return arrival


def judge(deliveries: Iterable[Delivery], judging_rules: JudgingRules) -> list[Verdict]:
    """Judge what has landed, in landing order.

    Duplicates are judged first: the copy that landed first decides, and the others are copies of it. A row
    that waits as it breaks a rule that says so has all others of its table wait that its batch brought into
    its window; so all are judged once more when these are known.
    """
    deliveries = list(deliveries)
    verdicts = _judged(deliveries, judging_rules)
    rejected = dict(_rejected(verdicts, judging_rules))
    if not rejected:
        return verdicts
    return _judged(deliveries, replace(judging_rules, rejected={**judging_rules.rejected, **rejected}))


def _rejected(
    verdicts: Iterable[Verdict], judging_rules: JudgingRules
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The numbers of the deliveries whose batch is rejected, each with the rules for which it is."""
    rejecting = {
        table: {each.name for each in rules if each.policy == REJECT_BATCH}
        for table, rules in judging_rules.rules.items()
    }
    if not any(rejecting.values()):
        return
    batches: dict[object, list[Verdict]] = defaultdict(list)
    for each in verdicts:
        if not each.of_copy and each.delivery.batch is not None:
            batches[each.delivery.event.table, each.delivery.window, each.batch].append(each)
    for (table, _, _), here in batches.items():  # type: ignore[misc]
        waiting = (each for each in here if each.reason in ("row_rule", "schema_mismatch"))
        names = {name for each in waiting for name in each.rules} & rejecting.get(table, set())
        for each in here if names else ():
            yield each.delivery.number, tuple(sorted(names))


def _judged(deliveries: Iterable[Delivery], judging_rules: JudgingRules) -> list[Verdict]:
    contents: dict[tuple[str, Position, str | None], dict[EventKey, list[Delivery]]] = defaultdict(dict)
    for each in sorted(deliveries, key=lambda each: each.number):
        place = each.window, each.event.at, each.event.identity
        contents[place].setdefault(each.alike, []).append(each)
    verdicts = []
    for events in contents.values():
        for members in events.values():
            first = _standing(members)
            decided = _decided(members, judging_rules)
            verdict = _verdict(first, judging_rules, decided[first.number], collision=len(events) > 1)
            verdicts.append(replace(verdict, batch=_batch(members, first)))
            copies = [each for each in members if each is not first]
            verdicts += [_copy(each, first, judging_rules, decided[each.number]) for each in copies]
    return [replace(each, erased=_was_erased(each.delivery.event, judging_rules)) for each in verdicts]


def _decided(copies: list[Delivery], judging_rules: JudgingRules) -> dict[int, str | None]:
    """What is decided of each of the ``copies`` of one event, by its number.

    What was decided of another copy counts for those that nobody decided: that of an erased subject was
    another event when it was reviewed. A discard counts before a release.
    """
    of_copy = {each.number: judging_rules.reviews.get(each.key) for each in copies}
    of_event = next((each for each in _STRICTEST_FIRST if each in of_copy.values()), None)
    return {number: own or of_event for number, own in of_copy.items()}


def _standing(copies: list[Delivery]) -> Delivery:
    """The copy that landed first, or of those that are judged as it is, the first one in ``order``."""
    return min(_alike(copies), key=lambda each: each.order)


def _alike(copies: list[Delivery]) -> list[Delivery]:
    """The copies that have the facts of the one that landed first."""
    facts = copies[0].arrival.newest_epoch_before, copies[0].arrival.watermark_before
    return [e for e in copies if (e.arrival.newest_epoch_before, e.arrival.watermark_before) == facts]


def _batch(copies: list[Delivery], first: Delivery) -> str | None:
    """The batch in which an event came that several copies have."""
    places = [each.batch for each in _alike(copies) if each.batch is not None]
    return min(places)[1] if first.batch is not None and places else None


def ledger(verdicts: Iterable[Verdict]) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Per window, how many events there are of each verdict and of each scenario."""
    found: dict[str, tuple[Counter[str], Counter[str]]] = defaultdict(lambda: (Counter(), Counter()))
    for each in verdicts:
        of_verdict, of_scenario = found[each.delivery.window]
        of_verdict[each.verdict] += 1
        if each.verdict == DUPLICATE:
            of_scenario["duplicate_position"] += 1
            continue
        if each.late:
            of_scenario["late_arrival"] += 1
        if each.verdict == QUARANTINED and each.reason not in (None, "late_arrival"):
            of_scenario[str(each.reason)] += 1
    return dict(found)


def _verdict(
    delivery: Delivery, judging_rules: JudgingRules, decided: str | None, *, collision: bool
) -> Verdict:
    late, too_late = _lateness(delivery, judging_rules)
    mismatches = _mismatches(delivery, judging_rules)
    broken, withholds = _broken(delivery, judging_rules)
    rules = mismatches + broken
    doubts = {
        "collision": collision,
        "older_epoch": _of_older_epoch(delivery) and not judging_rules.passes("older_epoch"),
        "out_of_order_event": delivery.misplaced and not judging_rules.passes("out_of_order_event"),
        "too_late_arrival": too_late and not judging_rules.passes("too_late_arrival"),
        "late_arrival": late and not too_late and not judging_rules.passes("late_arrival"),
        "batch_rejected": delivery.number in judging_rules.rejected,
    }
    faults = {
        "out_of_range": delivery.window == OUT_OF_RANGE,
        # Which row an event is about is asked by a contract.
        "malformed_image": (
            delivery.without_image
            if delivery.event.table in judging_rules.uncontracted
            else delivery.malformed
        ),
        "schema_mismatch": bool(mismatches),
        "row_rule": withholds,
        "discarded_event": decided == "discard",
    }
    # A release settles doubts about when and where an event came, never what is wrong with it.
    holds = faults if decided == "release" else doubts | faults
    reason = next((each for each in _IN_ORDER if holds.get(each)), None)
    if reason is None:
        return Verdict(delivery, ACCEPTED, None, None, rules, late)
    if reason == "batch_rejected":
        rules = tuple(dict.fromkeys((*rules, *judging_rules.rejected[delivery.number])))
    return Verdict(delivery, QUARANTINED, reason, _state(reason, decided, judging_rules), rules, late)


def _copy(delivery: Delivery, first: Delivery, judging_rules: JudgingRules, decided: str | None) -> Verdict:
    late, _ = _lateness(delivery, judging_rules)
    reason = "duplicate_position"
    rules = _mismatches(first, judging_rules) + _broken(first, judging_rules)[0]
    if judging_rules.passes(reason):
        return Verdict(delivery, DUPLICATE, reason, None, rules, late, of_copy=True)
    state = _state(reason, decided, judging_rules)
    return Verdict(delivery, QUARANTINED, reason, state, rules, late, of_copy=True)


def _state(reason: str, decided: str | None, judging_rules: JudgingRules) -> str:
    if decided == "discard" or (decided == "discard copies" and reason == "duplicate_position"):
        return "discarded"
    return "open" if reason in judging_rules.to_review else "not_needed"


def _was_erased(event: Event, judging_rules: JudgingRules) -> bool:
    if event.key is None:
        return False
    for above, last in judging_rules.erasures.get((event.table, event.key), ()):
        if event.at <= last and not (above is not None and event.at <= above):
            return True
    return False


def _of_older_epoch(delivery: Delivery) -> bool:
    return delivery.arrival.newest_epoch_before > delivery.event.at.epoch


def _lateness(delivery: Delivery, judging_rules: JudgingRules) -> tuple[bool, bool]:
    """Whether it landed in a closed window, and whether it lay further behind than may be taken in."""
    mark, event = delivery.arrival.watermark_before, delivery.event
    if mark is None or delivery.window == OUT_OF_RANGE:
        return False, False
    allowed, longest = judging_rules.lateness.get(event.table, (timedelta(hours=1), timedelta(days=7)))
    start = datetime.strptime(delivery.window, "%Y-%m-%dT%H%M").replace(tzinfo=mark.tzinfo)
    late = mark >= start + judging_rules.window_length + allowed
    spared = not delivery.arrival.from_file or event.op in "rb"
    return late, late and not spared and mark - event.source_ts > longest


def _mismatches(delivery: Delivery, judging_rules: JudgingRules) -> tuple[str, ...]:
    """How the columns of its row are not those of its contract; one that was not sent counts as there."""
    event = delivery.judged or delivery.event
    if event.table not in judging_rules.columns or event.op not in "cur":
        return ()
    if event.after is None or delivery.unreadable is not None:
        return ()
    may, must = judging_rules.columns[event.table]
    key = judging_rules.key_columns.get(event.table, ()) if event.key is not None else ()
    there = {*key, *event.after, *event.unchanged}
    unknown = [f"{name}:unknown_column" for name in there if name not in may]
    missing = [f"{name}:missing_column" for name in must if name not in there]
    return tuple(sorted(unknown + missing))


def _broken(delivery: Delivery, judging_rules: JudgingRules) -> tuple[tuple[str, ...], bool]:
    """The rules that the row of a delivery breaks, and whether one of them has it wait."""
    event = delivery.judged or delivery.event
    if event.op not in "cur" or delivery.unreadable is not None:
        return (), False
    image = {**event.carried_before, **(event.after or {})}
    limits = judging_rules.longest.get(event.table, {})
    names = judging_rules.key_columns.get(event.table, ()) if event.after is not None else ()
    nulls = [f"{n}:not_null" for n, part in zip(names, event.key or (), strict=False) if part is None]
    typed = judging_rules.no_values.get(event.table, {})
    wrong = [f"{column}:type" for column, texts in typed.items() if image.get(column) in texts]
    long = [
        f"{column}:max_length"
        for column, limit in sorted(limits.items())
        if len(image.get(column) or "") > limit
    ]
    others = [each for each in judging_rules.rules.get(event.table, ()) if each.broken_by(image)]
    withholds = bool(nulls or wrong or long) or any(each.policy != WARN for each in others)
    return (*nulls, *wrong, *long, *(each.name for each in others)), withholds
