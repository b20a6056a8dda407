"""Source definitions: files in which people define where tables come from.

``contracts/sources/<name>.json``, beside the folder of contracts, has the schema
``contracts/source.schema.json``. It names a connection by a variable or a file, and never contains it.

A source of contracts without a file gets an implied definition: the source of the settings
(``OMNISUPPORT_SOURCE``) is captured from the log of ``OMNISUPPORT_SOURCE_DSN`` or of the embedded server, any
other comes as files. So every source in ``Sources`` has a definition.

Several logs are captured side by side, each by its settings: ``log_settings`` replaces those of the home's
own source by those of a definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.documents import check_document, read_document
from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.in_force import contracts_so_far, in_force
from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.contracts.model import BLOCK, ContractError, Contracts, TableContract
from omnisupport_ingest.contracts.named_secrets import NamedSecret, secret_in
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import Settings, SnapshotMode

SCHEMA = "contracts/source.schema.json"

DEFAULT_SYNC_EVERY = timedelta(minutes=1)
DEFAULT_PAGE_ROWS = 500_000

_DSN = "OMNISUPPORT_SOURCE_DSN"

_POSTGRES_NAME_BYTES = 63


class SourceKind(StrEnum):
    """The kind of a source: how its changes are read."""

    LOG = "postgres_log"
    QUERY = "query"
    FILES = "files"
    KAFKA = "kafka"


MODES = {
    SourceKind.LOG: ("cdc",),
    SourceKind.QUERY: ("incremental_cursor",),
    SourceKind.KAFKA: ("cdc",),
}
"""Modes in which tables of each kind of source can be read; of deliveries each manifest says its own."""


_MEMBERS = {
    "schedule": (SourceKind.QUERY, SourceKind.KAFKA),
    "page_rows": (SourceKind.QUERY,),
    "tables": (SourceKind.LOG, SourceKind.QUERY, SourceKind.KAFKA),
    "events": (SourceKind.FILES, SourceKind.KAFKA),
    "kafka": (SourceKind.KAFKA,),
    "licenses": (SourceKind.FILES,),
    "log": (SourceKind.LOG,),
    "database": (SourceKind.LOG,),
}
"""Members of a definition that only some kinds have."""


class SourceUnknown(IngestError):
    """No source has the name, or the command is not for a source of its kind.

    Fix: Name one of those that ``omnisupport-ingest sources list`` shows.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class LogCapture:
    """How a log is captured. ``slot``, ``publication``: None: named after the source. ``snapshot_mode``:
    None: that of the settings.
    """

    slot: str | None = None
    publication: str | None = None
    snapshot_mode: SnapshotMode | None = None


