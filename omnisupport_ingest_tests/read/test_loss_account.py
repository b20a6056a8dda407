"""Did we lose anything? The verdict from what is known of epochs, and the account of a home."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing.accepted_losses import AcceptedLoss, AcceptedLosses
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.completeness import Incomplete
from omnisupport_ingest.landing.lost_changes import LostChanges, LostStretch
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.loss_account import (
    EpochAccount,
    LossAccount,
    OffsetsGone,
    Verdict,
    loss_account,
)
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EPOCH = EpochAccount(1, "first", NOON, "slot", Lsn(0), Lsn(20), 2, 4, None, None, (), 0)
WHOLE = LossAccount("desk", (EPOCH,), (), (), {}, None)

GAP = Gap(1, "a", Lsn(20), "b", Lsn(30))
LOSS = AcceptedLoss(2, NOON, "ana", "restored", Lsn(20), Lsn(90))
STRETCH = LostStretch("notes", "not published", NOON, Lsn(10))
SECOND = replace(EPOCH, number=2)


def of(**facts: Any) -> LossAccount:
    return replace(WHOLE, epochs=(replace(EPOCH, **facts),))


@pytest.mark.parametrize(
    ("account", "verdict"),
    [
        (WHOLE, Verdict.NOTHING_LOST),
        (replace(WHOLE, epochs=()), Verdict.NOTHING_LANDED),
        (of(gap=GAP), Verdict.MISSING),
        (of(gap=replace(GAP, later_epoch=2)), Verdict.NAMED),
        (of(missed=(STRETCH,)), Verdict.MISSING),
        (of(missed=(replace(STRETCH, lost_to=Lsn(15)),)), Verdict.NAMED),
        (of(accepted=LOSS), Verdict.NAMED),
        (replace(WHOLE, epochs=(EPOCH, SECOND)), Verdict.NAMED),
        (replace(WHOLE, incomplete=(Incomplete("notes", "not read", "wait"),)), Verdict.MISSING),
        (replace(WHOLE, slot_problem="the slot is gone"), Verdict.MISSING),
        (replace(WHOLE, slot_unknown="no answer"), Verdict.UNKNOWN),
        (replace(WHOLE, slot_unknown="no answer", withheld={"open": 2}), Verdict.UNKNOWN),
        (replace(of(gap=GAP), slot_unknown="no answer"), Verdict.MISSING),
        (replace(WHOLE, withheld={"open": 2}), Verdict.WITHHELD),
        (replace(WHOLE, withheld={"discarded": 2}), Verdict.NOTHING_LOST),
        (replace(WHOLE, offsets_gone=(OffsetsGone("t", 0, 5, 3, "old"),)), Verdict.NAMED),
        (replace(of(gap=GAP), withheld={"open": 2}), Verdict.MISSING),
    ],
)
def test_the_verdict_is_the_worst_that_is_known(account: LossAccount, verdict: Verdict) -> None:
    assert account.verdict is verdict
    assert account.sentence.endswith(".") or ":" in account.sentence
    assert account.verdict.is_finding == (verdict in (Verdict.MISSING, Verdict.UNKNOWN, Verdict.WITHHELD))


def test_nobody_says_that_nothing_was_lost_before_the_server_has_answered() -> None:
    silent = replace(WHOLE, slot_unknown="no answer")
    assert silent.sentence == (
        "Of desk, all is there, 4 events of 2 batches, without a gap; whether the server still has what "
        "comes next is not known."
    )
    assert "1 stretch named below" in replace(of(accepted=LOSS), slot_unknown="no answer").sentence


def test_a_new_epoch_is_one_stretch_whether_a_gap_or_an_accepted_loss_explains_it() -> None:
    repaired = replace(EPOCH, gap=replace(GAP, later_epoch=2))
    assert replace(WHOLE, epochs=(repaired, SECOND)).named_losses == 1
    assert replace(WHOLE, epochs=(EPOCH, replace(SECOND, accepted=LOSS))).named_losses == 1
    assert replace(WHOLE, epochs=(EPOCH, SECOND)).named_losses == 1


def test_events_in_quarantine_do_not_hide_what_was_lost() -> None:
    one = replace(WHOLE, withheld={"open": 1})
    assert one.sentence == "Nothing of desk was lost, and 1 event in quarantine waits for a decision."
    both = replace(of(accepted=LOSS), withheld={"open": 2})
    assert both.verdict is Verdict.WITHHELD
    assert "was lost" not in both.sentence
    assert "1 stretch named below" in both.sentence
    assert "2 events in quarantine wait for a decision" in both.sentence


def test_deleted_offsets_are_not_said_to_be_read_again() -> None:
    gone = replace(WHOLE, offsets_gone=(OffsetsGone("t", 0, 5, 3, "old"),))
    assert gone.sentence == (
        "Messages of desk were deleted before they were read, and that was accepted: of 1 stretch named "
        "below nothing is known."
    )
    assert "a decision" in replace(gone, withheld={"open": 2}).sentence


EMPTY = Commit(5, 0, [])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A home whose table was read whole, with two batches of the stream."""
    story = Story(tmp_path)
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one"})]))
    story.land(Commit(20, 2, [Change("u", 1, {"title": "two"})]))
    return story


def account(story: Story) -> LossAccount:
    return loss_account(story.workspace, SOURCE, withheld={})


def test_a_chain_without_a_gap_lost_nothing(story: Story) -> None:
    found = account(story)
    assert found.verdict is Verdict.NOTHING_LOST
    assert [(each.number, each.end, each.events) for each in found.epochs] == [
        (1, Lsn(20), 3)
    ]  # the end of the snapshot is one
    assert ", 3 events of" in found.sentence


def test_a_batch_that_is_gone_is_a_gap(story: Story) -> None:
    story.land(Commit(30, 3, [Change("u", 1, {"title": "three"})]))
    middle = next(each for each in story.store.batch_ids("e000001-s") if each.endswith(f"{10:016x}"))
    (story.store.folder / "manifests" / f"{middle}.json").unlink()
    found = account(story)
    assert found.verdict is Verdict.MISSING
    assert [(str(each.expected), str(each.continued)) for each in found.open_gaps] == [("0/A", "0/14")]


def test_missed_changes_are_missing_until_the_table_was_read_again(story: Story) -> None:
    LostChanges(story.store.folder, 1).add("notes", "not published", Lsn(12))
    assert account(story).verdict is Verdict.MISSING


def test_of_a_table_without_a_contract_nothing_is_missing_though_it_was_left_out(story: Story) -> None:
    LostChanges(story.store.folder, 1).add("withdrawn", "no contract named it", Lsn(12))
    assert account(story).verdict is Verdict.NOTHING_LOST
    LostChanges(story.store.folder, 1).add("withdrawn", "not published", Lsn(3), Lsn(9))
    assert [str(each.lost_to) for each in account(story).epochs[0].missed] == ["0/9"], "what is known stays"


def test_a_loss_that_somebody_accepted_is_named_with_who_did(story: Story) -> None:
    AcceptedLosses(story.store.folder).accept(1, "ana", "restored", Lsn(1), Lsn(5), of_another_history=False)
    found = account(story)
    assert found.verdict is Verdict.NAMED
    assert found.epochs[0].accepted is not None
    assert found.epochs[0].accepted.by == "ana"
