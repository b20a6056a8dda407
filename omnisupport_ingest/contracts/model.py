"""Table contracts as values: ``Column``, ``TableContract`` and ``Contracts``.

They need no Spark, pandera or file access, so every package can use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal

from omnisupport_ingest.contracts.masks import Mask
from omnisupport_ingest.contracts.names import TableName, lake_name, spellings
from omnisupport_ingest.contracts.pg_types import ALWAYS_FITS, PgType, spelling
from omnisupport_ingest.contracts.quality import DEFAULT, NO_QUALITY, Policies, Quality
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn

DEFAULT_ALLOWED_LATENESS = timedelta(hours=1)
DEFAULT_MAX_LATENESS = timedelta(days=7)
"""Defaults for contracts without lateness, and for tables without a contract."""


class ContractError(IngestError):
    """A contract or the definition of a source cannot be used; the message names the file, the place in it
    and what is wrong there.

    Fix: Correct the file; ``omnisupport-ingest contracts validate`` and ``omnisupport-ingest sources
    validate`` check all of them.
    """

    exit_code = 2


ADDITIVE, PINNED, BLOCK = "additive", "pinned", "block"
EVOLUTION = (ADDITIVE, PINNED, BLOCK)
"""What a schema change at the source does: new nullable columns are taken, it is only reported, or the table
waits for a person.
"""


@dataclass(frozen=True, slots=True)
class Default:
    """The value of a column in rows older than the column, as PostgreSQL's text; None for NULL."""

    text: str | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a contract.

    ``pg_type`` is the source's type as the contract writes it (``numeric(12,2)``, ``text[]``).
    ``enum``, ``minimum``, ``maximum``, ``pattern`` and ``max_length`` (in characters) are rules on
    the value; empty or None: no rule. ``personal`` marks personal data; ``pii`` is the policy for it, one of
    ``pii_policies.POLICIES``; ``pii_note`` says why that is right; ``mask`` is how it is masked, if it is.
    ``default``: the value in rows older than the column; None: unknown, so it is unresolved in them.
    ``policies``: what happens to a row that breaks one of the rules. ``former_types``: types that the column
    had before, as ``pg_type``; a value of one of them that the present type cannot hold is kept as its text.
    """

    name: str
    pg_type: str
    nullable: bool = True
    description: str = ""
    pii: str = "keep"
    enum: tuple[str, ...] = ()
    minimum: Decimal | None = None
    maximum: Decimal | None = None
    pattern: str | None = None
    max_length: int | None = None
    personal: bool = False
    pii_note: str = ""
    mask: Mask | None = None
    default: Default | None = None
    policies: Policies = DEFAULT
    former_types: tuple[str, ...] = ()

    @property
    def type(self) -> PgType:
        """``pg_type``, parsed."""
        return PgType.parse(self.pg_type)

    @property
    def always_fits(self) -> bool:
        """Whether the typed column holds every value that passes the rule ``type``."""
        return not self.former_types and self.type.kind in ALWAYS_FITS


@dataclass(frozen=True, slots=True)
class CursorCandidate:
    """A column that may order the versions of a row, or seems to; ``why`` it is ``usable`` or not."""

    column: str
    usable: bool
    why: str


@dataclass(frozen=True, slots=True)
class CursorPolicy:
    """How a table without a log is read: by the column ``field``.

    ``lookback``: how far below the cursor each reading begins: a duration if ``field`` is a time, else a
    number. ``event_time``: the column with the time of a row's change; None: ``field``.
    """

    field: str
    lookback: timedelta | int
    event_time: str | None


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """A PostgreSQL table that follows the current state: ``schema`` and ``table``, reached by the connection
    string in the variable ``connection_env`` or the file ``connection_file``; the other is None.
    """

    connection_env: str | None
    connection_file: str | None
    schema: str
    table: str


@dataclass(frozen=True, slots=True)
class DelayedMerge:
    """How long net changes may wait before they are merged into the dimension, all at once: as long as the
    oldest is younger than ``max_age``, and their keys are fewer than ``max_share`` (0 to 1) of its rows."""

    max_age: timedelta
    max_share: float


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long the layers of a table are kept, counted from the end of a window; None: without end.

    Attributes:
        landing: events of all tables of the source; the table that needs them longest decides.
        raw: the same for raw.
        quarantine: values of the table's withheld events, in windows whose events left raw.
        net_changes: rows in such windows that later rows supersede.
        history: versions, counted from their own end.
        old_files: how long a file of the lake stays after the last version of its table that holds it; None:
            the default.
    """

    landing: timedelta | None = None
    raw: timedelta | None = None
    quarantine: timedelta | None = None
    net_changes: timedelta | None = None
    history: timedelta | None = None
    old_files: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """To whom the personal values of a row belong.

    ``column`` holds the subject. ``name``: the kind of subject (``customer``); tables of a source may share
    it. ``encrypted``: the subject's key encrypts these values before they land; otherwise they land plain.
    """

    name: str
    column: str
    encrypted: bool = True


