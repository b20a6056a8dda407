"""The contracts, decision table and source name that are in force for a home.

A home records them in ``in_force.json`` when it is opened for writing. Once anything has landed, the record
counts wherever a command is started; before that, the working directory decides. Other contracts or another
decision table are refused until `contracts use` names them.

A path is recorded relative to the home if both are in one project folder, so that the folder can be moved.
Files that come with the program are recorded as ``packaged``, as their path differs between installations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_other
from functools import partial
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.decision_table import (
    DecisionTable,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.erased_subjects import FILE, names_once_erased
from omnisupport_ingest.contracts.landed_keys import by_landed_keys
from omnisupport_ingest.contracts.learned import with_learned
from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts
from omnisupport_ingest.contracts.model import ContractError, Contracts, TableContract
from omnisupport_ingest.contracts.names import lake_name
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.home import Home, HomeMismatch
from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest.storage import has_landed
from omnisupport_ingest.windows import WindowSize, WindowSizeRefused

PACKAGED = "packaged"
"""Recorded instead of the path of a packaged file; after a colon, the path within the package if it
differs.
"""

RECORD = "in_force.json"

KEPT = "documents"
KEPT_CONTRACTS, KEPT_DECISIONS = "contracts", "decision_table.csv"
"""Folder of the home with copies of documents, and what lies in each copy; see ``contracts/kept.py``."""

_CONTRACTS, _DECISIONS = "contracts/data", "reports/week03/late_arrival_decision_table.csv"
_OPTION = "--decision-table "
_NAMED = 3
"""Tables that a message names."""


@dataclass(frozen=True, slots=True)
class InForce:
    """Contracts and decision table in force, as absolute paths.

    ``tables``: those of the contracts when they were recorded, as ``source:schema.table``; empty if nothing
    is recorded yet. ``source``: the name of the captured source; None if the home has only had the embedded
    one under its usual name.
    """

    contracts: Path
    decision_table: Path
    tables: frozenset[str] = field(default=frozenset())
    source: str | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of the file. Paths are relative to the home, absolute, or ``PACKAGED``."""

    contracts: str
    decision_table: str
    tables: tuple[str, ...]
    source: str | None = None


@dataclass(frozen=True, slots=True)
class _Marker:
    """The part of ``home.json`` that settings take over."""

    window: str


def settings_of_home(settings: Settings) -> Settings:
    """Return ``settings`` with window size and source of the home, where the settings do not give them.

    The source of a new home is named after a configured database. A home that is missing or unreadable
    changes nothing here; opening it raises the error.
    """
    found: dict[str, Any] = {}
    home = _home_of(settings)
    if "window" not in settings.model_fields_set:
        # If the home is unreadable, opening it raises the error: do not report a setting that nobody made.
        with suppress(OSError, Unreadable, WindowSizeRefused):
            found["window"] = str(WindowSize.parse(read_note(_Marker, home / "home.json").window))
    if "source" not in settings.model_fields_set:
        found["source"] = _source_of(settings, home)
    return Settings.model_validate({**settings.model_dump(exclude_unset=True), **found})


def recorded(settings: Settings) -> InForce | None:
    """Return the record that binds the home of ``settings``; None without one. Raises ``HomeMismatch`` if
    it is unreadable."""
    return _binding(_home_of(settings))


def in_force(settings: Settings) -> InForce:
    """Return the record of the home of ``settings``; without one, what settings and working directory name.

    Raises ``HomeMismatch`` if a setting names other contracts or another decision table than the home has.
    """
    home = _home_of(settings)
    record = _binding(home)
    if record is None:
        return of_new_home(settings)
    if settings.contracts_dir is not None and settings.contracts_dir.is_relative_to(home / KEPT):
        copy = settings.contracts_dir.parent
        return with_other(record, contracts=copy / KEPT_CONTRACTS, decision_table=copy / KEPT_DECISIONS)
    for what, setting, asked, has, option in (
        ("contracts", "CONTRACTS_DIR", settings.contracts_dir, record.contracts, ""),
        ("decision table", "DECISION_TABLE", settings.decision_table, record.decision_table, _OPTION),
    ):
        if asked is not None and not _same(asked, has):
            raise HomeMismatch(
                f"{home} has its {what} in {has}, but {PREFIX}{setting} is {_absolute(asked)}.",
                fix=f"Leave {PREFIX}{setting} out. To let the home have the other from now on: "
                f"omnisupport-ingest contracts use {option}{_absolute(asked)}",
            )
    return record


def of_new_home(settings: Settings) -> InForce:
    """Return what a home gets that has no record: what settings and working directory name, else files of the
    program."""
    embedded = settings.source if settings.source_dsn is None else None
    return InForce(
        _absolute(settings.contracts_dir or default_contracts_dir(embedded)),
        _absolute(settings.decision_table or default_decision_table()),
    )


