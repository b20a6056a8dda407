"""What every story of a way in does once its windows are old: take in, give up, make again, look."""

from __future__ import annotations

from collections import Counter

from pyspark.sql import SparkSession

from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.removed import LANDING, RAW, Present, Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.plan import RetentionPlan, plan_retention
from omnisupport_ingest.retention.removing import carry_out

KEPT = {"landing": "P7D", "raw": "P10D"}


def take_all(workspace: Workspace, source: str, spark: SparkSession) -> None:
    """Rounds of the sensors until nothing is pending; a round that changes nothing is a fault."""
    for _ in range(6):
        workspace = Workspace.open(workspace.settings)
        pending = pending_windows(workspace, source)
        if pending.nothing:
            return
        for windows, replay in ((pending.windows, False), (pending.late_windows, True)):
            if windows:
                fold(workspace, source, spark, windows, replay=replay)
    raise AssertionError(f"still pending: {pending_windows(workspace, source)}")


def fold(
    workspace: Workspace,
    source: str,
    spark: SparkSession,
    windows: tuple[str, ...] | list[str],
    *,
    replay: bool,
) -> None:
    """Take ``windows`` through every layer."""
    for layer in (raw, deduped):
        layer.materialize(workspace, spark, source, windows, "run", replay=replay)
    for contract in workspace.contracts.of_source(source):
        net_changes.materialize(workspace, spark, contract, windows, "run", replay=replay)
        dimensions.update(workspace, spark, contract, "run")


def give_up(workspace: Workspace, source: str) -> RetentionPlan:
    """Remove what contracts give up; return what was planned. A second call removes nothing."""
    at = Workspace.open(workspace.settings)
    planned = plan_retention(at, source)
    assert planned.doomed
    data = at.landing(source).folder / "data"
    before = len([*data.rglob("*.parquet")])
    carry_out(at, planned, removed_by="test")
    assert len([*data.rglob("*.parquet")]) == before - sum(each.files for each in planned.of(LANDING))
    assert carry_out(at, plan_retention(at, source), removed_by="test") == []
    raw_table = at.raw(source).open()
    assert all(raw_table.files(each.window) == () for each in planned.of(RAW))
    assert whole(at, source)
    assert pending_windows(at, source).nothing
    return planned


def whole(workspace: Workspace, source: str) -> bool:
    """Whether `landing verify` finds all that retention left as it landed."""
    store = workspace.landing(source)
    present = Present(store, Removed.open(workspace, source))
    return not [each for each in check_landing(store, present.has).damage if each.kind != "epoch"]


def sealed(workspace: Workspace, source: str) -> frozenset[str]:
    return Removed.open(workspace, source).sealed


def shown(workspace: Workspace, source: str) -> list[str]:
    """The content hash of each dimension."""
    found = []
    for contract in workspace.contracts.of_source(source):
        state = workspace.dimension(contract).open().state(WHOLE_TABLE)
        assert state is not None
        found.append(state.checkpoint.content_hash)
    return found


def made_again(workspace: Workspace, source: str, spark: SparkSession) -> list[str]:
    """What ``shown`` returns once all is folded anew from the deduped events."""
    windows = workspace.landing(source).windows()
    fold(workspace, source, spark, windows, replay=True)
    for contract in workspace.contracts.of_source(source):
        dimensions.update(workspace, spark, contract, "again", whole=True)
    return shown(workspace, source)


def reasons(workspace: Workspace, source: str) -> Counter[tuple[str, str]]:
    """How many events wait in quarantine, by window and reason."""
    judged = workspace.deduped(source).open()
    found: Counter[tuple[str, str]] = Counter()
    for window in judged.windows():
        state = judged.state(window)
        for reason, count in (state.checkpoint.scenarios if state is not None else {}).items():
            if reason == "too_late_arrival":
                found[window, reason] += count
    return found
