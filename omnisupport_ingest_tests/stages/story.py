"""A source that tests tell: transactions on a small table, landed as real stream batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest, StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest.windows import WindowSize

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SOURCE = "desk"
FIRST, SECOND, THIRD = "2026-01-01T1200", "2026-01-01T1201", "2026-01-01T1202"

CONTRACT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Notes",
    "description": "A table of two columns and a long text.",
    "type": "object",
    "required": ["id"],
    "additionalProperties": True,
    "properties": {
        "id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."},
        "title": {"type": ["string", "null"], "x-pg-type": "text", "maxLength": 20, "description": "Title."},
        "body": {"type": ["string", "null"], "x-pg-type": "text", "description": "Long text."},
    },
    "x-cdc": {
        "version": "1.0.0",
        "source": SOURCE,
        "schema": "public",
        "table": "notes",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": None},
        "lateness": {"allowed": "PT1H", "max": "P7D"},
        "pii": {},
    },
}


@dataclass
class Change:
    """One event of a transaction; ``unchanged`` columns are left out of ``after``."""

    op: str
    id: int | None = None
    values: dict[str, str | None] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    moved_from: int | None = None


@dataclass
class Commit:
    """A transaction: its commit LSN, its commit time in seconds after ``START``, its changes."""

    lsn: int
    second: float
    changes: Sequence[Change]


def key(id: int | None) -> str | None:
    return None if id is None else json.dumps([str(id)])


def events(commit: Commit, epoch: int = 1) -> list[LandedEvent]:
    """The landed events of ``commit``, a moved ``c`` standing one ordinal above its ``d``."""
    found = []
    index = -1
    for change in commit.changes:
        index += 0 if change.moved_from is not None else 1
        ordinal = 2 * index + (1 if change.moved_from is not None else 0)
        after = None
        if change.op in "cur":
            after = json.dumps({"id": str(change.id), **change.values})
        found.append(
            LandedEvent(
                epoch=epoch,
                commit_lsn=commit.lsn,
                ordinal=ordinal,
                op=change.op,
                source_ts=START + timedelta(seconds=commit.second),
                tx_id=commit.lsn,
                lsn=commit.lsn,
                source_schema="public",
                source_table="notes",
                key=key(change.id),
                before=None,
                after=after,
                unchanged=list(change.unchanged) or None,
                moved_from_key=key(change.moved_from),
                chunk_id=None,
            )
        )
    return found


class Story:
    """A home, its workspace, and the stream that lands in it."""

    def __init__(self, folder: Path) -> None:
        self.contracts = folder / "contracts"
        self.contracts.mkdir(parents=True)
        self.write_contract(CONTRACT)
        settings = Settings(
            home=folder / "home", window="minutes:1", contracts_dir=self.contracts, _env_file=None
        )
        home = Home.open(settings.home, WindowSize(1), now=START)
        self.workspace = Workspace(settings, home, load_contracts(self.contracts))
        self.store = self.workspace.landing(SOURCE)
        self._end = Lsn(0)

    def write_contract(self, contract: object) -> None:
        (self.contracts / "notes.json").write_text(json.dumps(contract))

    @property
    def contract(self):  # type: ignore[no-untyped-def]
        return self.workspace.contracts.of_source(SOURCE)[0]

    def land(self, *commits: Commit) -> Manifest:
        """Land ``commits`` as one batch that continues the stream."""
        end = Lsn(commits[-1].lsn)
        return self._seal(
            [event for commit in commits for event in events(commit)],
            StreamSpan(
                previous_end_lsn=self._end,
                end_lsn=end,
                start_lsn=Lsn(commits[0].lsn),
                last_commit_lsn=end,
                last_xid=commits[-1].lsn,
                first_commit_ts=START + timedelta(seconds=commits[0].second),
                last_commit_ts=START + timedelta(seconds=commits[-1].second),
            ),
        )

    def land_again(self, *commits: Commit) -> Manifest:
        """Land a copy of ``commits`` in a batch of its own, as a second delivery would."""
        end = Lsn(self._end.value + 1)
        copies = [event for commit in commits for event in events(commit)]
        span = StreamSpan(self._end, end, end, end, 1, START, START)
        return self._seal(copies, span)

    def _seal(self, found: list[LandedEvent], span: StreamSpan) -> Manifest:
        name = stream_batch_id(1, span.previous_end_lsn)
        writer = BatchWriter(
            self.store, self.workspace.grid, 1, name, clock=lambda: START + timedelta(minutes=5)
        )
        for event in found:
            writer.add(event)
        self._end = span.end_lsn
        return writer.seal(stream=span)
