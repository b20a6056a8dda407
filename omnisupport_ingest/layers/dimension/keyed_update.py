"""An in-place update of a table with one row per key or version: write its files, then commit once.

Dimensions and histories are such tables. Each defines how its new rows are made (``_updated``). This module
writes them into the table, in the same way for both. Tables stored by window have ``window_update``.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.checkpoint import MarkedRows, MergeCost
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.deletion_vectors import write_vectors
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.key_files import (
    FilesByKind,
    KeyFile,
    files_by_kind,
    is_fresh,
    written_file,
)
from omnisupport_ingest.lake.layout import WHOLE_TABLE, StagedFile
from omnisupport_ingest.lake.read import read_paths
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import place_files
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.batch_facts import BatchFacts
from omnisupport_ingest.layers.checkpoints import Counts, Identity, Outcome, checkpoint_of
from omnisupport_ingest.layers.dimension.range_update import REFOLDED
from omnisupport_ingest.layers.dimension.update_tasks import FilesUpdated
from omnisupport_ingest.layers.plan import WindowPlan, Work, idempotency_key
from omnisupport_ingest.layers.workspace import order_of

FAR_BEHIND = 256
"""With this many newer versions of the table above, a table without news records that it has seen them.
Otherwise every look would read the log in between again."""


class KeyedUpdate(ABC):
    """One update, planned on one version of the table and of the table above it.

    ``whole``: whether every row is made again; a subclass sets it.
    """

    layer: ClassVar[str]

    def __init__(
        self, spark: SparkSession, contract: TableContract, snapshot: TableSnapshot, above: TableSnapshot
    ) -> None:
        self._spark, self._contract = spark, contract
        self._snapshot, self._above = snapshot, above
        self._before = snapshot.state(WHOLE_TABLE)
        self._order = order_of(contract)
        self._whole = False

    @cached_property
    def _listed(self) -> FilesByKind:
        """The files of the table."""
        return files_by_kind(self._snapshot, self._order)

    @property
    def _held(self) -> list[KeyFile] | None:
        """The files of the table by key; None if their keys are not known."""
        return self._listed.ordered

    @cached_property
    def _files(self) -> list[KeyFile]:
        """The files that the update may rewrite; none if every row is made again."""
        return [] if self._whole or self._held is None else self._held

    @property
    def _written_by_others(self) -> bool:
        """Whether another program wrote a file of the table, and so may have changed rows."""
        return any(layout.unit_of(file.path) is None for file in self._snapshot.files(WHOLE_TABLE))

    def commit(self, identity: Identity) -> None:
        """Update the files and commit the result."""
        snapshot, above, before = self._snapshot, self._above, None if self._whole else self._before
        work = Work.REPLACE if self._whole else Work.APPEND
        plan = WindowPlan(WHOLE_TABLE, work, frozenset(), snapshot.version + 1)
        inputs, versions = (f"version:{above.version}",), self._versions()
        since = "" if before is None else ":".join(before.inputs)
        key = idempotency_key(
            layer=self.layer,
            table=self._contract.full_name,
            window=WHOLE_TABLE,
            inputs=[above.table_id, f"from:{since}", *inputs],
            versions=versions,
        )
        draft = snapshot.table.folder / layout.STAGING / uuid.uuid4().hex
        # No failpoint: a draft that no table names yet.
        draft.mkdir(mode=0o700, parents=True)
        drafts = Drafts.of(self._spark, draft)
        try:
            updated = self._updated(draft)
            unit = self._unit_of(key, updated)
            add = self._placed(drafts, updated, unit, plan.generation)
            folder = layout.unit_folder(WHOLE_TABLE, plan.generation, unit)
            marked = write_vectors(snapshot.table.folder, folder, updated.dead)
        finally:
            drafts.clear()
        content = updated.added
        if before is not None:
            content = ContentHash.parse(before.checkpoint.content_hash) - updated.removed + content
        outcome = Outcome(
            idempotency_key=key,
            batches=(),
            facts=self._batch_facts(),
            counts=Counts(),
            upstream_version=above.version,
        )
        checkpoint = checkpoint_of(snapshot, plan, outcome, identity, content)
        state = WindowState(
            generation=plan.generation,
            inputs=inputs,
            upstream_table_id=above.table_id,
            checkpoint=replace(checkpoint, merges=self._merges(updated), marked=self._marked(updated, add)),
            versions=versions,
            carried=self._carried_text(),
        )
        held = {file.path: file for file in snapshot.files(WHOLE_TABLE)}
        leaving = () if self._whole else tuple(held[path] for path in updated.replaced)
        snapshot.commit([WindowChange(WHOLE_TABLE, add, leaving, state, replaces=self._whole, marked=marked)])

    @cached_property
    def _fresh(self) -> list[KeyFile]:
        """The fresh files that the update may rewrite; none if every row is made again."""
        if self._whole or self._held is None or not self._snapshot.has_vectors:
            return []
        return self._listed.fresh

    def _marked(self, updated: FilesUpdated, add: Sequence[StagedFile]) -> MarkedRows | None:
        """Return the marked rows and fresh files of the table once ``updated`` is committed with the files
        ``add``; None if there are none."""
        dead, fresh = 0, [file.rows for file in add if is_fresh(file.path)]
        for file in (*self._files, *self._fresh):
            if file.path not in updated.replaced:
                rows = updated.dead.get(file.path)
                dead_rows = file.stored_rows - file.rows if rows is None else len(rows)
                dead += dead_rows
                fresh += [file.stored_rows - dead_rows] if is_fresh(file.path) else []
        return MarkedRows(dead, len(fresh), sum(fresh)) if dead or fresh else None

    @property
    def _far_behind(self) -> bool:
        """Whether the table above has so many newer versions that this table records having seen them."""
        version = self._before.checkpoint.upstream_version if self._before is not None else None
        return version is None or self._above.version - version >= FAR_BEHIND

    def _until_settled(
        self, refold: DataFrame | None, attempt: Callable[[DataFrame | None], FilesUpdated]
    ) -> FilesUpdated:
        """Call ``attempt`` with the keys to fold again (None: none), then with more keys, until it finds no
        more; return its last result. Other keys may depend on the life of a key that changes."""
        while True:
            updated = attempt(refold)
            if not updated.refold:
                return updated
            more = read_paths(self._spark, REFOLDED, updated.refold)
            # Read it now, because the folder is cleared afterwards.
            refold = (more if refold is None else refold.unionByName(more)).localCheckpoint()

    @abstractmethod
    def _versions(self) -> tuple[str, ...]:
        """Return the versions that make the table stale when they change."""

    @abstractmethod
    def _batch_facts(self) -> BatchFacts:
        """Return how far the table is complete once the update is committed."""

    @abstractmethod
    def _updated(self, draft: Path) -> FilesUpdated:
        """Write the new files into the folder ``draft``."""

    def _require(self, files: Sequence[StagedFile], updated: FilesUpdated) -> None:  # noqa: B027
        """Raise an error if the placed ``files`` must not be committed; by default they may."""

    def _merges(self, updated: FilesUpdated) -> tuple[MergeCost, ...]:  # noqa: ARG002
        """Return the costs of the last merges, including this one; none by default."""
        return ()

    def _carried_text(self) -> str:
        """Return what the next update must know and no row holds; nothing by default."""
        return ""

    def _unit_of(self, key: str, updated: FilesUpdated) -> str:
        """Return the name of the unit of the files that ``updated`` wrote.

        Files that another run placed for the same work ``key`` are used only if they replace the same files.
        With another file size they do not.
        """
        return idempotency_key(
            layer=self.layer,
            table=self._contract.full_name,
            window=WHOLE_TABLE,
            inputs=updated.replaced,
            versions=[
                key,
                f"removed:{updated.removed}",
                f"added:{updated.added}",
                *(f"dead:{path}:{len(rows)}" for path, rows in sorted(updated.dead.items())),
            ],
        )

    def _placed(
        self, drafts: Drafts, updated: FilesUpdated, unit: str, generation: int
    ) -> tuple[StagedFile, ...]:
        if not updated.written:
            return ()
        table = self._snapshot.table
        written = {file.name: file for file in updated.written}
        staged = []
        for path in place_files(table, drafts.folder, written, unit=unit, generation=generation):
            # Another run may have placed files here before.
            file = written.get(Path(path).name) or written_file(table.folder / path, self._order)
            staged.append(StagedFile(path, WHOLE_TABLE, (), file.rows, file.bytes, file.stats))
        drafts.keep(file.path for file in staged)
        self._require(staged, updated)
        return tuple(staged)
