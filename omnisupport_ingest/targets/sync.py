"""Bring a target up to the current state of its table, in one transaction of the target.

The transaction contains the rows, the deletes, new columns, and a row of ``_omnisupport_targets`` that names
the version of the lake's table that the target then has. So a sync that dies has done nothing, and a sync
that is repeated finds nothing to do.

**Which row is newer.** A row is written if its position is above that of the target's row, or equal with
other content (a replay or another contract may change a row without a newer event). If the lake has taken
events back (discarded, erased, rebuilt), a row may have an earlier position than before; then the old row is
deleted first, in the same transaction. That happens only with a later version of the lake's table than the
one that the target names: an older one is refused (``TargetAhead``). The lake stays the truth.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract, TargetPolicy
from omnisupport_ingest.contracts.named_secrets import secret_in
from omnisupport_ingest.contracts.pii_policies import DROP
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import scratch_folder
from omnisupport_ingest.sources.postgres.session.connect_errors import DatabaseLabel, first_line
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import BadDsn, SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified
from omnisupport_ingest.sources.postgres.session.silence import Awaited
from omnisupport_ingest.targets.columns import (
    POSITION,
    TargetRefused,
    create_sql,
    missing_columns,
    target_columns,
)
from omnisupport_ingest.targets.lake_rows import CurrentState, Difference, entry_of
from omnisupport_ingest.targets.note import SyncRecord, commit_note, prepare_notes, read_note
from omnisupport_ingest.targets.standing import note_failed, note_synced

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_SCRATCH = "target-"
_BLOCK_BYTES = 1024 * 1024


class NoTarget(IngestError):
    """The contract of the table names no target.

    Fix: Name one: ``x-cdc.target`` in the contract.
    """

    exit_code = 2


class TargetUnavailable(IngestError):
    """The target cannot be reached, went away, or is locked by somebody else.

    Fix: Start it, or wait; the next sync begins anew.
    """

    exit_code = 4


class TargetAhead(IngestError):
    """The target has a later state than the lake, which was restored, or made again from less.

    Fix: Let the pipeline catch up. If the lake is right as it is: ``omnisupport-ingest target sync TABLE
    --anew``.
    """

    exit_code = 5


@dataclass(frozen=True, slots=True)
class TargetSynced:
    """What a sync did.

    Attributes:
        table_id: the lake's table that the target now has, at ``delta_version``.
        written: rows that were inserted or updated.
        taken_back: rows that were set to an earlier position; they are among ``written``.
        deleted: rows that were gone from the current state.
        whole: all rows were compared, not only those of replaced files.
        added: columns that the target got.
    """

    table: str
    target: str
    table_id: str
    delta_version: int
    written: int
    taken_back: int
    deleted: int
    whole: bool
    added: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetLag:
    """How far a target is behind. None: not known, or there is nothing to compare with.

    ``rows``: rows that a sync would write or delete. ``seconds``: between the watermarks. ``problem``: why
    nothing is known.
    """

    table: str
    target: str
    versions: int | None = None
    rows: int | None = None
    seconds: float | None = None
    synced_at: datetime | None = None
    position: str | None = None
    problem: str | None = None
    fix: str | None = None


def sync_target(
    workspace: Workspace, contract: TableContract, *, compare: bool = False, anew: bool = False
) -> TargetSynced:
    """Write to the target of ``contract`` what it lacks.

    ``compare``: compare all rows, even if the versions say that nothing is missing. ``anew``: take the lake
    as it is, even if the target has a later state. The home notes what came of it (``standing``). Raises
    ``NoTarget``, ``TargetUnavailable``, ``TargetRefused``, ``TargetAhead``, ``NotThereYet`` and
    ``ConnectionMissing``.
    """
    policy = _policy(contract)
    CurrentState.of(workspace, contract)
    try:
        with closing(_connect(contract, policy)) as connection, _errors(contract, policy):
            prepare_notes(connection, policy)
            done = _Sync(workspace, contract, policy, connection).run(compare=compare, anew=anew)
    except Exception as error:
        note_failed(workspace.home, contract, error)
        raise
    note_synced(workspace.home, contract, done.table_id, done.delta_version)
    return done


def target_lag(workspace: Workspace, contract: TableContract) -> TargetLag:
    """Return how far the target of ``contract`` is behind the lake; a problem is reported, not raised."""
    policy = _policy(contract)
    table, name = f"{contract.source}.{contract.name}", f"{policy.schema}.{policy.table}"
    try:
        state = CurrentState.of(workspace, contract)
        with closing(_connect(contract, policy)) as connection, _errors(contract, policy):
            with connection.cursor() as cursor:
                synced = read_note(cursor, policy)
                emptied = synced is not None and _lacks_all(cursor, policy, state)
            connection.rollback()
    except IngestError as error:
        return TargetLag(table, name, problem=error.problem, fix=error.fix)
    every = sum(file.rows for file in state.snapshot.all_files())
    if synced is None:
        return TargetLag(table, name, rows=every)
    since = _since(state, synced)
    rows = None
    if emptied or synced.is_retyped(target_columns(contract)):
        rows = every
    elif since is not None:
        with (
            scratch_folder(workspace.home.run, _SCRATCH) as scratch,
            Difference(contract, *since, scratch) as difference,
        ):
            rows = sum(difference.counts())
    same = synced.table_id == state.snapshot.table_id
    seconds = None
    if state.watermark is not None and synced.watermark is not None:
        seconds = max(0.0, (state.watermark - synced.watermark).total_seconds())
    versions = state.snapshot.version - synced.version if same else None
    return TargetLag(table, name, versions, rows, seconds, synced.synced_at, synced.position)


class _Sync:
    """One sync, in one transaction of ``connection``."""

    def __init__(
        self, workspace: Workspace, contract: TableContract, policy: TargetPolicy, connection: Connection
    ) -> None:
        self._workspace, self._contract, self._policy = workspace, contract, policy
        self._connection = connection
        self._columns = target_columns(contract)
        self._name = qualified(policy.schema, policy.table)

    def run(self, *, compare: bool, anew: bool) -> TargetSynced:
        with (
            self._connection.cursor() as cursor,
            scratch_folder(self._workspace.home.run, _SCRATCH) as scratch,
        ):
            # Two syncs of one target run one after the other, so the second sees what the first has done.
            lock = literal(f"omnisupport {self._policy.schema}.{self._policy.table}")
            cursor.execute(f"SELECT pg_advisory_xact_lock(hashtextextended({lock}, 0))")
            synced = read_note(cursor, self._policy)
            # Opened under the lock: nobody has written a later version.
            state = CurrentState.of(self._workspace, self._contract)
            self._refuse_shared(synced)
            new, added = self._shape(cursor, synced)
            if synced is not None and not anew:
                self._refuse_older(state, synced)
            again = bool(added) or (synced is not None and synced.is_retyped(self._columns))
            since = None
            if synced is not None and not (new or again or compare or anew):
                since = None if _lacks_all(cursor, self._policy, state) else _since(state, synced)
                # The note of an older program has no types, so it is written anew.
                noted = synced.version == state.snapshot.version and synced.types is not None
                if since == ((), ()) and noted:
                    self._connection.rollback()
                    return self._done(state, (0, 0, 0), whole=False)
            came: Any = state.files
            before: Any = ()
            if since is not None:
                came, before = since
            elif not new:
                before = self._of_target(cursor, scratch)
            with Difference(self._contract, came, before, scratch, again=again) as difference:
                if since is None and synced is not None and not anew:
                    self._refuse_behind(state, synced, difference)
                counts = self._merge(cursor, difference, again=again)
            self._commit(cursor, state)
            return self._done(state, counts, whole=since is None, added=added)

    def _shape(self, cursor: Any, synced: SyncRecord | None) -> tuple[bool, tuple[str, ...]]:
        """Create the table or add columns; return whether it is new, and the columns it got."""
        policy = self._policy
        cursor.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid ="
            f" to_regclass({literal(self._name)}) AND attnum > 0 AND NOT attisdropped"
        )
        there = dict(cursor.fetchall())
        if not there:
            # No failpoint: inside the transaction of the target, whose commit target.commit stands around.
            cursor.execute(create_sql(policy.schema, policy.table, self._columns))
            return True, ()
        if synced is None:
            raise TargetRefused(
                f"The target {policy.schema}.{policy.table} is there already, and was not made by a sync.",
                fix=f"Name another table in x-cdc.target of {self._contract.path}, or, if nobody needs it: "
                f"DROP TABLE {self._name};",
            )
        added = missing_columns(policy.schema, policy.table, self._columns, there)
        for column in added:
            cursor.execute(f"ALTER TABLE {self._name} ADD COLUMN {identifier(column.name)} {column.pg_type}")
        for name in (each.name for each in self._contract.source_columns if each.pii == DROP):
            if name in there:
                # An earlier sync may have sent values that the lake no longer shows.
                column_name = identifier(name)
                cursor.execute(
                    f"UPDATE {self._name} SET {column_name} = NULL WHERE {column_name} IS NOT NULL"
                )
        return False, tuple(column.name for column in added)

    def _refuse_shared(self, synced: SyncRecord | None) -> None:
        """Refuse a target that another table uses: the two would delete each other's rows."""
        mine = (self._contract.source, self._contract.name)
        if synced is not None and (synced.source, synced.contract) != mine:
            raise TargetRefused(
                f"The target {self._policy.schema}.{self._policy.table} is that of "
                f"{synced.source}.{synced.contract}.",
                fix=f"Name another schema or table in x-cdc.target of {self._contract.path}.",
            )

    def _refuse_older(self, state: CurrentState, synced: SyncRecord) -> None:
        if synced.table_id == state.snapshot.table_id and state.snapshot.version < synced.version:
            raise self._ahead(f"version {synced.version}, and the lake is at {state.snapshot.version}")

    def _refuse_behind(self, state: CurrentState, synced: SyncRecord, difference: Difference) -> None:
        """Refuse a lake table that was made again, or has another past, if its position is earlier than
        the target's."""
        same = synced.table_id == state.snapshot.table_id
        if same and entry_of(state.snapshot, synced.version) in (synced.entry, None):
            return
        here, there = difference.highest()
        if there is not None and (here is None or here < there):
            raise self._ahead("later events than the current state of the lake, which was made anew")

    def _ahead(self, state: str) -> TargetAhead:
        return TargetAhead(
            f"The target {self._policy.schema}.{self._policy.table} has {state}.",
            fix="Let the pipeline catch up. If the lake is right as it is: omnisupport-ingest target sync "
            f"{self._contract.source}.{self._contract.name} --anew",
        )

    def _of_target(self, cursor: Any, scratch: Path) -> Path:
        """Return a file with the keys, positions and hashes that the target has."""
        path = scratch / "known.csv"
        columns = ", ".join(("_cdc_key", *POSITION, "_cdc_row_hash"))
        # No failpoint: scratch files, which the next command removes if this process is killed.
        with path.open("wb") as file:
            _copy_out(cursor, f"COPY (SELECT {columns} FROM {self._name}) TO STDOUT (FORMAT csv)", file)
        return path

    def _merge(self, cursor: Any, difference: Difference, *, again: bool) -> tuple[int, int, int]:
        """Write the difference; return the numbers of rows written, taken back and deleted."""
        names = [identifier(column.name) for column in self._columns]
        # No failpoint: inside the transaction of the target, whose commit target.commit stands around.
        cursor.execute("CREATE TEMP TABLE leaving (_cdc_key text, gone boolean) ON COMMIT DROP")
        _copy(cursor, "COPY leaving FROM STDIN", difference.leaving())
        cursor.execute(
            f"WITH left_ AS (DELETE FROM {self._name} t USING leaving l WHERE t._cdc_key = l._cdc_key"
            " RETURNING l.gone) SELECT count(*) FILTER (WHERE gone), count(*) FILTER (WHERE NOT gone)"
            " FROM left_"
        )
        deleted, taken_back = cursor.fetchone()
        cursor.execute(f"CREATE TEMP TABLE coming ON COMMIT DROP AS SELECT * FROM {self._name} WITH NO DATA")
        _copy(cursor, f"COPY coming ({', '.join(names)}) FROM STDIN", difference.lines())
        new, old = (", ".join(f"{side}.{name}" for name in POSITION) for side in ("excluded", "t"))
        sets = ", ".join(f"{name} = excluded.{name}" for name in names)
        other = "true" if again else "excluded._cdc_row_hash IS DISTINCT FROM t._cdc_row_hash"
        cursor.execute(
            f"INSERT INTO {self._name} AS t ({', '.join(names)}) SELECT {', '.join(names)} FROM coming"
            f" ON CONFLICT (_cdc_key) DO UPDATE SET {sets}"
            f" WHERE ({new}) > ({old}) OR (({new}) = ({old}) AND {other})"
        )
        return cursor.rowcount, taken_back, deleted

    def _commit(self, cursor: Any, state: CurrentState) -> None:
        types = {column.name: column.pg_type for column in self._columns}
        commit_note(cursor, self._contract, self._policy, state, types)

    def _done(
        self,
        state: CurrentState,
        counts: tuple[int, int, int],
        *,
        whole: bool,
        added: tuple[str, ...] = (),
    ) -> TargetSynced:
        contract, policy = self._contract, self._policy
        return TargetSynced(
            f"{contract.source}.{contract.name}",
            f"{policy.schema}.{policy.table}",
            state.snapshot.table_id,
            state.snapshot.version,
            *counts,
            whole=whole,
            added=added,
        )


