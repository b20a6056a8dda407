"""``sources``: definitions of where tables come from: list, make, check and compare them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import open_settings, options_as
from omnisupport_ingest.cli.render import Commands, counted, echo_json, facts
from omnisupport_ingest.cli.withdraw import retire
from omnisupport_ingest.contracts.databases import database_of
from omnisupport_ingest.contracts.documents import document_text
from omnisupport_ingest.contracts.in_force import contracts_so_far
from omnisupport_ingest.contracts.sources import (
    SourceDefinition,
    SourceKind,
    Sources,
    log_settings,
    source_of,
    sources_folder,
    sources_in_force,
    used_instead,
)
from omnisupport_ingest.durable import create_exclusively
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.outdated import ContractDrift


@click.group(cls=Commands)
def sources() -> None:
    """List, make and check the definitions of sources (contracts/sources/NAME.json)."""


@sources.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(as_json: bool) -> None:
    """List every source of the home: its kind, its connection by name, its tables, what has landed.

    The list includes sources that contracts name and that have no definition. The one that the settings name
    is read by its log; any other comes as files.

    \b
    Example:
      omnisupport-ingest sources list

    Exit code: 0 listed, 2 usage, settings or a definition that cannot be read.
    """
    settings = open_settings()
    documents = [_facts(settings, each) for each in _sources(settings).all]
    if as_json:
        echo_json({"sources": documents})
        return
    width = max(len(each["name"]) for each in documents)
    for each in documents:
        shares = f", database {each['database']}" if each["database"] else ""
        state = f"{counted(each['batches'], 'batch')} landed" + (", paused" if each["paused"] else "")
        click.echo(f"{each['name']:{width}}  {each['kind']:12}  {each['connection']}{shares}; {state}")
        facts([("", ", ".join(each["tables"]) or "no contract names it")], label=width + 2)
        if each["next"]:
            # On one line: a command that is wrapped cannot be copied.
            click.echo(f"{'':{width + 2}}Next: {each['next']}")


@dataclass(frozen=True, slots=True)
class _NewSource:
    """The arguments of ``new``, from which the definition of a source is made."""

    name: str
    kind: str
    env: str | None
    file: str | None
    servers: str | None
    topics: tuple[str, ...]
    database: str | None
    every: str
    compare_every: str | None
    description: str | None

    def check_usage(self) -> None:
        """Raise a usage error if arguments do not fit together."""
        if self.env is not None and self.file is not None:
            raise click.UsageError("Give one of --env and --file.")
        both, any_of_kafka = bool(self.servers and self.topics), bool(self.servers or self.topics)
        if not both if self.kind == "kafka" else any_of_kafka:
            raise click.UsageError("--kind kafka needs --servers and --topic, which no other kind has.")

    def document(self) -> dict[str, Any]:
        """Return the JSON of the definition."""
        made: dict[str, Any] = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": self.name,
            "kind": self.kind,
            "description": self.description or f"The source {self.name}.",
        }
        if self.env is not None:
            made["connection"] = {"env": self.env}
        elif self.file is not None:
            made["connection"] = {"file": self.file}
        elif self.kind == "postgres_log":
            made["connection"] = {"embedded": True}
        if self.database is not None:
            own = self.name.lower()
            made |= {"database": self.database, "log": {"slot": own, "publication": own}}
        if self.kind in ("query", "kafka"):
            made["schedule"] = {"sync_every": self.every}
        if self.kind == "query" and self.compare_every is not None:
            made["schedule"]["compare_every"] = self.compare_every
        if self.kind == "kafka":
            made["kafka"] = {"topics": list(self.topics), "settings": {"bootstrap.servers": self.servers}}
        return made


@sources.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["postgres_log", "query", "files", "kafka"]),
    required=True,
    help="How changes are read: from its log, by queries with a cursor, from files, or from topics.",
)
@click.option("--env", metavar="VARIABLE", help="The environment variable with the connection string.")
@click.option("--file", "file", metavar="PATH", help="The file with the connection string.")
@click.option(
    "--servers", metavar="HOST:PORT,…", help="kafka: the addresses of its brokers (bootstrap.servers)."
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME",
    help="kafka: a topic, or ^ and a regular expression; repeatable.",
)
@click.option(
    "--database",
    metavar="NAME",
    help="postgres_log: the database, if several sources share it. Slot and publication get the name of "
    "the source.",
)
@click.option("--every", default="PT1M", show_default=True, help="query, kafka: how often it is read.")
@click.option("--compare-every", help="query: how often its keys are compared with the lake (P1D).")
@click.option("--description", help="What it is, in a sentence.")
@options_as("wanted", _NewSource)
def new(wanted: _NewSource) -> None:
    """Write the definition of a source. It names the connection string, and never contains it.

    \b
    Example:
      omnisupport-ingest sources new shop_replica --kind query --env SHOP_REPLICA_URL
      omnisupport-ingest sources new nova --kind kafka --servers kafka:9092 --topic '^nova\\.public\\.'

    Exit code: 0 written, 2 usage, settings, or its file is there already.
    """
    from omnisupport_ingest.cli.contracts_new import own_folder, warn_if_not_in_force

    wanted.check_usage()
    settings = open_settings()
    contracts = own_folder(settings)
    folder = contracts.parent / "sources"
    path, document = folder / f"{wanted.name}.json", wanted.document()
    definition = source_of(document, path)
    # No failpoint: folders: those that are there already are as good.
    for each in (folder, contracts):
        each.mkdir(parents=True, exist_ok=True)
    with failpoint("contract.file", path):
        created = create_exclusively(path, document_text(document).encode())
    if not created:
        raise click.UsageError(f"{path} is there already; edit it, or take another name.")
    click.echo(f"Wrote {path}. Next: {definition.first_contracts}")
    warn_if_not_in_force(settings, [contracts.absolute()])


@sources.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def validate(as_json: bool) -> int:
    """Check every definition: its format, its tables against the contracts, its connection by name.

    The command connects to nothing.

    \b
    Example:
      omnisupport-ingest sources validate

    Exit code: 0 all are in order, 1 one is not, 2 one cannot be read, usage or settings.
    """
    settings = open_settings()
    checked = []
    for each in _sources(settings).all:
        problem = _problem(settings, each)
        checked.append({"name": each.name, "path": each.path, "problem": problem})
    wrong = [each for each in checked if each["problem"]]
    if as_json:
        echo_json({"sources": checked})
    else:
        for fault in wrong:
            click.echo(f"{fault['name']}: {fault['problem']}")
        click.echo(f"{counted(len(checked), 'source')}, {len(wrong)} not in order.")
    return FINDINGS if wrong else 0


@sources.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(name: str | None, as_json: bool) -> int:
    """Show where definitions, home and databases differ.

    Listed are sources from which nothing has landed (that of the settings only if something uses it, or there
    is no other), folders in landing that no definition and no contract
    names, for query sources every table that does not exist, lacks a column or an index, or has another type
    of cursor, and for a source that is captured now the settings in its files that its capture does not use
    yet.

    \b
    Example:
      omnisupport-ingest sources diff shop_replica

    Exit code: 0 nothing differs, 1 something does, 2 usage or settings.
    """
    settings = open_settings()
    configured = _sources(settings)
    chosen = (configured.find(name),) if name is not None else configured.all
    unused = settings.source if name is None and used_instead(settings) else None
    differences: list[dict[str, str]] = []
    for each in chosen:
        if each.name != unused and not _batches(settings, each.name):
            differences.append({"source": each.name, "what": "nothing has landed", "fix": ""})
        if each.kind is SourceKind.QUERY:
            differences += [
                {"source": each.name, "what": finding.problem, "fix": finding.fix}
                for finding in query_findings(settings, each)
            ]
    differences += [asdict(each) for each in _not_in_use(settings) if name in (None, each.source)]
    if name is None:
        known = {each.name for each in configured.all}
        landing = settings.home / "landing"
        differences += [
            {"source": folder.name, "what": "it has landed, and nothing defines it any more", "fix": ""}
            for folder in (sorted(landing.iterdir()) if landing.is_dir() else ())
            if folder.is_dir() and folder.name not in known
        ]
    if as_json:
        echo_json({"differences": differences})
    else:
        for line in differences:
            fix = f"\n  Fix: {line['fix']}" if line["fix"] else ""
            click.echo(f"{line['source']}: {line['what']}{fix}")
        if not differences:
            click.echo("Nothing differs.")
    return FINDINGS if differences else 0


def query_findings(settings: Settings, definition: SourceDefinition) -> tuple[Any, ...]:
    """Return the preflight ``Finding``s of a query source, the worst first."""
    from omnisupport_ingest.sources.postgres.preflight import Finding
    from omnisupport_ingest.sources.query.preflight import preflight

    tables = definition.tables(contracts_so_far(settings))
    found = preflight(definition, tables, settings.home / "landing" / definition.name)
    if not tables:
        none = f"No contract names {definition.name} as x-cdc.source, so no table is read."
        found = (*found, Finding("contracts", none, definition.first_contracts))
    return found


def _not_in_use(settings: Settings) -> tuple[ContractDrift, ...]:
    from omnisupport_ingest.sources.postgres.capture.outdated import differences

    return differences(settings, contracts_so_far(settings))


def _sources(settings: Settings) -> Sources:
    return sources_in_force(settings)


def _problem(settings: Settings, definition: SourceDefinition) -> str | None:
    from omnisupport_ingest.sources.kafka.client import check_settings
    from omnisupport_ingest.sources.query.cursor import CursorColumn

    try:
        contracts = contracts_so_far(settings)
        tables = definition.tables(contracts)
        if not tables and definition.path:
            return (
                f"no contract names it as x-cdc.source ({definition.path}). Fix: {definition.first_contracts}"
            )
        if definition.kind is SourceKind.QUERY:
            for table in tables:
                CursorColumn.of(table)
            definition.connection_text()
        if definition.kind is SourceKind.LOG:
            log_settings(settings, definition)
            database = database_of(sources_folder(settings), contracts, definition.name)
            for shared in database.shared(contracts) if database is not None else ():
                return f"{shared.problem} Fix: {shared.fix}"
        if definition.kafka is not None:
            check_settings(definition.name, definition.kafka)
    except IngestError as error:
        return f"{error.problem} Fix: {error.fix}"
    return None


def _facts(settings: Settings, definition: SourceDefinition) -> dict[str, Any]:
    tables = definition.tables(contracts_so_far(settings))
    return {
        "name": definition.name,
        "kind": definition.kind.value,
        "description": definition.description,
        "connection": definition.connection,
        "database": definition.database,
        "path": definition.path or None,
        "next": None if tables or not definition.path else definition.first_contracts,
        "tables": [each.full_name for each in tables],
        "batches": _batches(settings, definition.name),
        "paused": PauseRequest(_landing(settings, definition.name)).present,
    }


def _batches(settings: Settings, source: str) -> int:
    folder = _landing(settings, source) / "manifests"
    return sum(1 for _ in folder.glob("*.json")) if folder.is_dir() else 0


def _landing(settings: Settings, source: str) -> Path:
    return settings.home / "landing" / source


sources.add_command(retire)