@dataclass(frozen=True, slots=True)
class SourceDefinition:
    """One source.

    ``connection_env``, ``connection_file``: the variable or file with its connection; both None: the embedded
    server, or no connection (files, topics). ``modes``: contract name → mode; empty: every contract of the
    source, in the first mode of its kind. ``events``: for files and topics of events, facts that they do not
    carry, as in the schema. ``kafka``: for the kind kafka. ``path``: its file; empty for an implied
    definition. ``licenses``: those accepted in deliveries; empty: any. ``database``: the name shared by all
    slots of a database (``databases``); None: a single slot.
    """

    name: str
    kind: SourceKind
    description: str
    connection_env: str | None = None
    connection_file: str | None = None
    modes: tuple[tuple[str, str], ...] = ()
    sync_every: timedelta = DEFAULT_SYNC_EVERY
    compare_every: timedelta | None = None
    page_rows: int = DEFAULT_PAGE_ROWS
    events: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    kafka: KafkaTopics | None = None
    licenses: tuple[str, ...] = ()
    log: LogCapture = LogCapture()
    database: str | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is the log of the embedded PostgreSQL."""
        named = self.connection_env is not None or self.connection_file is not None
        return self.kind is SourceKind.LOG and not named

    @property
    def connection(self) -> str:
        """The connection for messages, without its content."""
        if self.connection_env is not None:
            return f"variable {self.connection_env}"
        if self.connection_file is not None:
            return f"file {self.connection_file}"
        if self.kafka is not None:
            return f"Kafka at {self.kafka.settings['bootstrap.servers']}"
        return "none" if self.kind is SourceKind.FILES else "the embedded PostgreSQL"

    def tables(self, contracts: Contracts) -> tuple[TableContract, ...]:
        """Return the contracts of its tables. Raises ``ContractError`` if it names one that does not
        exist."""
        there = {each.name: each for each in contracts.of_source(self.name)}
        for name, _ in self.modes:
            if name not in there:
                raise refused(
                    Path(self.path),
                    f"tables.{name}",
                    f"no contract of {self.name} has that name",
                    f"Name one of {', '.join(sorted(there)) or 'none'}, or write the contract.",
                )
        if self.kind is not SourceKind.QUERY and self.modes and len(self.modes) < len(there):
            left_out = min(there.keys() - {name for name, _ in self.modes})
            raise refused(
                Path(self.path),
                "tables",
                f"{left_out} has a contract and is left out, and every contract of such a source is taken in",
                "Name it too, take tables out, or take the contract away.",
            )
        return tuple(there[name] for name, _ in self.modes) if self.modes else tuple(there.values())

    def row_columns(self, contracts: Iterable[TableContract]) -> dict[TableName, RowColumns]:
        """Return the columns of rows for those of its ``contracts`` that have rows of other columns wait."""
        bare = bool(self.events.get("bare_rows"))
        return {
            each.table_name: RowColumns.of(each, bare=bare)
            for each in contracts
            if blocks_rows(each, self.kind)
        }

    @property
    def first_contracts(self) -> str:
        """What to do where no contract names it yet."""
        if self.kind in (SourceKind.LOG, SourceKind.QUERY):
            return f"omnisupport-ingest contracts new --all --source {self.name}"
        return f"Write a contract with x-cdc.source {self.name} for each table, then: sources validate"

    def connection_text(self) -> NamedSecret:
        """Return the connection string from the variable or file. Raises ``ConnectionMissing``."""
        how = "env" if self.connection_file is None else "file"
        name = self.connection_env if self.connection_file is None else self.connection_file
        assert name is not None
        return secret_in(how, name, self.path, "connection string")


def blocks_rows(contract: TableContract, kind: SourceKind) -> bool:
    """Whether ``contract`` has rows of other columns than its own wait. ``kind``: of its source; a log and a
    cursor leave out the whole table instead."""
    return contract.evolution == BLOCK and kind in (SourceKind.FILES, SourceKind.KAFKA)


@dataclass(frozen=True)
class Sources:
    """Every source of a home, by name."""

    all: tuple[SourceDefinition, ...]
    folder: Path

    def find(self, name: str) -> SourceDefinition:
        """Return the source called ``name``. Raises ``SourceUnknown``, which lists the existing ones."""
        for each in self.all:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in self.all) or "none"
        raise SourceUnknown(
            f"There is no source {name!r}.",
            fix=f"Name one of: {names}. Or define it, as omnisupport-ingest sources new --help says.",
        )

    def of_kind(self, kind: SourceKind) -> tuple[SourceDefinition, ...]:
        return tuple(each for each in self.all if each.kind is kind)


def sources_in_force(settings: Settings, contracts: Contracts | None = None) -> Sources:
    """Return the sources of the home of ``settings``: the defined ones, and those that contracts imply."""
    known = contracts_so_far(settings) if contracts is None else contracts
    return sources_in(sources_folder(settings), settings, known)


def sources_in(folder: Path, settings: Settings, contracts: Contracts) -> Sources:
    """Return the sources that ``folder`` defines, and those that ``contracts`` and ``settings`` imply."""
    found = {each.name: each for each in load_sources(folder)}
    for name in (*contracts.sources(), settings.source):
        if name not in found:
            found[name] = _implied(name, settings)
    return Sources(tuple(found[name] for name in sorted(found)), folder)


def used_instead(settings: Settings, contracts: Contracts | None = None) -> tuple[SourceDefinition, ...]:
    """Return the defined sources of a home where nobody uses the settings' own one: it has no contract, no
    connection and no definition. Else return nothing.

    The embedded PostgreSQL is then not meant. A person who names no source has to name one of these.
    """
    if settings.source_dsn is not None:
        return ()
    known = contracts_so_far(settings) if contracts is None else contracts
    if known.of_source(settings.source):
        return ()
    defined = load_sources(sources_folder(settings))
    return () if any(each.name == settings.source for each in defined) else defined


def log_sources(settings: Settings, contracts: Contracts) -> tuple[SourceDefinition, ...]:
    """Return the sources of the home that are captured from their logs, that of the settings first."""
    logs = sources_in_force(settings, contracts).of_kind(SourceKind.LOG)
    named = [each for each in logs if contracts.of_source(each.name)]
    return tuple(sorted(named, key=lambda each: (each.name != settings.source, each.name)))


def own_log_settings(settings: Settings, *, connected: bool = True) -> Settings:
    """Return ``settings`` with those of the definition file of their own source, if it exists.

    ``connected``: as in ``log_settings``.
    """
    path = sources_folder(settings) / f"{settings.source}.json"
    return log_settings(settings, load_source(path), connected=connected) if path.exists() else settings


def log_settings(settings: Settings, definition: SourceDefinition, *, connected: bool = True) -> Settings:
    """Return ``settings`` with source, connection, slot and publication of ``definition``.

    ``connected``: False: leave its connection out, for those who need only the names; its variable or file
    need not be there. Applying it twice changes nothing. Raises ``SourceUnknown`` if the source has no log,
    ``ConnectionMissing`` and ``ContractError``.
    """
    name, log = definition.name, definition.log
    if definition.kind is not SourceKind.LOG:
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}, and has no log that is captured.",
            fix="Name a source of the kind postgres_log: omnisupport-ingest sources list",
        )
    own = name == settings.source
    if own and not definition.path:
        return settings
    if not connected:
        definition = replace(definition, connection_env=None, connection_file=None)
    dsn = None if definition.embedded else SecretStr(definition.connection_text())
    if own and definition.embedded:
        # As without a definition, the setting may name another server for the home's own source.
        dsn = settings.source_dsn
    if own and settings.source_dsn not in (None, dsn):
        raise refused(
            Path(definition.path),
            "connection",
            f"the connection of {name} is named here, and {_DSN} is another",
            f"Take {_DSN} out, or name it here as env, or give this source another name.",
        )
    default = "" if own else f"_{name.lower()}"
    names = {
        "slot": log.slot or f"{settings.slot}{default}",
        "publication": log.publication or f"{settings.publication}{default}",
    }
    for member, text in names.items():
        if len(text.encode()) > _POSTGRES_NAME_BYTES:
            raise refused(
                Path(definition.path),
                f"log.{member}",
                f"{text} has more than the {_POSTGRES_NAME_BYTES} bytes of a name of PostgreSQL",
                f"Give a shorter one as log.{member}.",
            )
    mode = log.snapshot_mode or settings.snapshot_mode
    return settings.model_copy(update={"source": name, "source_dsn": dsn, "snapshot_mode": mode, **names})


def sources_folder(settings: Settings) -> Path:
    """Return the folder of the home's definitions, beside its contracts."""
    return in_force(settings).contracts.parent / "sources"


