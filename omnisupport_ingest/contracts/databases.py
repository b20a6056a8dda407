"""One database captured by several slots: the sources among which its tables are divided.

Each is a source with a slot, a publication, a chain and epochs of its own; their definitions name the same
``database``. A table belongs to one of them. A window closes at the lowest of their watermarks, when the
whole database is complete up to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.contracts.sources import SourceDefinition, load_sources


@dataclass(frozen=True, slots=True)
class Shared:
    """A slot, publication or table that two sources of a database have, and only one may have.

    ``table``: its full name; None for a slot or publication.
    """

    problem: str
    fix: str
    table: str | None = None


@dataclass(frozen=True, slots=True)
class Database:
    """A database, and its sources that have contracts (``inputs``), by name."""

    name: str
    inputs: tuple[SourceDefinition, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs)

    def others(self, source: str) -> tuple[SourceDefinition, ...]:
        """Return the inputs besides ``source``."""
        return tuple(each for each in self.inputs if each.name != source)

    def shared(self, contracts: Contracts) -> Iterator[Shared]:
        """Yield each slot, publication and table that more than one input has."""
        for what in ("slot", "publication"):
            for name, users in _by_name((getattr(each.log, what), each.name) for each in self.inputs):
                yield Shared(
                    f"{' and '.join(users)} of database {self.name} have the same {what}, {name}.",
                    f"Give each a {what} of its own, as log.{what} in its definition.",
                )
        tables = ((table.full_name, each) for each in self.names for table in contracts.of_source(each))
        for table, users in _by_name(tables):
            yield Shared(
                f"{table} has a contract for each of {' and '.join(users)}, of database {self.name}.",
                "A table belongs to one slot, with all of its keys: row filters do not divide it. Withdraw "
                "one of them: omnisupport-ingest contracts withdraw "
                f"{table} --source {users[-1]}",
                table,
            )


def databases(definitions: Iterable[SourceDefinition], contracts: Contracts) -> tuple[Database, ...]:
    """Return the databases that ``definitions`` name, each with those of its sources that have contracts."""
    found: dict[str, list[SourceDefinition]] = {}
    for each in sorted(definitions, key=lambda definition: definition.name):
        if each.database is not None and contracts.of_source(each.name):
            found.setdefault(each.database, []).append(each)
    return tuple(Database(name, tuple(inputs)) for name, inputs in sorted(found.items()))


def database_of(
    folder: Path,
    contracts: Contracts,
    source: str,
    *,
    contracts_again: Callable[[], Contracts] | None = None,
) -> Database | None:
    """Return the database of ``source`` by the definitions in ``folder``; None if it shares none.

    ``contracts_again`` loads the contracts again. It is called if ``contracts`` has none for a source of the
    database, which may have been added since. Raises ``ContractError`` if a definition is wrong.
    """
    definitions = load_sources(folder)
    named = next((each.database for each in definitions if each.name == source), None)
    shared = [each for each in definitions if each.database == named and named is not None]
    if contracts_again is not None and any(not contracts.of_source(each.name) for each in shared):
        contracts = contracts_again()
    found = databases(definitions, contracts)
    return next((each for each in found if source in each.names), None)


FilesSeen = tuple[tuple[str, int, int], ...]
"""Name, time of change (ns) and size of files, by which added, removed and changed ones are noticed."""


def files_seen(folder: Path, contracts: Path) -> FilesSeen:
    """Return the state of the definitions in ``folder`` and of the folder ``contracts``; opens no file."""
    files = []
    for path in (contracts, *sorted(folder.glob("*.json"))):
        with suppress(FileNotFoundError):
            status = path.stat()
            files.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(files)


def _by_name(named: Iterable[tuple[str | None, str]]) -> Iterator[tuple[str, Sequence[str]]]:
    users: dict[str, list[str]] = {}
    for name, user in named:
        if name is not None:
            users.setdefault(name, []).append(user)
    yield from ((name, every) for name, every in sorted(users.items()) if len(every) > 1)
