"""Refuse contracts that need more than their source can do, because of its kind.

A contract alone does not know how its rows arrive; the definition of its source says that. What only a
captured log can do is refused here, before anything lands, and the error says what the source is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.model import ContractError, Contracts, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, Sources

_COME = {
    SourceKind.QUERY: "by a cursor",
    SourceKind.FILES: "as files",
    SourceKind.KAFKA: "from topics of Kafka",
}


def way_problems(contracts: Contracts, sources: Sources) -> list[ContractError]:
    """Return what in ``contracts`` does not fit the kinds of ``sources``, and tables that a definition
    misnames."""
    problems: list[ContractError] = []
    for source in sources.all:
        try:
            tables = source.tables(contracts) if contracts.of_source(source.name) else ()
        except ContractError as error:
            problems.append(error)
            tables = contracts.of_source(source.name)
        if source.kind is not SourceKind.LOG:
            for contract in tables:
                problems += _of_table(contract, source)
    return problems


def _of_table(contract: TableContract, source: SourceDefinition) -> Iterator[ContractError]:
    path = Path(contract.path)
    come = f"{contract.full_name} comes {_COME[source.kind]} ({_defined_by(source)})"
    log = f"or define {source.name} with the kind postgres_log."
    if source.kind is SourceKind.QUERY and contract.cursor is None:
        yield refused(
            path,
            "x-cdc.cursor",
            f"names no field, and {come}",
            f"Name a column that grows with every change as cursor.field, {log}",
        )
    if contract.retention.net_changes is not None and not _takes_whole_tables(contract, source):
        whole = f"for whole deliveries with the kind files, {log}"
        undefined = source.kind is SourceKind.FILES and not source.path and contract.cursor is None
        yield refused(
            path,
            "x-cdc.retention.net_changes",
            f"is set, and {come}: an event may still come between two that have landed, and take columns "
            "from a row that left",
            f"Take net_changes out of retention, {f'define {source.name} {whole}' if undefined else log}",
        )


def _takes_whole_tables(contract: TableContract, source: SourceDefinition) -> bool:
    """Whether ``contract`` may be delivered as a whole table each time: no later delivery then lands below an
    earlier one. If files of events land instead, retention refuses (``retention.plan``)."""
    defined = source.kind is SourceKind.FILES and bool(source.path)
    return defined and not source.events and contract.cursor is None


def _defined_by(source: SourceDefinition) -> str:
    if source.path:
        return f"kind {source.kind} in {source.path}"
    return f"no definition of {source.name} is in force, and it is not the source of the settings"
