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

_BODY = "The export starts and the bar reaches ninety percent, then nothing happens for an hour. " * 8


@dataclass
class Tickets:
    """A stream of changes of one table: ``inserts`` new keys first where asked, then a mix.

    The mix is 40 % inserts, 50 % updates of a random key (every tenth leaves the long body
    unsent), 10 % deletes; images are about 600 bytes.
    """

    store: LandingStore
    grid: WindowGrid
    seed: int = 1
    keys: int = 0
    lsn: int = 0x1000
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 - data, not secrets

    def land(self, changes: int, at: datetime, *, inserts_only: bool = False) -> None:
        """Land ``changes`` committed at ``at`` as batches that continue the stream."""
        left = changes
        while left > 0:
            size = min(left, _BATCH)
            self._batch(size, at, inserts_only)
            left -= size

    def _batch(self, size: int, at: datetime, inserts_only: bool) -> None:
        before = self.lsn
        name = stream_batch_id(1, Lsn(before))
        with BatchWriter(self.store, self.grid, 1, name, clock=lambda: at) as writer:
            first = None
            for number in range(size):
                place = number % _CHANGES_PER_TRANSACTION
                if place == 0:
                    self.lsn += 0x10000
                    first = first or self.lsn
                    moment = at + timedelta(microseconds=number)
                writer.add(self._change(2 * place, moment, inserts_only))
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

    def _change(self, ordinal: int, moment: datetime, inserts_only: bool) -> LandedEvent:
        rng = self._rng
        kind = 0.0 if inserts_only or not self.keys else rng.random()
        if kind < 0.4:
            self.keys += 1
            op, number = "c", self.keys
        else:
            op, number = ("u" if kind < 0.9 else "d"), rng.randint(1, self.keys)
        after, unchanged = None, None
        if op != "d":
            image = {
                "id": str(number),
                "organization_id": str(number % 997 + 1),
                "customer_id": f"18c79895-0569-4d18-af04-{number:012d}",
                "agent_handle": f"agent-{number % 50:04d}",
                "subject": "Export never ends",
                "body": f"{number} {_BODY[: rng.randint(100, 600)]}",
                "status": rng.choice(("new", "open", "pending", "solved", "closed")),
                "priority": str(number % 4 + 1),
                "channel": None,
                "metadata": '{"browser": "firefox", "tries": [1, 2]}',
                "satisfaction": "0.25",
                "created_at": "2026-01-01 08:17:58.25+00",
                "updated_at": "2026-12-24 08:00:14.25+00",
            }
            if op == "u" and rng.random() < 0.1:
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
            source_table="tickets",
            key=f'["{number}"]',
            before=None if op != "d" else f'{{"id":"{number}"}}',
            after=after,
            unchanged=unchanged,
            moved_from_key=None,
            chunk_id=None,
        )


def now() -> datetime:
    """The start of the current hour, so that everything falls into one hourly window."""
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
