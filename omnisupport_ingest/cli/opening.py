"""The first steps of a command: settings, the home, its workspace, and the source that the command names."""

from __future__ import annotations

import functools
import getpass
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, TypeVar

import click

from omnisupport_ingest.cli.errors import NAMED_LOG, HomeMissing
from omnisupport_ingest.contracts.in_force import contracts_in_force, record_in_force, settings_of_home
from omnisupport_ingest.contracts.model import Contracts, TableContract, UnknownTable, table_named
from omnisupport_ingest.contracts.sources import (
    SourceKind,
    SourceUnknown,
    load_source,
    log_settings,
    own_log_settings,
    sources_folder,
    sources_in_force,
    used_instead,
)
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings, require_known_variables
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace

R = TypeVar("R")

# --- options -----------------------------------------------------------------------------------------------


def options_as(argument: str, value: type) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator for a command, placed below its options, that passes several options as one value.

    ``value``: a dataclass. The options with the names of its fields become one instance, passed as
    ``argument``.
    """
    names = [each.name for each in fields(value)]

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def call(**given: Any) -> R:
            bundle = value(**{name: given.pop(name) for name in names})
            return command(**{argument: bundle}, **given)

        return call

    return decorate


# --- settings and home -------------------------------------------------------------------------------------


def open_settings(**overrides: Any) -> Settings:
    """Return the settings of this process. Window size and source are the home's unless they were set
    explicitly.

    ``overrides``: settings that the command itself sets.
    """
    require_known_variables()
    return settings_of_home(Settings(**overrides))


def open_home(settings: Settings) -> Home:
    """Return the home of ``settings`` for a command that writes; it is made if missing.

    A new home records its contracts and its decision table. Raises ``HomeMismatch`` if the home has other
    windows.
    """
    home = Home.open(
        settings.home, settings.window_size, first=settings.first_window, storage=settings.storage
    )
    record_in_force(settings, home)
    return home


def home_of_landed(settings: Settings) -> Home:
    """Return the home as ``open_home`` does, for a command that works on what has landed.

    A home is made only if a bucket may have landed batches. In a new folder under a mistyped name, nothing
    would be pending.
    """
    if settings.storage is None:
        existing_home(settings)
    return open_home(settings)


def existing_home(settings: Settings, *, earlier: bool = False) -> Home:
    """Return the home of ``settings`` for a command that makes none. Raises ``HomeMissing`` if it does not
    exist.

    ``earlier``: also open a home of an earlier format.
    """
    folder = settings.home.absolute()
    if not has_home(settings):
        raise HomeMissing(
            f"There is no home in {folder} (settings come from the environment, and from .env of the working "
            "directory).",
            fix="Run this in the project's folder, or point OMNISUPPORT_HOME at the home; or make one: "
            "`omnisupport-ingest sync` or `up`, or `demo` if you have no database of your own.",
        )
    return Home.open(folder, settings.window_size, earlier=earlier, storage=settings.storage)


def has_home(settings: Settings) -> bool:
    return (settings.home / "home.json").exists()


def home_if_any(settings: Settings) -> Home | None:
    """Return the home of ``settings``; None if it does not exist. Raises ``HomeMismatch`` if it has other
    windows."""
    return existing_home(settings) if has_home(settings) else None


def open_workspace(settings: Settings | None = None) -> Workspace:
    """Return the workspace of an existing home; by default, that of the settings of this process."""
    from omnisupport_ingest.layers.workspace import Workspace

    settings = settings or open_settings()
    existing_home(settings)
    return Workspace.open(settings)


class _NoPandas(MetaPathFinder):
    """Refuse to import pandas."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=fullname)


