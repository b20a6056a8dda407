"""What a running capture works by, held against its files: a capture reads them when it starts.

The record of its start keeps the connection, slot and publication that its definition gave it, and a
fingerprint of each contract's part that capture goes by. A difference from the files of now is shown with the
command that takes them in. What judges and folds reads the contracts anew in each run, so a changed rule is
no difference here; a contract that is new has a way of its own (``added_tables``).
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
_WHERE = ("host", "hostaddr", "port", "dbname", "user")
_ANEW = "Stop `omnisupport-ingest up` and start it again."


@dataclass(frozen=True, slots=True)
class Difference:
    """Something of ``source`` that a running capture does not go by yet: ``what``, and the ``fix``."""

    source: str
    what: str
    fix: str


def definition_in_use(settings: Settings) -> dict[str, str]:
    """What the definition of a log says to its capture, by member, without a password; nothing of one whose
    connection string cannot be read, which no capture works by."""
    server = _EMBEDDED
    if settings.source_dsn is not None:
        try:
            parts = dsn_parts(settings.source_dsn.get_secret_value())
        except BadDsn:
            return {}
        server = " ".join(f"{name}={parts[name]}" for name in _WHERE if name in parts)
    return {
        "connection": server,
        "log.slot": settings.slot,
        "log.publication": settings.publication,
        "log.snapshot_mode": settings.snapshot_mode.value,
    }


def contracts_in_use(tables: Sequence[TableContract]) -> dict[str, str]:
    """Contract name → fingerprint of what capture goes by, as the file says it; none of a file that is gone
    or cannot be read."""
    fingerprints = {}
    for each in tables:
        print_of = _fingerprint(each)
        if print_of is not None:
            fingerprints[each.name] = print_of
    return fingerprints


def differences(settings: Settings, contracts: Contracts) -> tuple[Difference, ...]:
    """How the files of every log of the home differ from what its running capture began with."""
    home = settings.home.expanduser()
    known = {each.name: each for each in sources_in_force(settings, contracts).all}
    differing: list[Difference] = []
    for path in sorted((home / "landing").glob("*/")):
        record = _running(home / "run", path)
        if record is not None:
            differing += _of_one(settings, contracts, known.get(path.name), path.name, record)
    return tuple(differing)


def _running(run_folder: Path, landing: Path) -> CaptureRecord | None:
    """The start of the capture that follows the source of ``landing`` now; None if none does."""
    record, holder = CaptureRecords(landing).read(), lease_holder(run_folder, landing.name)
    if record is None or holder is None or holder.pid != record.pid:
        return None
    return record if record.ended is None and record.follows else None


def _of_one(
    settings: Settings,
    contracts: Contracts,
    definition: SourceDefinition | None,
    name: str,
    record: CaptureRecord,
) -> Iterator[Difference]:
    tables = contracts.of_source(name)
    if definition is None or definition.kind is not SourceKind.LOG or not tables:
        gone = "definition" if tables else "last contract"
        yield Difference(
            name,
            f"its {gone} is gone, and its capture (process {record.pid}) goes on until `up` starts again",
            _ANEW,
        )
        return
    yield from _of_definition(settings, definition, record)
    now = contracts_in_use(tables)
    restart = f"omnisupport-ingest source restart {name}"
    for contract, print_of in record.contracts.items():
        if contract not in {each.name for each in tables}:
            problem = f"the contract {contract} is gone, and its table is still captured"
            yield Difference(name, problem, restart)
        elif now.get(contract, print_of) != print_of:
            problem = f"the contract {contract} has changed, and its capture goes by what it was at its start"
            yield Difference(name, problem, restart)


def _of_definition(
    settings: Settings, definition: SourceDefinition, record: CaptureRecord
) -> Iterator[Difference]:
    try:
        now = definition_in_use(log_settings(settings, definition))
    except IngestError:
        # What is wrong with it, `sources validate` and the look at the source say.
        return
    for member, value in record.definition.items():
        if now.get(member, value) != value:
            yield Difference(
                definition.name,
                f"{member} is now {now[member]}, and its capture goes by {value} until `up` starts again",
                _ANEW,
            )


def _fingerprint(contract: TableContract) -> str | None:
    try:
        # Without what was learned since, which capture itself has seen.
        loaded = load_contract(Path(contract.path))
    except (IngestError, OSError):
        return None
    columns = [[each.name, each.pg_type, each.nullable, each.personal] for each in loaded.source_columns]
    by = [loaded.name, loaded.schema, loaded.table, loaded.key, loaded.evolution, columns]
    return hashlib.sha256(json.dumps(by, ensure_ascii=False).encode()).hexdigest()