def _since(
    state: CurrentState, synced: SyncRecord
) -> tuple[tuple[LakeFile, ...], tuple[LakeFile, ...]] | None:
    """Return the files that were added and removed since the version that the target has; None if the
    lake's table has another past."""
    if synced.table_id != state.snapshot.table_id or entry_of(state.snapshot, synced.version) != synced.entry:
        return None
    return state.since(synced.version)


def _lacks_all(cursor: Any, policy: TargetPolicy, state: CurrentState) -> bool:
    """Return whether the target has no row while the lake has some: somebody has emptied it."""
    cursor.execute(f"SELECT EXISTS (SELECT 1 FROM {qualified(policy.schema, policy.table)})")
    return not cursor.fetchone()[0] and any(file.rows for file in state.files)


class _Stream:
    """Blocks of bytes, read as a file.

    ``target``: the wait for the target, which may be silent while the next block is made.
    """

    def __init__(self, blocks: Iterator[bytes], target: Awaited) -> None:
        self._blocks, self._target, self._rest = blocks, target, b""

    def read(self, size: int) -> bytes:
        if not self._rest:
            with self._target.busy():
                self._rest = next(self._blocks, b"")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _copy(cursor: Any, statement: str, blocks: Iterator[bytes]) -> None:
    with Awaited(cursor.connection, cursor.connection.silence) as target:
        cursor.copy_expert(statement, _Stream(blocks, target), size=_BLOCK_BYTES)