def leave_out_pandas() -> None:
    """Keep pyarrow from importing pandas, which takes a quarter of a second, until a data frame is needed.

    Called before a command that only looks is imported (``main``), and so before anything that uses pyarrow.
    At the first value that it converts, pyarrow tries once to import pandas, to distinguish a series from a
    list. If pandas cannot be imported then, pyarrow works without it; ``to_pandas`` still imports it later.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    refusing = _NoPandas()
    sys.meta_path.insert(0, refusing)
    try:
        pa.array([""])
    finally:
        sys.meta_path.remove(refusing)


# --- the source that a command names -----------------------------------------------------------------------


def log_of(settings: Settings, name: str | None, *, connected: bool = True) -> Settings:
    """Return the settings for capture of the log ``name``; without a name, of the settings' own log.

    ``connected``: False: for a command that connects to nothing, as in ``log_settings``. Raises
    ``SourceUnknown`` if the home has no such source, or if it is not read by its log.
    """
    NAMED_LOG.set(None)
    if name is None or name == settings.source:
        return own_log_settings(settings, connected=connected)
    named = log_settings(settings, sources_in_force(settings).find(name), connected=connected)
    # Not before: of a source that is refused here, there is no command to add the name to.
    NAMED_LOG.set(name)
    return named


def source_named(settings: Settings, name: str | None) -> Settings:
    """Return ``settings`` with ``name`` as their source. Raises ``SourceUnknown`` if the home has no such
    source."""
    if name is None or name == settings.source:
        return settings
    return settings.model_copy(update={"source": sources_in_force(settings).find(name).name})


def has_log(settings: Settings, name: str) -> bool:
    """Whether the source ``name`` is read by its log, as that of the settings is if no definition says
    otherwise. Raises ``SourceUnknown`` if the home has no such source."""
    if name == settings.source:
        path = sources_folder(settings) / f"{name}.json"
        return not path.exists() or load_source(path).kind is SourceKind.LOG
    return sources_in_force(settings).find(name).kind is SourceKind.LOG


def contracted_source(workspace: Workspace, source: str) -> str:
    """Return ``source``. Raises a usage error, with the known ones, if no contract names it."""
    known = workspace.contracts.sources()
    if source not in known:
        raise click.UsageError(f"No contract names the source {source!r}. There are: {', '.join(known)}")
    return source


def sources_in_use(workspace: Workspace) -> list[str]:
    """Return the sources of which anything has landed, by name."""
    landing = workspace.home.path / "landing"
    return [each for each in workspace.contracts.sources() if any((landing / each).glob("manifests/*.json"))]


def source_dsn_or_error(settings: Settings, home: Home | None) -> str | IngestError:
    """Return the connection string of the source, or the error that explains why there is none now."""
    from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.connection import with_silence

    if settings.source_dsn is not None:
        return with_silence(settings.source_dsn.get_secret_value(), settings.source_silence_seconds)
    if home is None:
        return SourceUnavailable(
            f"There is no home at {settings.home.absolute()}, so no embedded PostgreSQL, and "
            "OMNISUPPORT_SOURCE_DSN names no other source.",
            fix="Set OMNISUPPORT_SOURCE_DSN to the source, in .env of the working directory or in the "
            "environment; or make the embedded one: omnisupport-ingest demo",
        )
    try:
        return source_dsn(settings, home)
    except SourceUnavailable as error:
        return error


def require_source_dsn(settings: Settings, home: Home | None) -> str:
    """Return the connection string of the source. Raises ``SourceUnavailable`` if there is none now."""
    dsn = source_dsn_or_error(settings, home)
    if isinstance(dsn, IngestError):
        raise dsn
    return dsn


def require_source_in_use(settings: Settings, contracts: Contracts | None = None) -> None:
    """Raise ``SourceUnknown`` if a command without a name means a source that nobody uses, and there are
    others (``used_instead``). To make contracts of a database that nobody has would be no help."""
    if instead := used_instead(settings, contracts):
        raise SourceUnknown(
            f"No contract names the source {settings.source!r}, which is meant without a name, and "
            "OMNISUPPORT_SOURCE_DSN is not set.",
            fix=f"Name the source: {' or '.join(f'{each.name} ({each.kind})' for each in instead)}. If "
            "another database is to be captured, set OMNISUPPORT_SOURCE_DSN; then: omnisupport-ingest "
            "contracts new --all",
        )


def contracted_tables(settings: Settings) -> tuple[TableContract, ...]:
    """Return the tables of the settings' source that have contracts. Raises ``IngestError`` if none has, and
    as ``require_source_in_use`` does."""
    from omnisupport_ingest.sources.postgres.preflight import source_check

    require_source_in_use(settings)
    return source_check.contracted_tables(contracts_in_force(settings), settings.source)


def tables_named(workspace: Workspace, names: Sequence[str]) -> list[TableContract]:
    """Return the contracts of the tables called ``names``, each once. Raises ``UnknownTable``, which lists
    the known tables."""
    return list(dict.fromkeys(table_named(each, workspace.contracts.all) for each in names))


SOURCE_OF_TABLE = "The source of the table.  [default: OMNISUPPORT_SOURCE, else the one that has it]"
"""The help text of ``--source`` for commands that use ``table_of``."""


def table_of(workspace: Workspace, name: str, source: str | None) -> TableContract:
    """Return the contract of the table ``name``.

    ``source``: its source; None: the source of the settings, or else the only other source with such a table.
    Raises ``UnknownTable``, which lists the known tables.
    """
    if source is not None:
        return table_named(name, workspace.contracts.of_source(contracted_source(workspace, source)))
    try:
        return table_named(name, workspace.contracts.of_source(workspace.settings.source))
    except UnknownTable:
        return table_named(name, workspace.contracts.all)


# --- a key that a command names ----------------------------------------------------------------------------


def key_named(contract: TableContract, values: Sequence[str]) -> list[str]:
    """Return the texts of the key's columns in the contract's order. A usage error says how to write them.

    ``values``: the value of a one-column key, or COLUMN=VALUE for each column.
    """
    columns = contract.key
    pairs = dict(each.split("=", 1) for each in values if each.partition("=")[0] in columns and "=" in each)
    if len(pairs) == len(values) == len(columns):
        return [pairs[name] for name in columns]
    if len(values) == len(columns) == 1:
        return list(values)
    wanted = " ".join(f"{name}=VALUE" for name in columns)
    raise click.UsageError(f"The key of {contract.full_name} is {', '.join(columns)}. Write it as: {wanted}")


# --- the person who decides --------------------------------------------------------------------------------


def deciding_person(by: str | None) -> str:
    """Return ``by``; by default, the name of this user. Raises a usage error if the user has none."""
    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise click.UsageError("This user has no name: say who decides, with --by.") from None