def contracts_in_force(settings: Settings) -> Contracts:
    """Return the contracts of the home. Raises ``IngestError`` if they are missing, not its own, or one is
    wrong."""
    chosen = in_force(settings)
    if chosen.tables:
        _require_there(settings, "contracts", chosen.contracts, "FOLDER")
    home = _home_of(settings)
    contracts = by_landed_keys(home, load_contracts(chosen.contracts, partial(with_learned, home)))
    if chosen.tables and not chosen.tables & _tables(contracts):
        named = ", ".join(sorted(chosen.tables)[:_NAMED])
        more = len(chosen.tables) - _NAMED
        raise HomeMismatch(
            f"The contracts in {chosen.contracts} name none of the tables that {_home_of(settings)} has: "
            f"{named}{f' and {more} more' if more > 0 else ''}.",
            fix="Name the folder of its contracts, or this one if it is meant: omnisupport-ingest contracts "
            f"use {chosen.contracts}",
        )
    refuse_other_subjects(settings, contracts)
    return contracts


def refuse_other_subjects(settings: Settings, contracts: Iterable[TableContract]) -> None:
    """Raise ``ContractError`` if one of ``contracts`` gives erased subjects of the home another name or none,
    or lets land plain what landed encrypted: what comes of them again would be readable."""
    names = names_once_erased(_home_of(settings) / FILE)
    for each in contracts:
        erased, subject = names.get((each.source, each.full_name)), each.subject
        if erased is None or (
            subject is not None and subject.name == erased.name and subject.encrypted >= erased.encrypted
        ):
            continue
        now = f"belong to the subject {subject.name!r}" if subject is not None else "are of nobody"
        if erased.encrypted and (subject is None or not subject.encrypted):
            now = "land plain"
        form, again = ("encrypted", "land readable") if erased.encrypted else ("plain", "be readable again")
        raise ContractError(
            f"By {each.path}, personal values of {each.full_name} {now}. Subjects called {erased.name!r} "
            f"were erased by erase --subject: what the source still sends of them would {again}.",
            fix=f'Write "pii": "{form}" and "subject": "{erased.name}" in x-cdc.at_rest.',
        )


def contracts_so_far(settings: Settings) -> Contracts:
    """Return the contracts of the home as ``contracts_in_force`` does, or none if their folder exists and
    none was in force yet: the first ones are still to be written."""
    chosen = in_force(settings)
    if not chosen.tables and chosen.contracts.is_dir() and not any(chosen.contracts.glob("*.json")):
        return Contracts(())
    return contracts_in_force(settings)


def contracts_gone(settings: Settings, contracts: Contracts) -> list[dict[str, str]]:
    """Return each table that had a contract when the home recorded its contracts, and has none in
    ``contracts``: ``what`` is wrong and the ``fix``, for a person.

    Withdrawing a table records the contracts again, so somebody removed these files by hand.
    """
    chosen = in_force(settings)
    return [
        {
            "source": source,
            "table": table,
            "what": f"the contract of {table} of {source} is not in {chosen.contracts} any more",
            "fix": "put the file back, and have the table read again if its log was captured meanwhile "
            f"(omnisupport-ingest source snapshot {table}); if it is to go, then omnisupport-ingest "
            f"contracts withdraw {table}, which says first what becomes of its tables",
        }
        for source, _, table in (each.partition(":") for each in sorted(chosen.tables - _tables(contracts)))
    ]


def decisions_in_force(settings: Settings) -> DecisionTable:
    """Return the decision table of the home. Raises ``IngestError`` if it is missing or refused."""
    chosen = in_force(settings)
    if chosen.tables:
        _require_there(settings, "decision table", chosen.decision_table, f"{_OPTION}FILE")
    return load_decision_table(chosen.decision_table)


def record_in_force(settings: Settings, home: Home) -> None:
    """Record what is in force, unless a record binds ``home`` already.

    If the home gets a configured source, the record gets its name.
    """
    usual = settings.source_dsn is None and settings.source == Settings.model_fields["source"].default
    source = None if usual else settings.source
    there = _binding(home.path)
    if there is None:
        chosen = in_force(settings)
        made = with_other(chosen, tables=_tables(load_contracts(chosen.contracts)), source=source)
        load_decision_table(made.decision_table)
        if _read(home.path) != made:
            put_in_force(made, home)
    elif there.source is None and source is not None:
        put_in_force(with_other(there, source=source), home)


def proposed(settings: Settings, home: Home, contracts: str | None, decision_table: str | None) -> InForce:
    """Return what ``home`` would have in force with other contracts or another decision table; None keeps the
    present one. ``put_in_force`` records it.

    Each is a path, or ``packaged``. Raises ``IngestError`` if it cannot be read.
    """
    has = _read(home.path) or in_force(settings)
    chosen = with_other(
        has,
        contracts=_chosen(contracts, _CONTRACTS) or has.contracts,
        decision_table=_chosen(decision_table, _DECISIONS) or has.decision_table,
    )
    load_decision_table(chosen.decision_table)
    found = load_contracts(chosen.contracts)
    refuse_other_subjects(settings, found)
    return with_other(chosen, tables=_tables(found))


