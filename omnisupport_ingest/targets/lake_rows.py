"""What a target has to be told: the rows of the current state that differ from those it was told of before.

The files of the current state are replaced where a row of them changed. So the rows of the files that came,
less those of the files that went, are what a target lacks: nothing is asked of it, and an update costs what
changed. Where that is not known (files were swept, the table was made anew) the keys, positions and hashes
that the target has stand for the files that went. DuckDB compares; Spark is not needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.deletion_vectors import are_there
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.lake.log import files_since
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.row_equality import text as literal
from omnisupport_ingest.storage import at_hand
from omnisupport_ingest.targets.columns import POSITION, copy_line, escaped, target_columns

_ROWS_AT_ONCE = 8192

_EMPTY = {
    Kind.TEXT: "NULL::VARCHAR",
    Kind.NUMERIC_TEXT: "NULL::VARCHAR",
    Kind.BINARY: "NULL::BLOB",
    Kind.TEXT_ARRAY: "NULL::VARCHAR[]",
    Kind.INTEGER_ARRAY: "NULL::BIGINT[]",
    Kind.TIMESTAMP: "NULL::TIMESTAMPTZ",
}
"""DuckDB: NULL of the lake's type, of the kinds whose text for COPY is not made by a mere cast."""

_KNOWN = ("_cdc_key", *POSITION, "_cdc_row_hash")


class NotThereYet(IngestError):
    """The lake has no current state of the table yet, or not since its contract named another column.

    Fix: Let the pipeline run, by ``omnisupport-ingest up`` or ``materialize``; then sync again.
    """


@dataclass(frozen=True)
class CurrentState:
    """The current state of a table at one version of it.

    ``entry``: the SHA-256 of the log's entry of that version, which tells it from another version of the
    same number. ``position``: the last event in it, as text.
    """

    contract: TableContract
    snapshot: TableSnapshot
    entry: str
    position: str
    watermark: datetime | None

    @classmethod
    def of(cls, workspace: Workspace, contract: TableContract) -> CurrentState:
        """The newest one; ``NotThereYet``."""
        snapshot = workspace.dimension(contract).look()
        state = snapshot.state(WHOLE_TABLE) if snapshot is not None else None
        if snapshot is None or state is None:
            raise NotThereYet(
                f"The lake has no current state of {contract.source}.{contract.name} yet.",
                fix="Let the pipeline take in what has landed (omnisupport-ingest up, or materialize).",
            )
        present = {field.name for field in snapshot.handle.schema().fields}
        missing = [name for name in contract.column_names if name not in present]
        if missing:
            raise NotThereYet(
                f"The current state of {contract.source}.{contract.name} was made before its contract named "
                f"the column {missing[0]!r}.",
                fix="Let the pipeline take in the changed contract (omnisupport-ingest up, or materialize).",
            )
        entry = entry_of(snapshot, snapshot.version) or ""
        return cls(contract, snapshot, entry, state.checkpoint.cursor, state.checkpoint.watermark)

    @property
    def files(self) -> tuple[LakeFile, ...]:
        return self.snapshot.files(WHOLE_TABLE)

    def since(self, version: int) -> tuple[tuple[LakeFile, ...], tuple[LakeFile, ...]] | None:
        """The files that came after ``version`` and those that went; None if they cannot be known or read."""
        changes = files_since(self.snapshot, version)
        if changes is None:
            return None
        came, went = changes.added, changes.gone
        return (came, went) if are_there((*came, *went)) else None


def entry_of(snapshot: TableSnapshot, version: int) -> str | None:
    """The SHA-256 of the entry of ``version`` in the log; None if it is gone."""
    try:
        text = at_hand(snapshot.table.folder / "_delta_log" / f"{version:020d}.json").read_bytes()
    except FileNotFoundError:
        return None
    return hashlib.sha256(text).hexdigest()


