"""``ledger``: did we lose anything?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import (
    contracted_source,
    open_settings,
    open_workspace,
    sources_in_use,
)
from omnisupport_ingest.cli.status_logs import log_probes
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.read.loss_account import EpochAccount, LossAccount, loss_account
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.sources.postgres.session.server import SourceAnswer
from omnisupport_ingest.storage import has_landed

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.settings import Settings

_SOURCE_SECONDS = 5.0
"""Seconds that the source may take to report the state of its slot."""


@click.command()
@click.option("--source", metavar="NAME", help="Only this source.  [default: all of which anything landed]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ledger(source: str | None, as_json: bool) -> int:
    """Say whether anything was lost: the chain, gaps, accepted losses, missed changes, withheld events.

    The first line of a source is the verdict. Below it stand its epochs, from the creation of the slot to
    now: what landed without a gap, and every stretch of which changes are not known, with who accepted it or
    when it was noticed. Reads manifests, notes and quarantine; waits up to five seconds for the server to say
    whether the slot is still there. `landing verify` also reads every landed file.

    \b
    nothing_lost   every change since the slot was made is there
    named          single changes of some stretches are not known, and that is accepted or the tables were
                   read again since; messages that a topic has deleted are not
    withheld       nothing else is to be done, and events in quarantine wait for a decision
    unknown        what landed is whole or named, and the server did not say whether it still has the slot
    missing        a gap, a lost slot, missed changes or an unfinished snapshot: something is to be done

    \b
    Examples:
      omnisupport-ingest ledger
      omnisupport-ingest ledger --json | jq -r '.sources[] | .verdict'

    Exit code: 0 nothing lost, or all of it named and read again; 1 missing, unknown or withheld, 2 usage or
    settings, 3 no home.
    """
    accounts = _accounts(source)
    if as_json:
        render.echo_json({"sources": [_document(each) for each in accounts]})
    else:
        _show(accounts)
    return FINDINGS if any(each.verdict.is_finding for each in accounts) else 0


def account_documents() -> list[dict[str, Any]]:
    """The accounts of all sources that are in use, as JSON values."""
    return [_document(each) for each in _accounts(None)]


def _accounts(source: str | None) -> list[LossAccount]:
    settings = open_settings()
    workspace = open_workspace(settings)
    chosen = [contracted_source(workspace, source)] if source is not None else sources_in_use(workspace)
    slots = _slots(settings, workspace)
    return [_account(workspace, each, slots.get(each, _Slot())) for each in chosen]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Why the server of a log cannot send what comes next, or why that is not known; both None if it can."""

    problem: str | None = None
    unknown: str | None = None


def _account(workspace: Workspace, source: str, slot: _Slot) -> LossAccount:
    reviews = ReviewLedger.open(workspace, source)
    withheld = Counter(each.state for each in quarantined(workspace, source, reviews))
    return loss_account(
        workspace, source, withheld=withheld, slot_problem=slot.problem, slot_unknown=slot.unknown
    )


def _slots(settings: Settings, workspace: Workspace) -> dict[str, _Slot]:
    """Return what the servers say of the slots of captured sources."""
    slots, answered_by = {}, time.monotonic() + _SOURCE_SECONDS
    for log, look in log_probes(settings, workspace.home, workspace.contracts):
        if not _captured(workspace, log.source):
            continue
        if isinstance(look, SourceAnswer):
            answer = look
        else:
            answer = look.result(max(0.0, answered_by - time.monotonic()))
        if not answer.reachable:
            slots[log.source] = _Slot(unknown=answer.problem or "the server does not answer")
        elif answer.slot is None:
            slots[log.source] = _Slot(f"the slot {log.slot} is not on the server any more")
        elif answer.slot.wal_status == "lost":
            slots[log.source] = _Slot(f"the server has given up the slot {log.slot}")
    return slots


def _captured(workspace: Workspace, source: str) -> bool:
    return has_landed(workspace.home.path, source) and workspace.landing(source).landed().captured


# --- as JSON -----------------------------------------------------------------------------------------------


def _document(account: LossAccount) -> dict[str, Any]:
    return {
        "source": account.source,
        "verdict": account.verdict.value,
        "sentence": account.sentence,
        "slot_problem": account.slot_problem,
        "slot_unknown": account.slot_unknown,
        "epochs": [_epoch_document(each) for each in account.epochs],
        "incomplete_tables": [
            {"table": each.table, "problem": each.problem, "fix": each.fix} for each in account.incomplete
        ],
        "offsets_gone": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "start": each.start,
                "gone": each.gone,
                "accepted": each.accepted,
            }
            for each in account.offsets_gone
        ],
        "withheld": dict(account.withheld),
    }


