"""Finds running captures whose definition or contracts have changed since they started.

A capture reads both when it starts. Its record keeps the connection, slot and publication of its definition,
and a fingerprint of the parts of each contract that capture uses. Every difference from today's files is
shown with the command that applies it. A changed rule is no difference here, because runs read the contracts
anew. ``added_tables`` handles new contracts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.sources import (
    SourceDefinition,
    SourceKind,
    log_settings,
    sources_in_force,
)
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecord, CaptureRecords
from omnisupport_ingest.sources.postgres.session.connection import dsn_parts
from omnisupport_ingest.sources.postgres.session.errors import BadDsn
from omnisupport_ingest.sources.postgres.session.lease import lease_holder

_EMBEDDED = "the embedded PostgreSQL"
_CONNECTION_PARTS = ("host", "hostaddr", "port", "dbname", "user")
_RESTART_UP = "Stop `omnisupport-ingest up` and start it again."


@dataclass(frozen=True, slots=True)
class ContractDrift:
    """A change of ``source`` that its running capture does not use yet: ``what`` changed, and the ``fix``."""

    source: str
    what: str
    fix: str


def definition_at_start(settings: Settings) -> dict[str, str]:
    """Return what a capture uses of its definition, by member, without a password.

    Empty if the connection string cannot be read, because no capture can use it.
    """
    server = _EMBEDDED
    if settings.source_dsn is not None:
        try:
            parts = dsn_parts(settings.source_dsn.get_secret_value())
        except BadDsn:
            return {}
        server = " ".join(f"{name}={parts[name]}" for name in _CONNECTION_PARTS if name in parts)
    return {
        "connection": server,
        "log.slot": settings.slot,
        "log.publication": settings.publication,
        "log.snapshot_mode": settings.snapshot_mode.value,
    }


def contracts_at_start(tables: Sequence[TableContract]) -> dict[str, str]:
    """Return contract name → fingerprint of the parts of its file that capture uses.

    A file that is gone or cannot be read has no fingerprint.
    """
    fingerprints = {}
    for each in tables:
        fingerprint = _fingerprint(each)
        if fingerprint is not None:
            fingerprints[each.name] = fingerprint
    return fingerprints


def differences(settings: Settings, contracts: Contracts) -> tuple[ContractDrift, ...]:
    """Return how the files of every log of the home differ from those at the start of its capture."""
    home = settings.home
    known = {each.name: each for each in sources_in_force(settings, contracts).all}
    differing: list[ContractDrift] = []
    for path in sorted((home / "landing").glob("*/")):
        record = _running(home / "run", path)
        if record is not None:
            differing += _source_differences(settings, contracts, known.get(path.name), path.name, record)
    return tuple(differing)


def outdated_tables(home: Path, source: str, tables: Sequence[TableContract]) -> tuple[TableContract, ...]:
    """Return those of ``tables`` whose file has changed since the capture of ``source`` that runs now began.

    ``home``: its folder. Empty if none runs.
    """
    record = _running(home / "run", home / "landing" / source)
    if record is None:
        return ()
    now = contracts_at_start(tables)
    return tuple(
        each
        for each in tables
        if each.name in now and record.contracts.get(each.name, now[each.name]) != now[each.name]
    )


def _running(run_folder: Path, landing: Path) -> CaptureRecord | None:
    """Return the record of the capture that follows the source of ``landing`` now; None if there is none."""
    record, holder = CaptureRecords(landing).read(), lease_holder(run_folder, landing.name)
    if record is None or holder is None or holder.pid != record.pid:
        return None
    return record if record.ended is None and record.follows else None


def _source_differences(
    settings: Settings,
    contracts: Contracts,
    definition: SourceDefinition | None,
    name: str,
    record: CaptureRecord,
) -> Iterator[ContractDrift]:
    tables = contracts.of_source(name)
    if definition is None or definition.kind is not SourceKind.LOG or not tables:
        gone = "definition" if tables else "last contract"
        yield ContractDrift(
            name,
            f"its {gone} is gone, and its capture (process {record.pid}) goes on until `up` starts again",
            _RESTART_UP,
        )
        return
    yield from _definition_differences(settings, definition, record)
    now = contracts_at_start(tables)
    restart = f"omnisupport-ingest source restart {name}"
    for contract, fingerprint in record.contracts.items():
        if contract not in {each.name for each in tables}:
            problem = f"the contract {contract} is gone, and its table is still captured"
            yield ContractDrift(name, problem, restart)
        elif now.get(contract, fingerprint) != fingerprint:
            problem = f"the contract {contract} has changed, and its capture goes by what it was at its start"
            yield ContractDrift(name, problem, restart)


def _definition_differences(
    settings: Settings, definition: SourceDefinition, record: CaptureRecord
) -> Iterator[ContractDrift]:
    try:
        now = definition_at_start(log_settings(settings, definition))
    except IngestError:
        # `sources validate` and the status of the source report what is wrong with it.
        return
    for member, value in record.definition.items():
        if now.get(member, value) != value:
            yield ContractDrift(
                definition.name,
                f"{member} is now {now[member]}, and its capture goes by {value} until `up` starts again",
                _RESTART_UP,
            )


def _fingerprint(contract: TableContract) -> str | None:
    try:
        # Without columns learned since, because capture itself has learned them.
        loaded = load_contract(Path(contract.path))
    except (IngestError, OSError):
        return None
    columns = [[each.name, each.pg_type, each.nullable, each.personal] for each in loaded.source_columns]
    by = [loaded.name, loaded.schema, loaded.table, loaded.key, loaded.evolution, columns]
    return hashlib.sha256(json.dumps(by, ensure_ascii=False).encode()).hexdigest()
