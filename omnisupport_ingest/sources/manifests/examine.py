"""Examines a delivery before anything of it lands: lists each fault by file and line, and what follows from
it.

It reads everything once. So a delivery that a gate rejects is rejected before the first row lands, and a dry
run reports exactly what landing would do.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import printable, shortened
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.formats import (
    FileUnreadable,
    Record,
    Row,
    columns_of,
    digests,
    records,
)
from omnisupport_ingest.sources.manifests.policies import BACKFILL, INCREMENTAL, QUARANTINE, REJECT
from omnisupport_ingest.sources.manifests.seed_manifest import SeedFile, SeedManifest
from omnisupport_ingest.sources.query.cursor import CursorColumn
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.shown_columns import ShownColumn
from omnisupport_ingest.windows import without_sentinel

MOST_REPORTED = 1000
"""Number of faults that are listed; all are counted."""


class SeedRefused(IngestError):
    """A delivery is not what its seed manifest describes, or cannot land. Nothing of it landed.

    Fix: Correct the file or the manifest where the message says, and deliver again.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a delivery and the policy for it.

    ``line``: None if the fault concerns a whole file. ``file``: empty if it concerns the whole delivery.
    ``problem`` and ``fix`` are sentences that quote no value.
    """

    kind: str
    action: str
    file: str
    line: int | None
    problem: str
    fix: str

    @property
    def where(self) -> str:
        """File and line, for people."""
        return self.file if self.line is None else f"{self.file}, line {self.line}"

    def refusal(self) -> SeedRefused:
        """Return the fault as an error."""
        location = f"{self.where}: " if self.file else ""
        return SeedRefused(f"{location}{self.problem} (gate {self.kind}: {self.action}).", fix=self.fix)


@dataclass(frozen=True, slots=True)
class ExaminedFile:
    """A file that can be read. ``content``: SHA-256 of its unpacked content. ``rows``: its number of records.

    ``waits``: the gate that keeps all of its rows in quarantine; None if none does. ``waiting``: a mark of
    which rows will wait in quarantine by which gate; empty if all land. ``columns``: those that the file
    names for all of its rows; None if each row names its own. ``more``: columns of rows that the contract
    does not name.
    """

    file: SeedFile
    content: str
    rows: int
    waits: str | None = None
    waiting: str = ""
    columns: tuple[ShownColumn, ...] | None = None
    more: tuple[str, ...] = ()

    def lacking(self, contract: TableContract) -> list[str] | None:
        """Return the columns of ``contract`` that the file does not have, so that nothing is known of them;
        None if there is none, or each row names its own."""
        if self.columns is None:
            return None
        names = {each.name for each in self.columns}
        return sorted(each.name for each in contract.source_columns if each.name not in names) or None


@dataclass
class Examined:
    """The result of examining a delivery.

    ``faults``: the first ones, at most ``MOST_REPORTED``. ``counts``: all faults, by kind and policy.
    ``kept_out``: number of rows that a gate will keep in quarantine. ``whole``: the key of every row is
    known. ``batches``: number of batches that the delivery becomes.
    """

    files: list[ExaminedFile] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept_out: int = 0
    whole: bool = True
    batches: int = 0
    first_rejected: Fault | None = None

    def note(self, fault: Fault) -> None:
        """Add ``fault``."""
        self.counts[fault.kind, fault.action] += 1
        if fault.action == REJECT and self.first_rejected is None:
            self.first_rejected = fault
        if len(self.faults) < MOST_REPORTED:
            self.faults.append(fault)

    def refuse_rejected(self) -> None:
        """Raise ``SeedRefused`` for the first fault that a gate rejects, if there is one."""
        if self.first_rejected is not None:
            raise self.first_rejected.refusal()

    @property
    def rows(self) -> int:
        """Number of records in all files that can be read."""
        return sum(each.rows for each in self.files)


class RowGates:
    """Applies the gates of ``seed`` that concern single rows."""

    def __init__(self, seed: SeedManifest) -> None:
        self._gates, self._contract = seed.gates, seed.contract
        self._known = frozenset(column.name for column in seed.contract.source_columns)
        self._required = tuple(each.name for each in seed.contract.source_columns if not each.nullable)
        self._rules = RowRules(seed.contract)
        by_cursor = seed.load_mode in (INCREMENTAL, BACKFILL)
        self._cursor = CursorColumn.of(seed.contract) if by_cursor else None

    def faults(self, record: Record) -> list[tuple[str, str, str]]:
        """Return the faults of ``record``: kind, problem, fix."""
        faults = self._of_form(record)
        if record.row is not None:
            broken = self._rules.broken(record.row)
            if self._rules.withheld(broken):
                faults.append(("row", f"breaks {', '.join(broken)}", "Correct the row at its owner's."))
        return faults

    def kept_out_by(self, record: Record) -> str | None:
        """Return the gate that keeps ``record`` in quarantine before it is judged; None if none does."""
        for kind, _, _ in self._of_form(record):
            if self._gates.action(kind) == QUARANTINE:
                return kind
        return None

    def has_position(self, row: Row) -> bool:
        """Whether ``row`` has a position: its cursor can be read, or the contract names none."""
        return self._cursor is None or cursor_number(self._cursor, row) is not None

    def _of_form(self, record: Record) -> list[tuple[str, str, str]]:
        if record.row is None:
            return [("schema", str(record.fault), "Correct the line, then sha256 in the manifest.")]
        faults = []
        if lacks := [name for name in self._required if name not in record.row]:
            faults.append(
                (
                    "schema",
                    f"the file has no column {lacks[0]!r}, and {self._contract.path} requires it",
                    "Deliver the column, or take it out of required in the contract.",
                )
            )
        if self._cursor is not None and cursor_number(self._cursor, record.row) is None:
            faults.append(
                (
                    "schema",
                    f"the cursor column {self._cursor.name!r} has no value that orders the row",
                    "Give every row its cursor, then correct sha256 in the manifest.",
                )
            )
        if not self._known.issuperset(record.row):
            unknown = sorted(record.row.keys() - self._known)[0]
            faults.append(
                (
                    "unknown_column",
                    f"{self._contract.path} does not name the column {unknown!r}",
                    "Add the column to the contract, or accept unknown columns.",
                )
            )
        return faults


def cursor_number(cursor: CursorColumn, row: Row) -> int | None:
    """Return the cursor of ``row`` as a number; None if it is missing or cannot be read."""
    try:
        number: int | None = cursor.numbers(pa.array([row.get(cursor.name)], pa.string()))[0].as_py()
    except QueryRefused:
        return None
    return number


def examine(seed: SeedManifest, licenses: Collection[str] = ()) -> Examined:
    """Examine the rows of ``seed``. ``licenses``: those that its source accepts; empty: any licence."""
    examined, gates = Examined(), RowGates(seed)
    check_license(seed, licenses, examined)
    for file in seed.files:
        examined_file = _examine_file(seed, file, gates, examined)
        if examined_file is not None:
            examined.files.append(examined_file)
    return examined


def check_license(seed: SeedManifest, licenses: Collection[str], examined: Examined) -> None:
    """Note in ``examined`` if the licence of ``seed`` is none of ``licenses``."""
    if licenses and seed.license not in licenses:
        examined.note(
            Fault(
                "license",
                seed.gates.license,
                "",
                None,
                f"{seed.path} at $.license: {seed.license} is none of those that "
                f"{seed.contract.source} takes: {', '.join(sorted(licenses))}",
                "Ask the owner for another licence, or add it to licenses in the source's definition.",
            )
        )


def note_missing(seed: SeedManifest, file: SeedFile, why: FileUnreadable, examined: Examined) -> None:
    """Note in ``examined`` that ``file`` is missing, or not whole."""
    examined.whole = False
    examined.note(
        Fault(
            "missing_file",
            seed.gates.missing_file,
            printable(file.path),
            None,
            f"named by {seed.path}, it cannot be read: {why}",
            why.fix or "Put the file there, or correct the path; it is relative to the manifest.",
        )
    )


def check_file(seed: SeedManifest, file: SeedFile, sha256: str, rows: int, examined: Examined) -> str | None:
    """Note in ``examined`` where ``file`` is not as described. Returns the gate that keeps all its rows in
    quarantine; None if none does."""
    conditions = {
        "checksum": (
            sha256 != file.sha256,
            f"is not the file that {seed.path} describes: its SHA-256 is {sha256}, not {file.sha256}",
            "Get the file again from its owner, or correct sha256 if the new file is meant.",
        ),
        "row_count": (
            rows != file.rows,
            f"has {rows} rows; {seed.path} says {file.rows}",
            "Ask the owner which is right, then correct the file or the manifest.",
        ),
    }
    waits = None
    for kind, (is_so, problem, fix) in conditions.items():
        if is_so:
            action = seed.gates.action(kind)
            examined.note(Fault(kind, action, printable(file.path), None, problem, fix))
            waits = waits or (kind if action == QUARANTINE else None)
    return waits


def windows_of_batches(seed: SeedManifest, store: LandingStore) -> tuple[list[str], list[Fault]]:
    """Return the windows that the batches of a replay reached, and a fault for each batch that has not
    landed.

    Raises ``SeedRefused`` if the gate ``missing_file`` rejects such a fault, or if none of the batches has
    landed.
    """
    assert seed.replay is not None
    examined, windows = Examined(), set[str]()
    for number, name in enumerate(seed.replay.batches):
        if store.exists(name):
            windows.update(without_sentinel(store.read(name).windows))
            continue
        problem = f"at $.replay.batches[{number}]: {store.source} has no batch {shortened(name)}"
        fix = "Correct the name: omnisupport-ingest landing list"
        examined.note(Fault("missing_file", seed.gates.missing_file, str(seed.path), None, problem, fix))
    examined.refuse_rejected()
    if not windows:
        raise SeedRefused(f"No batch of {seed.path} has a window.", fix="Name batches, or windows.")
    return sorted(windows), examined.faults


def _examine_file(
    seed: SeedManifest, file: SeedFile, gates: RowGates, examined: Examined
) -> ExaminedFile | None:
    waiting, kept_out, rows = hashlib.sha256(), 0, 0
    path, more = printable(file.path), dict[str, None]()
    contracted = frozenset(column.name for column in seed.contract.source_columns)
    try:
        known, columns = digests(file.path), columns_of(file.path)
        for record in records(file.path, seed.contract):
            rows += 1
            if record.row is not None and not contracted.issuperset(record.row):
                more.update(dict.fromkeys(name for name in record.row if name not in contracted))
            for kind, problem, fix in gates.faults(record):
                examined.note(Fault(kind, seed.gates.action(kind), path, record.number, problem, fix))
            if kind_kept := gates.kept_out_by(record):
                waiting.update(f"{record.number} {kind_kept}\n".encode())
                kept_out += 1
            examined.whole &= record.row is not None
    except FileUnreadable as why:
        note_missing(seed, file, why, examined)
        return None
    waits = check_file(seed, file, known.file, rows, examined)
    # If the whole file waits in quarantine, rows missing from it prove nothing: no row may be ended.
    examined.whole &= waits is None
    examined.kept_out += rows if waits else kept_out
    marks: Iterable[str] = ([waits] if waits else []) + ([waiting.hexdigest()] if kept_out else [])
    return ExaminedFile(file, known.content, rows, waits, " ".join(marks), columns, tuple(more))