def _epoch_document(epoch: EpochAccount) -> dict[str, Any]:
    loss = epoch.accepted
    return {
        "epoch": epoch.number,
        "reason": epoch.reason,
        "began_at": render.iso(epoch.began_at),
        "slot": epoch.slot,
        "from_lsn": _text(epoch.start),
        "to_lsn": _text(epoch.end),
        "batches": epoch.batches,
        "events": epoch.events,
        "sent_again_and_recognized": epoch.proved,
        "gap": None
        if epoch.gap is None
        else {
            "from_lsn": str(epoch.gap.expected),
            "to_lsn": str(epoch.gap.continued),
            "repaired_by_epoch": epoch.gap.later_epoch,
            "fix": epoch.gap.fix,
        },
        "accepted_loss": None
        if loss is None
        else {
            "from_lsn": _text(loss.lost_from),
            "to_lsn": _text(loss.lost_to),
            "by": loss.by,
            "reason": loss.reason,
            "at": loss.at.isoformat(),
        },
        "missed_changes": [
            {
                "table": each.table,
                "reason": each.reason,
                "noticed_at": each.noticed_at.isoformat(),
                "from_lsn": str(each.lost_from),
                "read_again_from_lsn": _text(each.lost_to or each.mended),
            }
            for each in epoch.missed
        ],
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# --- for people --------------------------------------------------------------------------------------------


def _show(accounts: list[LossAccount]) -> None:
    if not accounts:
        click.echo("Nothing has landed yet, so nothing can be lost.")
    for number, account in enumerate(accounts):
        if number:
            click.echo()
        render.heading(account.sentence)
        render.facts(_facts(account), indent=2, label=17)


def _facts(account: LossAccount) -> Iterator[tuple[str, str]]:
    if account.slot_problem:
        yield "MISSING", f"{account.slot_problem}: omnisupport-ingest source status {account.source}"
    if account.slot_unknown:
        yield "UNKNOWN", f"whether the server still has the slot: {account.slot_unknown}"
    for epoch in account.epochs:
        yield from _epoch_facts(epoch)
    for each in account.incomplete:
        yield "INCOMPLETE", each.problem
        yield "fix", each.fix
    for gone in account.offsets_gone:
        where = f"{gone.topic}[{gone.partition}] from {gone.start:,} on"
        yield "offsets gone", f"{gone.gone:,} of {where}, accepted: {gone.accepted}"
    if account.withheld:
        counts = ", ".join(f"{count:,} {state}" for state, count in sorted(account.withheld.items()))
        yield "withheld events", f"{counts} (omnisupport-ingest quarantine list)"
    elif account.epochs:
        yield "withheld events", "none"


def _epoch_facts(epoch: EpochAccount) -> Iterator[tuple[str, str]]:
    slot = f", slot {epoch.slot}" if epoch.slot else ""
    yield f"epoch {epoch.number}", f"began {render.clock(epoch.began_at)}{slot}: {epoch.reason}"
    landed = ", ".join(
        render.counted(count, noun) for count, noun in ((epoch.events, "event"), (epoch.batches, "batch"))
    )
    span = f"{epoch.start or 'its first batch'} to {epoch.end}" if epoch.end is not None else "no stream"
    yield "  chain", f"{span}: {landed}"
    if epoch.proved:
        yield "  restarts", f"{epoch.proved:,} after a crash; what was sent again was recognized"
    if epoch.accepted is not None:
        loss = epoch.accepted
        span = f"{loss.lost_from or 'the beginning'} to {loss.lost_to or 'the start of the epoch'}"
        yield "  accepted loss", f"{span}, by {loss.by}, {render.clock(loss.at)}: {loss.reason}"
    if epoch.gap is not None:
        span = f"{epoch.gap.expected} to {epoch.gap.continued}"
        if not epoch.gap.is_repaired:
            yield "  GAP", span
            yield "  fix", epoch.gap.fix
        else:
            yield "  gap", f"{span}; epoch {epoch.gap.later_epoch} has begun since"
    for each in epoch.missed:
        until = each.lost_to or each.mended
        title = "  missed changes" if until is not None else "  MISSED CHANGES"
        end = f"until it was read again at {until}" if until is not None else "and it was not read again"
        yield title, f"{each.table} from {each.lost_from} on ({each.reason}), {end}"
