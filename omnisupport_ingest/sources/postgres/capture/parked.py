"""Tables that a capture leaves out, so that what is wrong with one of them stops no other.

A table is parked when its changes cannot be told by its contract any more, or may not have been sent: its
key has left the replica identity, its contract no longer fits it, it was out of the publication for a time,
a row of it is too large; or when it cannot be read.
Before that the stretch in which changes may be missing is written down (``landing/lost_changes``), so it is
incomplete from then on. What the stream still has of it lands without a key, as of a table that has no
contract yet: no layer above raw takes it. It comes back when a person asks for it to be read again, as a new
table joins: it is checked, told by its contract from then on, and read above that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.durable import replace as replace_file
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.landing.encoding import content_of, decode, encode
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, blocking, require_ready
from omnisupport_ingest.sources.postgres.session.errors import TableInterrupted

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ParkedTable:
    """``reason``: what is wrong with it, in words. ``since``: when capture left it out."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class ParkedInEpoch:
    """All of one epoch, by the names of their contracts."""

    epoch: int
    tables: dict[str, ParkedTable]
    format_version: int = FORMAT_VERSION


class ParkedTables:
    """The record of one epoch of one source, in its landing folder. Written by the capture alone.

    A new epoch reads every table, so it begins without one.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._epoch = folder / f"parked-e{epoch:06d}.json", epoch

    def all(self) -> dict[str, ParkedTable]:
        """The parked tables by name; errors as of a manifest."""
        try:
            content = content_of(self._path)
        except FileNotFoundError:
            return {}
        return decode(ParkedInEpoch, content, self._path, newest=FORMAT_VERSION).tables

    def park(self, reasons: Mapping[str, str]) -> None:
        """Leave out the tables of ``reasons``, durably; one that is parked keeps its first reason."""
        held = self.all()
        now = datetime.now(UTC)
        self._write({name: ParkedTable(reason, now) for name, reason in reasons.items()} | held, held)

    def take_back(self, names: Collection[str]) -> None:
        """Leave ``names`` out no longer: each is asked for, and its snapshot is not planned yet."""
        held = self.all()
        self._write({name: table for name, table in held.items() if name not in names}, held)

    def _write(self, tables: dict[str, ParkedTable], held: dict[str, ParkedTable]) -> None:
        if tables != held:
            with gate("source.parked"):
                replace_file(self._path, encode(ParkedInEpoch(self._epoch, tables)))


def way_back(name: str) -> str:
    """What a person does about the parked table ``name``."""
    return (
        "Correct the table at the source or its contract, as `omnisupport-ingest preflight` and `omnisupport-"
        "ingest contracts diff` say, or the setting that is named. Then have it read again, and capture "
        "takes it back: "
        f'omnisupport-ingest source snapshot {name} --reason "what happened"'
    )


def ready_tables(
    findings: Sequence[Finding], tables: Sequence[TableContract]
) -> tuple[tuple[TableContract, ...], dict[str, str]]:
    """Those of ``tables`` that can be captured, and what stands in the way of each of the others, in words.

    Raises as ``require_ready`` where something stands in the way of all, or no table is left.
    """
    found = blocking(findings)
    require_ready([each for each in found if each.table is None])
    reasons: dict[str, str] = {}
    for each in found:
        if each.table is not None:
            reasons[each.table] = " ".join(filter(None, (reasons.get(each.table), each.problem)))
    ready = tuple(each for each in tables if each.name not in reasons)
    if not ready:
        require_ready(found)
    return ready, reasons


def left_out(parked: Mapping[str, ParkedTable]) -> TableInterrupted:
    """The error that names the tables that a capture leaves out."""
    names = tuple(sorted(parked))
    told = "; ".join(
        f"{name}, since {parked[name].since:%Y-%m-%d %H:%M} UTC: {parked[name].reason}" for name in names
    )
    return TableInterrupted(
        f"Capture leaves out what it cannot follow: {told}", fix=way_back(" ".join(names)), tables=names
    )
