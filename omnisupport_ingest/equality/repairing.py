"""Have the source read again what differs, and nothing else.

A differing key is requested as a snapshot of a key range, as ``source snapshot --from --to`` does. So it
lands as ordinary batches, a row that is gone from the source ends, and the history records what happened. If
the lake cannot tell which keys lie in a range, the whole table is requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import Key, by_number
from omnisupport_ingest.equality.bisecting import Differing
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import NoKeyRange, key_range
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequest, SnapshotRequests

MOST_RANGES = 32
"""Ranges that are requested of one table at most; more become one range from the first to the last."""

Bounds = tuple[Sequence[str] | None, Sequence[str] | None]
"""Values of the first key columns, both inclusive; None is open."""


def request_repair(
    workspace: Workspace, contract: TableContract, differing: Differing, reason: str
) -> list[SnapshotRequest]:
    """Request snapshots of the ranges in ``differing``; return the requests, including those made before.

    Durable on return. Raises what connecting to the source raises.
    """
    settings = workspace.settings
    requests = SnapshotRequests(workspace.landing(contract.source).folder)
    with closing(connect(source_dsn(settings, workspace.home))) as connection:
        try:
            scopes: list[KeyRange | None] = [
                key_range(connection, settings.publication, contract, *bounds)
                for bounds in ranges_to_read(differing, whole_numbers=by_number(contract))
            ]
        except NoKeyRange:
            scopes = [None]
    for scope in scopes:
        requests.write(contract.name, reason, scope)
    return [SnapshotRequest(contract.name, scope, reason, "") for scope in scopes]


def ranges_to_read(differing: Differing, *, whole_numbers: bool) -> list[Bounds]:
    """Return the ranges to read again; an empty list if nothing differs. Pure.

    Each differing key is a range, and neighbours are joined. If not all keys are known, the differing spans
    are the ranges. Too many become one range of the first key column: keys are in its order here, not in
    that of the other columns.
    """
    ranges: list[Bounds]
    if differing.keys and not differing.more:
        ranges = list(_neighbours(differing.keys, whole_numbers=whole_numbers))
    else:
        ranges = [
            (
                None if span.start is None else (span.start,),
                # The end is included: this reads one row too many and misses none.
                None if span.end is None else (span.end,),
            )
            for span in differing.spans
        ]
    if len(ranges) > MOST_RANGES:
        return [(_first_column(ranges[0][0]), _first_column(ranges[-1][1]))]
    return ranges


def _first_column(bound: Sequence[str] | None) -> Sequence[str] | None:
    return None if bound is None else bound[:1]


def _neighbours(keys: Sequence[Key], *, whole_numbers: bool) -> Iterator[Bounds]:
    single = whole_numbers and len(keys[0]) == 1
    ordered = sorted(keys, key=lambda key: int(key[0])) if whole_numbers else sorted(keys)
    first = last = ordered[0]
    for key in ordered[1:]:
        if single and int(key[0]) == int(last[0]) + 1:
            last = key
            continue
        yield first, last
        first = last = key
    yield first, last
