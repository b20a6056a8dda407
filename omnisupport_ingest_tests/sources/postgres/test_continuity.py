"""When a slot continues what has landed, as a truth table."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.continuity import LandedTransaction, ResumePoint, resume_point
from omnisupport_ingest.sources.postgres.errors import HoleInSource
from omnisupport_ingest.sources.postgres.server import ServerFacts, SlotFacts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVER = ServerFacts("7001", 1, "support", "18.4", "logical")
EPOCH = EpochRecord(1, "first start", NOW, EpochFacts("7001", 1, "slot", Lsn(10), "support", "18.4"))
SLOT = SlotFacts("slot", "pgoutput", "support", None, Lsn(5), Lsn(100), "reserved", 0)
LAST = LandedTransaction(Lsn(90), 42, NOW)
END = Lsn(100)


def test_last_transaction_is_asked_for_again_while_the_slot_allows_it() -> None:
    slot = replace(SLOT, confirmed_flush_lsn=Lsn(90))
    assert resume_point(EPOCH, END, LAST, SERVER, Lsn(200), slot) == ResumePoint(Lsn(90), END, LAST, Lsn(90))


@pytest.mark.parametrize("confirmed", [Lsn(91), Lsn(100)])
def test_confirmed_chain_is_continued_at_its_end(confirmed: Lsn) -> None:
    slot = replace(SLOT, confirmed_flush_lsn=confirmed)
    recovered_from = confirmed if confirmed < END else None
    expected = ResumePoint(END, END, None, recovered_from)
    assert resume_point(EPOCH, END, LAST, SERVER, Lsn(100), slot) == expected


def test_chain_without_a_transaction_starts_at_its_end_however_far_the_slot_went_back() -> None:
    slot = replace(SLOT, confirmed_flush_lsn=Lsn(10))
    assert resume_point(EPOCH, END, None, SERVER, Lsn(100), slot) == ResumePoint(END, END, None, Lsn(10))


@pytest.mark.parametrize(
    ("server", "flushed", "slot", "named"),
    [
        (replace(SERVER, system_identifier="7002"), Lsn(200), SLOT, "another database server"),
        (replace(SERVER, timeline=2), Lsn(200), SLOT, "another timeline"),
        (replace(SERVER, database="other"), Lsn(200), SLOT, "another database"),
        (SERVER, Lsn(200), None, "is gone"),
        (SERVER, Lsn(200), replace(SLOT, plugin="test_decoding"), "is gone"),
        (SERVER, Lsn(200), replace(SLOT, wal_status="lost"), "removed WAL"),
        (SERVER, Lsn(99), SLOT, "restored from a backup"),
        (SERVER, Lsn(99), replace(SLOT, confirmed_flush_lsn=Lsn(50)), "restored from a backup"),
        (SERVER, Lsn(200), replace(SLOT, confirmed_flush_lsn=Lsn(101)), "read by somebody else"),
    ],
)
def test_anything_else_is_a_hole(
    server: ServerFacts, flushed: Lsn, slot: SlotFacts | None, named: str
) -> None:
    with pytest.raises(HoleInSource, match=named) as hole:
        resume_point(EPOCH, END, LAST, server, flushed, slot)
    assert "--new-epoch" in hole.value.fix