@dataclass(frozen=True, slots=True)
class KeyEra:
    """Events at this position or above have the columns ``key`` as their key."""

    key: tuple[str, ...]
    epoch: int
    commit_lsn: Lsn
    ordinal: int


PositionRange = tuple[tuple[int, int, int], tuple[int, int, int] | None]
"""Events from one position (epoch, commit LSN, ordinal) on to below another; None: without end."""


@dataclass(frozen=True, slots=True)
class TableContract:
    """What is agreed about one source table: its columns, its key and how its events are judged.

    Attributes:
        name: of the table within its source in the lake (``dim_<name>``).
        schema: of the table at the source.
        table: its name at the source.
        key: the key columns, in the order in which an event's key is written.
        columns: as the lake has them: a policy for personal data may leave a column out or make it text.
        soft_delete_column: if its value is not NULL, the row is deleted.
        allowed_lateness: a window closes this long after its end.
        max_lateness: an event that is later waits for a person.
        path: the contract's file.
        fingerprint: SHA-256 of its canonical JSON without cursor, target, delayed merge, rows per file,
            deletion vectors, retention, evolution, optional columns, history and expectations, which change
            no row of net changes and dimension. Another fingerprint is another contract.
        purge_deleted_after: how long the dimension shows a row after its delete; None: without end.
        cursor: how the table is read if its source has no log; None: it needs a log.
        target: the table of a warehouse that follows the current state; None: none.
        delayed_merge: how long net changes may wait for their merge; None: every run merges at once.
        rows_per_file: about how many rows a file of dimension and history has; None: the default.
        deletion_vectors: updates of the dimension mark replaced rows as deleted instead of rewriting files.
        unprotected: the columns as the source has them; empty if they are the same.
        retention: how long its layers are kept.
        evolution: one of ``EVOLUTION``.
        optional_columns: those that a row may have or lack under ``BLOCK`` (``row_columns``), in the contract
            or not.
        changed_only: events that change nothing make no version of the history.
        verdicts_by: see ``judged_by``; empty if that is the fingerprint.
        quality: rules of several columns, and what is expected of the table.
        subject: whose the personal values of a row are, and whether they land encrypted; None: nobody says,
            and they land plain.
        next_key: the key of the contract's file, by which the table has still to be read (``landed_keys``);
            empty if it has been.
        key_eras: which key events have from where on; empty if it never changed.
        key_era: the number of the era whose events have ``key``; that of no era: none has it yet.
    """

    name: str
    version: str
    source: str
    schema: str
    table: str
    title: str
    description: str
    owner: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    soft_delete_column: str | None
    allowed_lateness: timedelta
    max_lateness: timedelta
    path: str
    fingerprint: str
    purge_deleted_after: timedelta | None = None
    cursor: CursorPolicy | None = None
    target: TargetPolicy | None = None
    delayed_merge: DelayedMerge | None = None
    rows_per_file: int | None = None
    deletion_vectors: bool = False
    unprotected: tuple[Column, ...] = ()
    retention: RetentionPolicy = RetentionPolicy()
    evolution: str = PINNED
    optional_columns: tuple[str, ...] = ()
    changed_only: bool = False
    verdicts_by: str = ""
    quality: Quality = NO_QUALITY
    subject: Subject | None = None
    next_key: tuple[str, ...] = ()
    key_eras: tuple[KeyEra, ...] = ()
    key_era: int = 0

    @property
    def as_captured(self) -> TableContract:
        """The same contract with the key of its file, by which changes are to land."""
        return replace(self, key=self.next_key, next_key=()) if self.next_key else self

    @property
    def key_since(self) -> KeyEra | None:
        """Where events with ``key`` begin; None: at the first event of the table."""
        return self.key_eras[self.key_era] if 0 < self.key_era < len(self.key_eras) else None

    def has_key_at(self, position: tuple[int, int, int]) -> bool:
        """Whether an event at ``position`` (epoch, commit LSN, ordinal) has ``key``."""
        return not any(
            position >= start and (end is None or position < end) for start, end in self.other_keys
        )

    @property
    def other_keys(self) -> tuple[PositionRange, ...]:
        """Where events are not of ``key``: outside of its era."""
        starts = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in self.key_eras]
        if starts and self.key_era >= len(starts):
            return ((starts[0], None),)
        below = [(starts[0], starts[self.key_era])] if self.key_era else []
        return (*below, *((start, None) for start in starts[self.key_era + 1 : self.key_era + 2]))

    @property
    def encrypted_subject(self) -> Subject | None:
        """The subject whose key encrypts personal values before they land; None: they land plain."""
        return self.subject if self.subject is not None and self.subject.encrypted else None

    @property
    def judged_by(self) -> str:
        """Fingerprint of what a verdict on an event of the table may depend on."""
        return self.verdicts_by or self.fingerprint

    @property
    def source_columns(self) -> tuple[Column, ...]:
        """The columns as the source has them, and as events land."""
        return self.unprotected or self.columns

    @property
    def table_name(self) -> TableName:
        """Schema and table, as the source has them."""
        return self.schema, self.table

    @property
    def full_name(self) -> str:
        """The table as the source calls it: ``schema.table``."""
        return f"{self.schema}.{self.table}"

    @property
    def merged_at_once(self) -> TableContract:
        """The same contract without the delay of its merges."""
        return self if self.delayed_merge is None else replace(self, delayed_merge=None)

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def personal(self) -> frozenset[str]:
        """The columns with personal data, without those of the key: rows are always found by these."""
        return frozenset(column.name for column in self.columns if column.personal).difference(self.key)

    @property
    def personal_key(self) -> bool:
        """Whether the key has a column with personal data."""
        return any(column.personal for column in self.columns if column.name in self.key)

    def column(self, name: str) -> Column:
        """Return the column called ``name``. Raises ``KeyError`` if the contract has none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


class UnknownTable(IngestError):
    """No contract has the name of the table, or several do.

    Fix: Name one of the tables that the message lists.
    """

    exit_code = 2


def table_named(text: str, among: Sequence[TableContract]) -> TableContract:
    """Return the contract in ``among`` of the table that a person calls ``text``. Raises ``UnknownTable``.

    ``text``: the name in the lake, alone or with its source, or the name at the source, alone or with its
    schema, quoted or not. Case counts, unless nothing matches with it.
    """
    found = tables_named(text, among)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.source}.{each.name} ({each.full_name})" for each in found)
        raise UnknownTable(f"{text!r} may be one of several tables.", fix=f"Name one of: {names}.")
    names = ", ".join(f"{each.source}.{each.name}" for each in among)
    raise UnknownTable(f"{text!r} is the name of no table with a contract.", fix=f"Name one of: {names}.")


def tables_named(text: str, among: Sequence[TableContract]) -> list[TableContract]:
    """Return the contracts in ``among`` that ``text`` fits best, as ``table_named`` says; none if it fits
    none.
    """
    for lower in (False, True):
        for forms in (_lake_spellings, _source_spellings):
            found = [
                each
                for each in among
                if (text.lower() in {form.lower() for form in forms(each)} if lower else text in forms(each))
            ]
            if found:
                return found
    return []


def _lake_spellings(contract: TableContract) -> set[str]:
    return {contract.name, f"{contract.source}.{contract.name}"}


def _source_spellings(contract: TableContract) -> set[str]:
    return spellings(contract.table_name)


def _require_subjects_alike(contracts: Iterable[TableContract]) -> None:
    """Raise ``ContractError`` if two tables of a source share a subject that their columns may spell
    differently: it would have two keys, and an erasure would destroy one of them."""
    first: dict[tuple[str, str], TableContract] = {}
    for contract in contracts:
        if contract.subject is None:
            continue
        other = first.setdefault((contract.source, contract.subject.name), contract)
        if spelling(_subject_type(other)) != spelling(_subject_type(contract)):
            raise ContractError(
                f"{other.path} ({other.full_name}, {_subject_type(other)}) and {contract.path} "
                f"({contract.full_name}, {_subject_type(contract)}) share the subject "
                f"{contract.subject.name!r}, and the types of their columns write values differently: one "
                "subject would have two keys.",
                fix="Give both columns one type (x-pg-type), as the source does; or give one of the tables "
                "another x-cdc.at_rest.subject.",
            )


def _subject_type(contract: TableContract) -> str:
    assert contract.subject is not None, "a table without a subject shares none"
    column = contract.subject.column
    return next(each.pg_type for each in contract.source_columns if each.name == column)


@dataclass(frozen=True)
class Contracts:
    """All contracts of one folder, at most one per source table; iterates by source and name."""

    all: tuple[TableContract, ...]
    _by_table: dict[tuple[str, str, str], TableContract] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.all, key=lambda contract: (contract.source, contract.name)))
        by_name: dict[tuple[str, str], TableContract] = {}
        by_table: dict[tuple[str, str, str], TableContract] = {}
        for contract in ordered:
            other = by_table.setdefault((contract.source, contract.schema, contract.table), contract)
            if other is not contract:
                raise ContractError(
                    f"{other.path} and {contract.path} are both contracts for {contract.full_name} of the "
                    f"source {contract.source!r}.",
                    fix="Keep one of the two files; a table has one contract.",
                )
            # Lake folders and Dagster keys carry source and name alone, without the schema, and file
            # systems may ignore case.
            other = by_name.setdefault((contract.source, contract.name.lower()), contract)
            if other is not contract:
                raise ContractError(
                    f"{other.path} ({other.full_name}) and {contract.path} ({contract.full_name}) both call "
                    f"their table {contract.name!r} in the lake of the source {contract.source!r}.",
                    fix=f"Give one of the two another x-cdc.name, such as "
                    f"{lake_name(f'{contract.schema}_{contract.table}')}.",
                )
        _require_subjects_alike(ordered)
        object.__setattr__(self, "all", ordered)
        object.__setattr__(self, "_by_table", by_table)

    def __iter__(self) -> Iterator[TableContract]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def sources(self) -> tuple[str, ...]:
        """Return the names of the sources that have contracts, sorted."""
        return tuple(sorted({contract.source for contract in self.all}))

    def of_source(self, source: str) -> tuple[TableContract, ...]:
        """Return the contracts of ``source``, sorted by name; empty for an unknown source."""
        return tuple(contract for contract in self.all if contract.source == source)

    def find(self, source: str, schema: str, table: str) -> TableContract | None:
        """Return the contract of one source table; None if it has none."""
        return self._by_table.get((source, schema, table))
