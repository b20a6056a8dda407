"""When a slot continues what has landed, as a truth table."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.errors import AnotherSource, GapInSource
from omnisupport_ingest.sources.postgres.session.server import ServerFacts, SlotFacts
from omnisupport_ingest.sources.postgres.slot.continuity import (
    LandedChain,
    LandedTransaction,
    ResumePoint,
    resume_point,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVER = ServerFacts("7001", 1, "support", "18.4")
EPOCH = EpochRecord(1, "first start", NOW, EpochFacts("7001", 1, "slot", Lsn(10), "support", "18.4"))
SLOT = SlotFacts("slot", "pgoutput", "support", None, Lsn(5), Lsn(100), "reserved", 0)
LOST = replace(SLOT, wal_status="lost")
LAST = LandedTransaction(Lsn(90), 42, NOW)
END = Lsn(100)
CHAIN = LandedChain(END, LAST, frozenset({Lsn(94), Lsn(97), END}))


def test_last_transaction_is_asked_for_again_while_the_slot_allows_it() -> None:
    slot = replace(SLOT, confirmed_flush_lsn=Lsn(90))
    point = resume_point(EPOCH, CHAIN, SERVER, Lsn(200), slot)
    assert point == ResumePoint(Lsn(90), END, LAST, Lsn(90)) and not point.proved


@pytest.mark.parametrize(
    ("confirmed", "recovered_from"), [(Lsn(94), Lsn(94)), (Lsn(97), Lsn(97)), (END, None)]
)
def test_confirmed_chain_is_continued_where_the_slot_stands(
    confirmed: Lsn, recovered_from: Lsn | None
) -> None:
    slot = replace(SLOT, confirmed_flush_lsn=confirmed)
    point = resume_point(EPOCH, CHAIN, SERVER, Lsn(100), slot)
    assert point == ResumePoint(confirmed, END, None, recovered_from)
    assert point.proved is (confirmed == END)


def test_chain_without_a_transaction_is_continued_where_the_slot_stands_too() -> None:
    slot = replace(SLOT, confirmed_flush_lsn=Lsn(10))
    chain = LandedChain(END, None, frozenset({Lsn(10), END}))
    assert resume_point(EPOCH, chain, SERVER, Lsn(200), slot) == ResumePoint(Lsn(10), END, None, Lsn(10))


@pytest.mark.parametrize(
    ("server", "flushed", "slot", "named"),
    [
        (replace(SERVER, system_identifier="7002"), Lsn(200), SLOT, "another database server"),
        (replace(SERVER, timeline=2), Lsn(200), SLOT, "another timeline"),
        (replace(SERVER, database="other"), Lsn(200), SLOT, "another database"),
        (SERVER, Lsn(200), None, "is gone"),
        (SERVER, Lsn(200), replace(SLOT, plugin="test_decoding"), "is gone"),
        (SERVER, Lsn(200), LOST, "removed WAL"),
        (SERVER, Lsn(200), replace(LOST, invalidated="wal_removed"), "removed WAL"),
        (SERVER, Lsn(200), replace(LOST, invalidated="idle_timeout"), "longer than idle_replication_slot"),
        (SERVER, Lsn(200), replace(LOST, invalidated="rows_removed"), "rows of the catalog .* a standby"),
        (SERVER, Lsn(200), replace(LOST, invalidated="wal_level_insufficient"), "wal_level was below"),
        # Of a server that is newer than all that is known here.
        (SERVER, Lsn(200), replace(LOST, invalidated="moon_phase"), "given up the slot slot: moon_phase"),
        (SERVER, Lsn(99), SLOT, "restored from a backup"),
        (SERVER, Lsn(99), replace(SLOT, confirmed_flush_lsn=Lsn(50)), "restored from a backup"),
        (SERVER, Lsn(200), replace(SLOT, confirmed_flush_lsn=Lsn(101)), "read by somebody else"),
        (SERVER, Lsn(200), replace(SLOT, confirmed_flush_lsn=Lsn(95)), "where no batch ends"),
    ],
)
def test_anything_else_is_a_gap(
    server: ServerFacts, flushed: Lsn, slot: SlotFacts | None, named: str
) -> None:
    with pytest.raises(GapInSource, match=named) as gap:
        resume_point(EPOCH, CHAIN, server, flushed, slot)
    assert "--new-epoch" in gap.value.fix


def test_other_server_or_database_is_told_from_a_gap_that_may_be_repaired_by_itself() -> None:
    for server, kind in [
        (replace(SERVER, system_identifier="7002"), AnotherSource),
        (replace(SERVER, database="other"), AnotherSource),
        (replace(SERVER, timeline=2), GapInSource),
    ]:
        with pytest.raises(GapInSource) as gap:
            resume_point(EPOCH, CHAIN, server, Lsn(200), SLOT)
        assert type(gap.value) is kind