def tables_left(home: Home, chosen: InForce) -> list[str]:
    """Return the tables of ``home`` that have contracts now and none in ``chosen``, of the sources that have
    landed, as ``source:schema.table``."""
    has = _read(home.path)
    left = has.tables - chosen.tables if has is not None else frozenset()
    return sorted(each for each in left if has_landed(home.path, each.partition(":")[0]))


def use(settings: Settings, home: Home, contracts: str | None, decision_table: str | None) -> InForce:
    """Put in force and return what ``proposed`` returns. Where it raises, nothing is changed."""
    chosen = proposed(settings, home, contracts, decision_table)
    put_in_force(chosen, home)
    return chosen


def put_in_force(chosen: InForce, home: Home) -> None:
    """Record ``chosen`` as what is in force for ``home``."""
    with failpoint("home.in_force"):
        replace(home.path / RECORD, _document(chosen, home.path))


def _document(chosen: InForce, home: Path) -> bytes:
    record = _Record(
        _recorded(chosen.contracts, program_file(_CONTRACTS), home),
        _recorded(chosen.decision_table, program_file(_DECISIONS), home),
        tuple(sorted(chosen.tables)),
        chosen.source,
    )
    return encode(record)


def _recorded(path: Path, packaged: Path, home: Path) -> str:
    package = Path(__file__).resolve().parents[1]
    if path.is_relative_to(home.parent) and not path.resolve().is_relative_to(package):
        return os.path.relpath(path, home)
    if _same(path, packaged):
        return PACKAGED
    installed = package / "packaged"
    return f"{PACKAGED}:{path.relative_to(installed)}" if path.is_relative_to(installed) else str(path)


def _binding(home: Path) -> InForce | None:
    """Return the record of a home in which an epoch has begun, else None. One begins before the first batch
    lands."""
    return _read(home) if _has_epochs(home) else None


def _has_epochs(home: Path) -> bool:
    return any((home / "landing").glob("*/epochs/*.json"))


def _read(home: Path) -> InForce | None:
    file = home / RECORD
    try:
        record = read_note(_Record, file)
        if not record.tables:
            raise FieldProblem("tables", "names no table")
    except FileNotFoundError:
        return None
    except (OSError, Unreadable) as error:
        raise HomeMismatch(
            f"{file} cannot be read: {error}.",
            fix="Restore it from a backup. Or remove it, and open the home once in the folder of its "
            "contracts: omnisupport-ingest up",
        ) from error
    return InForce(
        _from_record(record.contracts, _CONTRACTS, home),
        _from_record(record.decision_table, _DECISIONS, home),
        frozenset(record.tables),
        record.source,
    )


def _from_record(text: str, packaged: str, home: Path) -> Path:
    if text == PACKAGED:
        return program_file(packaged)
    of_ours, _, other = text.partition(":")
    return program_file(other) if of_ours == PACKAGED and other else _absolute(home / text)


def _chosen(text: str | None, packaged: str) -> Path | None:
    if text is None:
        return None
    return program_file(packaged) if text == PACKAGED else _absolute(Path(text))


def _require_there(settings: Settings, what: str, path: Path, named: str) -> None:
    if not path.exists():
        raise HomeMismatch(
            f"{_home_of(settings)} has its {what} in {path}, which is not there.",
            fix="Put it back, or say where it is now: omnisupport-ingest contracts use " + named,
        )


def _tables(contracts: Contracts) -> frozenset[str]:
    return frozenset(f"{each.source}:{each.full_name}" for each in contracts)


def _source_of(settings: Settings, home: Path) -> str:
    try:
        record = _read(home)
    except IngestError:
        return settings.source
    in_use = _has_epochs(home)
    if in_use and record is not None and record.source is not None:
        return record.source
    # A home that is only just being made has no record yet either: the services that start with it must all
    # take the name of the database.
    made_before = record is None and in_use
    if settings.source_dsn is None or made_before:
        return settings.source
    return _name_of_database(settings.source_dsn.get_secret_value())


def _name_of_database(dsn: str) -> str:
    """Return the database of ``dsn`` as a plain name; without one, the user, as libpq does."""
    import psycopg2
    from psycopg2.extensions import parse_dsn

    try:
        parts = parse_dsn(dsn)
    except psycopg2.Error:
        parts = {}
    name = str(parts.get("dbname") or parts.get("user") or parts.get("service") or "database")
    return lake_name(f"db_{name}" if name[0].isdigit() else name)


def _home_of(settings: Settings) -> Path:
    return settings.home.absolute()


def _absolute(path: Path) -> Path:
    # Links are not resolved: their targets may change, and people know their names.
    return Path(os.path.normpath(path.expanduser().absolute()))


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
