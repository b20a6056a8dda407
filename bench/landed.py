"""Landed batches for a benchmark of the lake: changes of the desk's tickets, made without a database."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import WindowGrid

_CHANGES_PER_TRANSACTION = 50
_BATCH = 100_000
"""Changes of a batch, about what capture cuts at 64 MiB."""

_REMEMBERED, _HELD = 10_000, 3_000
"""Changes that may be sent again, and that are held back until so many are."""

_BODY = "The export starts and the bar reaches ninety percent, then nothing happens for an hour. " * 8


@dataclass(frozen=True)
class Mix:
    """What the changes of a stream are like: shares of all changes, unless said otherwise.

    ``inserts`` and ``deletes``; the rest are updates, of which ``unsent`` leave the long body unsent.
    ``duplicates``: changes that are sent again. ``out_of_order``: that come some thousand changes later.
    ``refused``: whose rows break a rule. ``key_changes``: updates of the key. ``skew``: 0 chooses the key of
    an update evenly, more chooses old keys more often. ``body``: the least and the most characters of the
    body; ``entropy``: the share of them that no compression makes smaller.
    """

    inserts: float = 0.4
    deletes: float = 0.1
    unsent: float = 0.1
    duplicates: float = 0.0
    out_of_order: float = 0.0
    refused: float = 0.0
    key_changes: float = 0.0
    skew: float = 0.0
    body: tuple[int, int] = (100, 600)
    entropy: float = 0.0

    @property
    def rises(self) -> bool:
        """Whether the changes come once each, in the order of their positions."""
        return not self.duplicates and not self.out_of_order


MIXED = Mix(duplicates=0.2, out_of_order=0.1, refused=0.01, key_changes=0.01, unsent=0.3)
"""A stream of which much is not as it should be."""


@dataclass
class Tickets:
    """A stream of changes of one table: ``inserts`` new keys first where asked, then a mix.

    Images are about 600 bytes.
    """

    store: LandingStore
    grid: WindowGrid
    seed: int = 1
    mix: Mix = field(default_factory=Mix)
    table: str = "tickets"
    keys: int = 0
    lsn: int = 0x1000
    _rng: random.Random = field(init=False)
    _sent: list[LandedEvent] = field(init=False, default_factory=list)
    _held: list[LandedEvent] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 - data, not secrets

    def land(self, changes: int, at: datetime, *, inserts_only: bool = False) -> None:
        """Land ``changes`` committed at ``at`` as batches that continue the stream."""
        left = changes
        while left > 0:
            size = min(left, _BATCH)
            self._batch(size, at, inserts_only)
            left -= size

    def land_windows(self, count: int, first: datetime, events: int = 1) -> None:
        """Land a batch with ``events`` new rows in each of ``count`` windows in a row, from ``first`` on."""
        before, length = Lsn(self.lsn), self.grid.size.length
        landed_at, last = first + count * length, first + (count - 1) * length
        name = stream_batch_id(1, before)
        with BatchWriter(self.store, self.grid, 1, name, clock=lambda: landed_at) as writer:
            for number in range(count):
                for _ in range(events):
                    self.lsn += 0x100
                    self.keys += 1
                    writer.add(self._event(0, first + number * length, "c", self.keys))
            end = Lsn(self.lsn + 8)
            writer.seal(stream=StreamSpan(before, end, before, Lsn(self.lsn), 7, first, last))
        self.lsn = end.value

    def _batch(self, size: int, at: datetime, inserts_only: bool) -> None:
        before = self.lsn
        name = stream_batch_id(1, Lsn(before))
        with BatchWriter(self.store, self.grid, 1, name, clock=lambda: at) as writer:
            first = None
            written = number = 0
            while written < size:
                place = number % _CHANGES_PER_TRANSACTION
                if place == 0:
                    self.lsn += 0x10000
                    first = first or self.lsn
                    moment = at + timedelta(microseconds=number)
                number += 1
                changes = self._change(2 * place, moment, inserts_only)
                for event in self._delivered(changes, last=written + len(changes) >= size):
                    writer.add(event)
                    written += 1
            assert first is not None
            end = Lsn(self.lsn + 8)
            writer.seal(
                stream=StreamSpan(
                    previous_end_lsn=Lsn(before),
                    end_lsn=end,
                    start_lsn=Lsn(before),
                    last_commit_lsn=Lsn(self.lsn),
                    last_xid=self.lsn & 0x7FFFFFFF,
                    first_commit_ts=at,
                    last_commit_ts=moment,
                )
            )
        self.lsn = end.value

    def _delivered(self, changes: list[LandedEvent], *, last: bool) -> list[LandedEvent]:
        """``changes`` as they are sent: later, or twice, where the mix says so; all of them if ``last``."""
        mix, rng = self.mix, self._rng
        if mix.rises:
            return changes
        found = []
        for event in changes:
            if rng.random() < mix.out_of_order:
                self._held.append(event)
                continue
            found.append(event)
            if rng.random() < mix.duplicates / (1 - mix.duplicates):
                found.append(rng.choice(self._sent) if self._sent else event)
            if len(self._sent) < _REMEMBERED:
                self._sent.append(event)
            else:
                self._sent[rng.randrange(_REMEMBERED)] = event
        if last or len(self._held) > _HELD:
            rng.shuffle(self._held)
            found += self._held
            self._held = []
        return found

    def _change(self, ordinal: int, moment: datetime, inserts_only: bool) -> list[LandedEvent]:
        rng, mix = self._rng, self.mix
        kind = 0.0 if inserts_only or not self.keys else rng.random()
        moved_from = None
        if kind < mix.inserts:
            self.keys += 1
            op, number = "c", self.keys
        else:
            op = "d" if kind >= 1 - mix.deletes else "u"
            number = 1 + int(self.keys * rng.random() ** (1 + mix.skew))
            if op == "u" and rng.random() < mix.key_changes / max(1e-9, 1 - mix.inserts - mix.deletes):
                self.keys += 1
                op, moved_from, number = "c", number, self.keys
        event = self._event(ordinal + (moved_from is not None), moment, op, number)
        if moved_from is None:
            return [event]
        gone = self._event(ordinal, moment, "d", moved_from)
        return [gone, event._replace(moved_from_key=f'["{moved_from}"]')]

    def _event(self, ordinal: int, moment: datetime, op: str, number: int) -> LandedEvent:
        rng, mix = self._rng, self.mix
        after, unchanged = None, None
        if op != "d":
            image = {
                "id": str(number),
                "organization_id": str(number % 997 + 1),
                "customer_id": f"18c79895-0569-4d18-af04-{number:012d}",
                "agent_handle": f"agent-{number % 50:04d}",
                "subject": "Export never ends",
                "body": f"{number} {self._body()}",
                "status": rng.choice(("new", "open", "pending", "solved", "closed")),
                "priority": "9" if rng.random() < mix.refused else str(number % 4 + 1),
                "channel": None,
                "metadata": '{"browser": "firefox", "tries": [1, 2]}',
                "satisfaction": "0.25",
                "created_at": "2026-01-01 08:17:58.25+00",
                "updated_at": "2026-12-24 08:00:14.25+00",
            }
            if op == "u" and rng.random() < mix.unsent:
                del image["body"]
                unchanged = ["body"]
            after = json.dumps(image, separators=(",", ":"), ensure_ascii=False)
        return LandedEvent(
            epoch=1,
            commit_lsn=self.lsn,
            ordinal=ordinal,
            op=op,
            source_ts=moment,
            tx_id=self.lsn & 0x7FFFFFFF,
            lsn=self.lsn - 8,
            source_schema="support",
            source_table=self.table,
            key=f'["{number}"]',
            before=None if op != "d" else f'{{"id":"{number}"}}',
            after=after,
            unchanged=unchanged,
            moved_from_key=None,
            chunk_id=None,
        )

    def _body(self) -> str:
        length = self._rng.randint(*self.mix.body)
        random_part = int(length * self.mix.entropy)
        return (
            self._rng.randbytes((random_part + 1) // 2).hex()[:random_part]
            + ((_BODY * (1 + length // len(_BODY)))[: length - random_part])
        )


def now() -> datetime:
    """The start of the current hour, so that everything falls into one hourly window."""
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