def load_sources(folder: Path) -> tuple[SourceDefinition, ...]:
    """Return every definition in ``folder``, which may be missing. Raises ``ContractError``."""
    return tuple(load_source(path) for path in sorted(folder.glob("*.json")))


def load_source(path: Path) -> SourceDefinition:
    """Return the definition in ``path``. Raises ``ContractError``."""
    return source_of(read_document(path, ContractError), path)


def source_of(document: dict[str, Any], path: Path) -> SourceDefinition:
    """Return the definition in ``document``, the content of ``path``. Raises ``ContractError``."""
    check_document(document, path, SCHEMA, ContractError)
    kind = SourceKind(document["kind"])
    connection = document.get("connection", {})
    if path.stem != document["name"]:
        raise refused(
            path,
            "name",
            f"is {document['name']!r}, and the file is {path.name}",
            "Use the same name for the file and its member name.",
        )
    without = kind in (SourceKind.FILES, SourceKind.KAFKA)
    if without != (not connection):
        needs = "takes no connection" if without else "needs a connection"
        raise refused(path, "connection", f"a source of the kind {kind} {needs}", "See kind in the schema.")
    if kind is SourceKind.QUERY and "embedded" in connection:
        raise refused(
            path, "connection", "the embedded server is followed by its log", "Name a variable or a file."
        )
    for member, kinds in _MEMBERS.items():
        if member in document and kind not in kinds:
            why = "Take it out."
            if member == "tables":
                why += " Its tables are those whose contracts name it, and a manifest says its mode itself."
            raise refused(path, member, f"a source of the kind {kind} has none", why)
    if kind is SourceKind.KAFKA and (
        "kafka" not in document or "compare_every" in document.get("schedule", {})
    ):
        raise refused(
            path, "kafka", "topics are needed, and keys are not compared", "See kafka in the schema."
        )
    if "database" in document and not {"slot", "publication"} <= document.get("log", {}).keys():
        raise refused(
            path,
            "log",
            "a source that shares a database names its slot and its publication",
            "Give log.slot and log.publication.",
        )
    events = document.get("events", {})
    if kind is SourceKind.FILES and events.get("tombstones") == "delete" and events.get("order") != "arrival":
        raise refused(
            path,
            "events.tombstones",
            "is 'delete', and a tombstone in a file says neither its position nor its time",
            'Have the lines of its files be their order: "order": "arrival".',
        )
    fields = events.get("fields", {})
    for what, name in fields.items():
        if other := next((each for each in fields if each != what and fields[each] == name), None):
            raise refused(
                path, f"events.fields.{what}", f"has the name of {other}: {name!r}", "Name each member once."
            )
    modes = tuple((name, each["mode"]) for name, each in document.get("tables", {}).items())
    for name, mode in modes:
        if mode not in MODES[kind]:
            raise refused(
                path,
                f"tables.{name}.mode",
                f"{mode} cannot be carried out for a source of the kind {kind}",
                f"Use {' or '.join(MODES[kind])}.",
            )
    schedule = document.get("schedule", {})
    every = _duration(path, "sync_every", schedule)
    return SourceDefinition(
        document["name"],
        kind,
        document["description"],
        connection.get("env"),
        connection.get("file"),
        modes,
        DEFAULT_SYNC_EVERY if every is None else every,
        _duration(path, "compare_every", schedule),
        document.get("page_rows", DEFAULT_PAGE_ROWS),
        events,
        str(path),
        KafkaTopics.of(document["kafka"], path) if "kafka" in document else None,
        tuple(document.get("licenses", ())),
        _log_capture(document.get("log", {})),
        document.get("database"),
    )


def _log_capture(given: dict[str, str]) -> LogCapture:
    mode = given.get("snapshot_mode")
    return LogCapture(given.get("slot"), given.get("publication"), SnapshotMode(mode) if mode else None)


def _implied(name: str, settings: Settings) -> SourceDefinition:
    if name != settings.source:
        return SourceDefinition(name, SourceKind.FILES, "Files; no definition says more.")
    if settings.source_dsn is None:
        return SourceDefinition(name, SourceKind.LOG, "The embedded PostgreSQL.")
    return SourceDefinition(name, SourceKind.LOG, "The database of the settings.", connection_env=_DSN)


def _duration(path: Path, name: str, schedule: dict[str, str]) -> timedelta | None:
    if name not in schedule:
        return None
    try:
        found = parse_duration(schedule[name])
        if not found:
            raise ValueError("is no length of time")
    except ValueError as problem:
        raise refused(
            path, f"schedule.{name}", str(problem), "Write an ISO 8601 duration such as PT1M."
        ) from None
    return found