class _Written(io.RawIOBase):
    """A file to write to.

    ``target``: the wait for the target, which may be silent while a block is written.
    """

    def __init__(self, file: IO[bytes], target: Awaited) -> None:
        self._file, self._target = file, target

    def writable(self) -> bool:
        return True

    def write(self, block: ReadableBuffer) -> int:
        with self._target.busy():
            return self._file.write(block)


def _copy_out(cursor: Any, statement: str, file: IO[bytes]) -> None:
    with Awaited(cursor.connection, cursor.connection.silence) as target:
        # Buffered, because psycopg2 writes line by line.
        buffer = io.BufferedWriter(_Written(file, target), _BLOCK_BYTES)
        cursor.copy_expert(statement, buffer)
        buffer.flush()


def _policy(contract: TableContract) -> TargetPolicy:
    if contract.target is None:
        raise NoTarget(
            f"The contract of {contract.source}.{contract.name} names no target.",
            fix=f"Name one in x-cdc of {contract.path}: "
            '"target": {"connection": {"env": "WAREHOUSE_DSN"}}',
        )
    return contract.target


def _connect(contract: TableContract, policy: TargetPolicy) -> Connection:
    how, name = ("env", policy.connection_env) if policy.connection_env else ("file", policy.connection_file)
    assert name is not None
    dsn = secret_in(how, name, contract.path, "connection string")
    try:
        label = DatabaseLabel(f"the target {policy.schema}.{policy.table}", name)
        connection = connect(dsn, application_name="omnisupport-ingest target", label=label)
    except SourceRefused as error:
        raise TargetRefused(error.problem, fix=error.fix) from None
    except (BadDsn, SourceUnavailable) as error:
        raise TargetUnavailable(error.problem, fix=error.fix) from None
    connection.autocommit = False
    return connection