class Difference:
    """The rows of files that came, compared with what was known before; as a context.

    ``known``: Parquet files with the columns ``_cdc_key``, position and ``_cdc_row_hash``, or the CSV file of
    a target's. With ``again`` every row counts as changed.
    """

    def __init__(
        self,
        contract: TableContract,
        added: Sequence[LakeFile | str],
        known: Sequence[LakeFile | str] | Path,
        scratch: Path,
        *,
        again: bool = False,
    ) -> None:
        self._contract = contract
        self._connection = duckdb.connect()
        for setting in ("TimeZone = 'UTC'", f"temp_directory = {literal(str(scratch))}"):
            self._connection.execute(f"SET {setting}")
        self._connection.execute("SET arrow_large_buffer_size = true")
        names = ", ".join(_KNOWN)
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        self._connection.execute(f"CREATE VIEW came AS {self._rows(added)}")
        self._connection.execute(f"CREATE VIEW known AS SELECT {names} FROM {self._known(known)}")
        here, there = (", ".join(f"{side}.{name}" for name in POSITION) for side in "ck")
        other = f"c._cdc_row_hash IS DISTINCT FROM k._cdc_row_hash OR ({here}) IS DISTINCT FROM ({there})"
        self._connection.execute(
            "CREATE TEMP TABLE changed AS SELECT c._cdc_key,"
            # Without a row before, a comparison of rows would call NULL the highest.
            f" k._cdc_key IS NOT NULL AND ({here}) < ({there}) AS back"
            " FROM came c LEFT JOIN known k ON c._cdc_key = k._cdc_key"
            f" WHERE k._cdc_key IS NULL OR {'true' if again else other}"
        )

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def counts(self) -> tuple[int, int]:
        """How many rows are new or other, and how many are gone."""
        gone = f"SELECT count(*) FROM ({self._vanished()})"
        ((other, vanished),) = self._connection.execute(
            f"SELECT (SELECT count(*) FROM changed), ({gone})"
        ).fetchall()
        return other, vanished

    def highest(self) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
        """The highest position of the files that came, and of what was known; None where there is none."""
        highest = []
        for view in ("came", "known"):
            highest += self._connection.execute(
                f"SELECT max(row({', '.join(POSITION)})) FROM {view}"
            ).fetchall()
        return highest[0][0], highest[1][0]

    def lines(self) -> Iterator[bytes]:
        """The changed rows as lines for COPY, in blocks."""
        line = copy_line(target_columns(self._contract))
        return self._blocks(f"SELECT {line} FROM came WHERE _cdc_key IN (SELECT _cdc_key FROM changed)")

    def leaving(self) -> Iterator[bytes]:
        """The keys of rows that are gone, and of rows that stand at an earlier position than before, as lines
        for COPY: the key, and whether the row is gone."""
        key = escaped("_cdc_key")
        leaving = f"{self._vanished()} UNION ALL SELECT _cdc_key, false FROM changed WHERE back"
        return self._blocks(f"SELECT concat({key}, chr(9), vanished, chr(10)) FROM ({leaving})")

    def _vanished(self) -> str:
        return (
            "SELECT _cdc_key, true AS vanished FROM known WHERE _cdc_key NOT IN (SELECT _cdc_key FROM came"
            " WHERE _cdc_key IS NOT NULL)"
        )

    def _blocks(self, query: str) -> Iterator[bytes]:
        reader = self._connection.sql(query).to_arrow_reader(_ROWS_AT_ONCE)
        for batch in reader:
            lines = batch.column(0).cast(pa.large_string())
            if len(lines):
                # The texts of an Arrow column follow one another: they are what COPY reads.
                bounds = pa.Array.from_buffers(
                    pa.int64(), len(lines) + 1, [None, lines.buffers()[1]], offset=lines.offset
                )
                yield lines.buffers()[2][bounds[0].as_py() : bounds[len(lines)].as_py()].to_pybytes()

    def _rows(self, files: Sequence[LakeFile | str]) -> str:
        columns = {column.name: _EMPTY.get(column.type.kind, "NULL") for column in self._contract.columns}
        columns |= dict.fromkeys(("_cdc_is_deleted", "_cdc_deleted_at", "_cdc_updated_at"), "NULL")
        nothing = [f'{value} AS "{name.replace(chr(34), chr(34) * 2)}"' for name, value in columns.items()]
        empty = (
            f"SELECT {', '.join(nothing)}, []::VARCHAR[] AS _cdc_unresolved, MAP {{}}::MAP(VARCHAR, VARCHAR)"
            f" AS _cdc_exact, {_nothing_known()}"
        )
        # Files may be older than a column that the contract has gained.
        if not files:
            return empty
        return f"SELECT * FROM {live_sql(self._connection, files)} UNION ALL BY NAME {empty}"

    def _known(self, known: Sequence[LakeFile | str] | Path) -> str:
        if isinstance(known, Path):
            types = "{'_cdc_key': 'VARCHAR', '_cdc_epoch': 'INTEGER', '_cdc_commit_lsn': 'BIGINT', "
            types += "'_cdc_ordinal': 'BIGINT', '_cdc_row_hash': 'BIGINT'}"
            options = "header = false, auto_detect = false, delim = ',', quote = '\"', escape = '\"'"
            return f"read_csv({literal(str(known))}, {options}, parallel = false, columns = {types})"
        return live_sql(self._connection, known) if known else f"(SELECT {_nothing_known()})"


def _nothing_known() -> str:
    return (
        "NULL::VARCHAR AS _cdc_key, NULL::INTEGER AS _cdc_epoch, NULL::BIGINT AS _cdc_commit_lsn,"
        " NULL::BIGINT AS _cdc_ordinal, NULL::BIGINT AS _cdc_row_hash WHERE false"
    )
