"""A story of three tables, and what layers hold of it, committed without the events themselves."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from omnisupport_ingest.cdc.table_ends import AppliedTableEnds
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.manifest import Manifest, StreamSpan
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.layers.events import raw
from omnisupport_ingest.layers.versions import RulesVersions, of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story, events

TABLES = ("labels", "notes", "tags")


class ThreeTables(Story):
    """The stream of ``TABLES``; contracts may have other events or lateness than those of the story."""

    def __init__(self, folder: Path, **policies: object) -> None:
        super().__init__(folder)
        self._last = 0
        for table in TABLES:
            self.put_contract(table, **policies)
        self.reopen()

    def put_contract(self, table: str, **policies: object) -> None:
        """Write the contract of ``table``, which is not opened before ``reopen``."""
        document = copy.deepcopy(CONTRACT)
        document["title"] = table.title()
        document["x-cdc"] = {**document["x-cdc"], "table": table, **policies}
        (self.contracts / f"{table}.json").write_text(json.dumps(document))

    def reopen(self) -> None:
        """Open the home as a process does that has just started."""
        self.workspace = Workspace.open(self.workspace.settings)
        self.store = self.workspace.landing(SOURCE)

    def of(self, table: str) -> TableContract:
        return next(each for each in self.workspace.contracts.of_source(SOURCE) if each.name == table)

    def land_of(self, second: float, *tables: str, op: str = "c", title: str | None = "new") -> Manifest:
        """Land one transaction of ``second``: an event of each of ``tables``, as one batch. Tables of another
        schema than ``public`` have it before a dot."""
        self._last += 10
        key = None if op == "t" else self._last
        change = Change(op, key, {} if op == "t" else {"title": title, "body": None})
        found = [
            _of(event, table)._replace(ordinal=2 * number)
            for number, table in enumerate(tables)
            for event in events(Commit(self._last, second, [change]))
        ]
        end, at = Lsn(self._last), stories.START + timedelta(seconds=second)
        return self._seal(found, StreamSpan(self._end, end, end, end, self._last, at, at))

    def take_in(
        self, *windows: str, tables: Collection[str] = TABLES, events: bool = True, closed: bool = False
    ) -> None:
        """Commit all that has landed in ``windows`` to raw and deduped ``events`` and to ``tables``."""
        workspace, rules_in_force = self.workspace, RulesVersions(self.workspace, SOURCE)
        workspace.quarantine(SOURCE).open()
        if events:
            raw_id = workspace.raw(SOURCE).open().table_id
            commit(workspace.raw(SOURCE), [self.state(each, raw.VERSIONS, None, closed) for each in windows])
            commit(
                workspace.deduped(SOURCE),
                [self.state(each, rules_in_force.of(each), raw_id, closed) for each in windows],
            )
        above = workspace.deduped(SOURCE).open().table_id
        for contract in map(self.of, tables):
            made_by = of_contract(contract)
            commit(
                workspace.net_changes(contract),
                [self.state(each, made_by, above, closed) for each in windows],
            )
            self.show(contract)

    def show(self, contract: TableContract) -> None:
        """Commit to the dimension that it shows its net changes as they are."""
        folded = self.workspace.net_changes(contract).open()
        state = self.state(WHOLE_TABLE, of_contract(contract), folded.table_id, False)
        checkpoint = replace(state.checkpoint, upstream_version=folded.version)
        commit(
            self.workspace.dimension(contract),
            [replace(state, checkpoint=checkpoint, carried=AppliedTableEnds().to_text())],
        )

    def state(self, window: str, versions: tuple[str, ...], above: str | None, closed: bool) -> WindowState:
        """The state of a window that holds all that has landed in it, and no file."""
        held = tuple(sorted(part.batch_id for part in self.store.parts(window)))
        marks = [part.mark for part in self.store.parts(window) if part.mark is not None]
        checkpoint = Checkpoint(
            *("layer", "table", SOURCE, window, "", max(marks, default=None), "", window, None, len(held)),
            *(None, None, 0, 0, 0, 0, 0, str(ContentHash()), 1, None, "made", stories.START, None),
            closed=closed,
        )
        taken = held if above is None else ()
        return WindowState(
            generation=1, inputs=taken, upstream_table_id=above, checkpoint=checkpoint, batches=held,
            companions=(), versions=versions,
        )  # fmt: skip


def commit(table: LakeTable, states: list[WindowState]) -> None:
    snapshot = table.open()
    snapshot.commit([WindowChange(each.checkpoint.window, (), (), each, replaces=True) for each in states])


def _of(event: LandedEvent, table: str) -> LandedEvent:
    schema, _, name = table.rpartition(".")
    return event._replace(source_schema=schema or event.source_schema, source_table=name)