@contextmanager
def _errors(contract: TableContract, policy: TargetPolicy) -> Iterator[None]:
    """Turn errors of the target into ours, without values of rows."""
    name = f"{policy.schema}.{policy.table}"
    try:
        yield
    except psycopg2.errors.LockNotAvailable:
        raise TargetUnavailable(
            f"The target {name} is held by somebody else: another sync, or a session that has locked it.",
            fix="Try again when that has ended; pg_locks there says who it is.",
        ) from None
    except psycopg2.errors.InsufficientPrivilege as error:
        raise TargetRefused(
            f"The role may not write the target {name}: {first_line(error)}.",
            fix="Run there, to the role of the connection: GRANT USAGE, CREATE ON SCHEMA … TO …; GRANT "
            "TEMPORARY ON DATABASE … TO …;  -- it must own the tables that it made.",
        ) from None
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        raise TargetUnavailable(
            f"The target {name} failed: {first_line(error)}.",
            fix="Start it again if it is down, or act on its message; the next sync begins anew.",
        ) from None
    except psycopg2.Error as error:
        column = getattr(error.diag, "column_name", None) or _column_read(error, contract)
        problem = (
            f"The target {name} refuses rows of {contract.source}.{contract.name}: {type(error).__name__} "
            f"({error.pgcode}{', column ' + column if column else ''})."
        )
        if isinstance(error, psycopg2.DataError) and column:
            raise TargetRefused(
                problem,
                fix=f"The type of {column} there does not take a value that the lake has: the log of its "
                "server shows which. Correct that value at the source, then sync again.",
            ) from None
        raise TargetRefused(
            problem,
            fix="Its log has the statement. A column added there by hand must take NULL, and a constraint "
            "or trigger there must take every row of the current state.",
        ) from None


def _column_read(error: psycopg2.Error, contract: TableContract) -> str | None:
    """Return the column that COPY was reading; None if the server does not say.

    Its context is ``COPY coming, line 3, column NAME: "VALUE"``, in the language of the server. Only a name
    that we know is returned, so never the value.
    """
    names = sorted((re.escape(each.name) for each in target_columns(contract)), key=len, reverse=True)
    found = re.search(
        rf"^COPY coming\W+\w*\W*\d+, \w+ ({'|'.join(names)})(?=\W|$)",
        getattr(error.diag, "context", None) or "",
        re.MULTILINE,
    )
    return found and found[1]
