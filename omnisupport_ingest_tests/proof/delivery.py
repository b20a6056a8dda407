"""How the events of a home land: cut into batches, repeated, late, out of order, by a clock that jumps.

Each lane has a schedule of its own, from its own seed; what lands at one time lands in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random

from omnisupport_ingest_tests.proof.history import SPAN, START, Told

STREAM, CHUNK, FILE = "stream", "chunk", "file"


@dataclass(frozen=True)
class Batch:
    """Events of one epoch that land together at ``landed_at``, in the order in which they stand.

    ``order``: what orders the events of a file (see ``FileSpan``); null for batches of capture.
    """

    kind: str
    epoch: int
    landed_at: datetime
    told: tuple[Told, ...]
    order: str | None = None
    clock: datetime | None = None


@dataclass(frozen=True)
class Gap:
    """A batch of the stream that is lost as soon as it has landed, before anything was made of it.

    ``lost``: which one of the home's batches. ``back``: how many batches have landed when it is found again,
    null: it never is.
    """

    lost: int
    back: int | None


def gaps(rng: Random, batches: Sequence[Batch]) -> tuple[Gap, ...]:
    """A gap in the chain of some epoch, or none. It holds back what lands after it, and its epoch has begun
    before it."""
    found = []
    for number, batch in enumerate(batches):
        begun = any(each.epoch == batch.epoch and each.told for each in batches[:number])
        if batch.kind == STREAM and batch.told and begun:
            after = enumerate(batches[number + 1 :], start=number + 1)
            found += [(number, n) for n, each in after if (each.kind, each.epoch) == (STREAM, batch.epoch)][
                :1
            ]
    if not found or rng.random() < 0.3:
        return ()
    lost, behind = rng.choice(found)
    return (Gap(lost, None if rng.random() < 0.3 else rng.randint(behind + 1, len(batches))),)


@dataclass
class Slots:
    """What lands when: per slot the events, in the order in which they were put there.

    ``in_time``: how many slots the history takes to happen; in those after, only late ones land.
    """

    count: int
    in_time: int
    held: list[list[Told]] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [[] for _ in range(self.count)]

    def put(self, slot: float, told: Sequence[Told]) -> None:
        self.held[max(0, min(self.count - 1, int(slot)))] += told


def schedule(rng: Random, lanes: dict[int, list[Told]], slots: int, order: str | None) -> list[Batch]:
    """The batches of a home, in landing order; ``order`` is null for a source that capture follows."""
    times = _clock(rng, slots)
    found = Slots(slots, in_time(slots))
    for seed in sorted(lanes):
        _put_lane(Random(f"delivery {seed}"), lanes[seed], found)
    batches = []
    for told, landed_at in zip(found.held, times, strict=True):
        batches += _batches(rng, told, landed_at, order)
        if order is None and batches and rng.random() < 0.3:
            # What the server says when nothing happens: all up to its clock has been sent.
            clock = max((each.event.source_ts for each in told), default=START) + timedelta(minutes=1)
            at = landed_at + timedelta(seconds=30)
            batches.append(Batch(STREAM, batches[-1].epoch, at, (), clock=min(clock, at)))
    return batches


def in_time(slots: int) -> int:
    """In how many of ``slots`` anything lands that is not late."""
    return max(1, slots * 3 // 4)


def _put_lane(rng: Random, told: list[Told], slots: Slots) -> None:
    """Transactions in log order; some long after their time, some again."""
    transactions: dict[tuple[int, int], list[Told]] = {}
    for each in sorted(told, key=lambda each: each.event.at):
        transactions.setdefault(each.event.at[:2], []).append(each)
    late = rng.choice((0.0, 0.2, 0.4))
    again = rng.choice((0.0, 0.1, 0.4))
    for number, members in enumerate(transactions.values()):
        slot = number * slots.in_time / len(transactions)
        if rng.random() < late:
            slot += rng.randint(1, slots.count)
        # Events at one position land apart now and then: the second one then comes to a judged window.
        first, rest = members, []
        if rng.random() < 0.3:
            rest = [each for each in members if rng.random() < 0.3]
            first = [each for each in members if each not in rest]
        slots.put(slot, first)
        slots.put(slot + rng.randint(0, 2), rest)
        while rng.random() < again:
            slots.put(slot + rng.choice((0, 0, 1, rng.randint(1, slots.count))), members)


def _batches(rng: Random, told: list[Told], landed_at: datetime, order: str | None) -> list[Batch]:
    """A batch per epoch and kind; some of the newer epoch land before the older one."""
    found = []
    epochs = sorted({each.event.at.epoch for each in told})
    if rng.random() < 0.3:
        epochs.reverse()
    for number, epoch in enumerate(epochs):
        here = [each for each in told if each.event.at.epoch == epoch]
        at = landed_at + timedelta(seconds=number)
        if order is not None:
            if rng.random() < 0.7:
                rng.shuffle(here)
            found.append(Batch(FILE, epoch, at, tuple(here), order))
            continue
        here.sort(key=lambda each: each.event.at)
        for kind, ops in ((STREAM, "cudtm"), (CHUNK, "rb")):
            members = tuple(each for each in here if each.event.op in ops)
            if members:
                found.append(Batch(kind, epoch, at, members))
    return found


def _clock(rng: Random, slots: int) -> list[datetime]:
    """The landing clock at each slot: after everything, or beside it; now and then it is set back, or steps
    forward for a while."""
    beside = rng.random() < 0.4
    times = []
    for slot in range(slots):
        now = START + (SPAN * slot / in_time(slots) if beside else SPAN + timedelta(hours=1, minutes=slot))
        if rng.random() < 0.2:
            now -= timedelta(minutes=rng.randint(1, 100))
        elif rng.random() < 0.1:
            now += timedelta(minutes=rng.randint(1, 600))
        times.append(now)
    return times
