"""Compare dimensions at fixed versions with rows of the source, to find the rows that differ now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.layers.scheduling.pending import Pending, pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import remove_left_behind, scratch_folder
from omnisupport_ingest.read.lake_checksum import checksum_columns, in_range, is_at_source
from omnisupport_ingest.read.row_equality import (
    equal,
    not_marked,
    same_key,
    select_lake,
    select_source,
    text,
)
from omnisupport_ingest.wording import counted

_SCRATCH = "repair-"


class LakeBehind(IngestError):
    """The lake has not taken in all that has landed, so a comparison with the source would mislead.

    Fix: Let the pipeline run, and try again. If a batch is missing from landing, restore it first.
    """


def require_all_taken(pending: Pending, source: str) -> None:
    """Raise ``LakeBehind`` if windows are ``pending``."""
    if not pending.nothing:
        raise LakeBehind(
            f"The lake has not taken in all that has landed from {source}: "
            f"Waiting: {counted(len(pending.windows) + len(pending.late_windows), 'window')}.",
            fix="Let the pipeline run (omnisupport-ingest up, or materialize), and try again.",
        )


class DimensionRows:
    """Compares the rows of one table with rows of the source, one file at a time. Use it as a context.

    It records which rows of the lake were met. A row that no file had is gone from the source.
    """

    def __init__(self, contract: TableContract, files: Sequence[LakeFile | str], scratch: Path) -> None:
        """``files``: of the dimension. ``scratch``: a folder for what does not fit into memory."""
        self._contract, self._scratch = contract, scratch
        self._connection = duckdb.connect(str(scratch / "met.duckdb"))
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute(f"SET temp_directory = {text(str(scratch / 'spill'))}")
        # No failpoint: scratch files, which the next command removes if this process is killed.
        self._connection.execute(f"CREATE VIEW lake AS {select_lake(self._connection, contract, files)}")
        self._connection.execute("CREATE TABLE met (key VARCHAR)")

    @property
    def scratch(self) -> Path:
        """A folder for the rows to compare with; removed when the context ends."""
        return self._scratch

    def same(self, rows: Path) -> bool:
        """Return whether the lake has every source row in the file ``rows`` (``write_text_rows``) with equal
        values in the contract's columns.

        A row with an unresolved value is not equal. If a policy has changed values of the table, no row is:
        the lake cannot show that nothing else has changed.
        """
        contract = self._contract
        differs = [
            "l._cdc_key IS NULL",
            "len(l._cdc_unresolved) > 0",
            f"(l._cdc_is_deleted AND {not_marked(contract)})",
            *(["true"] if contract.unprotected else (f"NOT ({equal(each)})" for each in contract.columns)),
        ]
        # No failpoint: scratch files, which the next command removes if this process is killed.
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE pairs AS"
            f" SELECT l._cdc_key AS key, {' OR '.join(differs)} AS differs"
            f" FROM ({select_source(contract, rows)}) s LEFT JOIN lake l ON {same_key(contract, 's', 'l')}"
        )
        self._connection.execute("INSERT INTO met SELECT key FROM pairs WHERE key IS NOT NULL")
        # An unresolved value counts as different.
        row = self._connection.execute("SELECT bool_and(differs IS FALSE) FROM pairs").fetchone()
        assert row is not None
        return row[0] is not False

    def has(
        self, checksum: RowChecksum, by: Sequence[str], start: Sequence[str] | None, end: Sequence[str] | None
    ) -> bool:
        """Return whether the rows with keys above ``start`` up to ``end`` (inclusive) certainly have
        ``checksum``. If so, they count as met.

        ``by``: the columns to which the bounds belong. A bound of None is open.
        """
        contract = self._contract
        condition = f"{in_range(contract, by, start, end)} AND {is_at_source(contract)}"
        sums_row = self._connection.execute(
            f"SELECT {checksum_columns(contract)}, coalesce(bool_or(len(l._cdc_unresolved) > 0), false)"
            f" FROM lake l WHERE {condition}"
        ).fetchone()
        assert sums_row is not None
        *sums, unresolved = sums_row
        if unresolved or RowChecksum(*map(int, sums)) != checksum:
            return False
        # No failpoint: scratch files, which the next command removes if this process is killed.
        self._connection.execute(f"INSERT INTO met SELECT l._cdc_key FROM lake l WHERE {condition}")
        return True

    def unmet(self) -> list[str]:
        """Return the keys (JSON arrays), in order, of rows that no file had and that are alive or may be."""
        rows = self._connection.execute(
            "SELECT _cdc_key FROM lake l WHERE (NOT _cdc_is_deleted OR len(_cdc_unresolved) > 0)"
            " AND NOT EXISTS (SELECT 1 FROM met WHERE met.key = l._cdc_key) ORDER BY _cdc_key"
        ).fetchall()
        return [key for (key,) in rows]

    def close(self) -> None:
        self._connection.close()


class PinnedDimensions:
    """The dimensions of the configured source, at the versions that ``pin`` found."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._files: dict[str, tuple[LakeFile, ...]] = {}

    def pin(self) -> None:
        """Fix the versions of the tables. Raises ``LakeBehind`` if they do not hold all that has landed.

        Call it while nothing lands and nobody else repairs.
        """
        workspace, source = self._workspace, self._workspace.settings.source
        remove_left_behind(workspace.home.run, _SCRATCH)
        pending = pending_windows(workspace.merging_at_once(), source)
        if pending.gap is not None and not pending.gap.is_repaired:
            raise LakeBehind(
                f"A batch of {source} is missing from landing ({pending.gap}), and with it from the lake.",
                fix="Restore the batch, or have every table read: source repair --mode resnapshot",
            )
        require_all_taken(pending, source)
        for contract in workspace.contracts.of_source(source):
            table = workspace.dimension(contract)
            files = table.open().all_files() if table.exists else ()
            self._files[contract.name] = tuple(files)

    @contextmanager
    def rows(self, contract: TableContract) -> Iterator[DimensionRows]:
        """Return the rows of one table, at the version that ``pin`` fixed."""
        with scratch_folder(self._workspace.home.run, _SCRATCH) as scratch:
            rows = DimensionRows(contract, self._files[contract.name], scratch)
            try:
                yield rows
            finally:
                rows.close()
