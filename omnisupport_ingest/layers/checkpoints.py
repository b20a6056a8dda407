"""Checkpoints: written into the table by the commit they describe, and read back from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from omnisupport_ingest.cdc.dedupe import DEDUPE_KEY
from omnisupport_ingest.contracts.decision_table import SCENARIOS, DetectedScenario
from omnisupport_ingest.lake.checkpoint import Checkpoint, RuleResults
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import ContentHash, hash_of_files
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.batch_facts import BatchFacts
from omnisupport_ingest.layers.plan import REPEATED, Upstream, WindowPlan, Work
from omnisupport_ingest.layers.replay_reasons import Replaced
from omnisupport_ingest.storage import at_hand


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose checkpoint it is, and which run writes it."""

    layer: str
    source: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Events of a window: ``raw = deduped + duplicates + quarantined``."""

    raw: int = 0
    deduped: int = 0
    duplicates: int = 0
    quarantined: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.raw + other.raw,
            self.deduped + other.deduped,
            self.duplicates + other.duplicates,
            self.quarantined + other.quarantined,
        )

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Counts:
        return cls(checkpoint.raw, checkpoint.deduped, checkpoint.duplicates, checkpoint.quarantined)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a plan: the key of its work, the batches that its content then holds, and the counts.

    ``past_closing``: the watermark has closed the window by now. ``content``: hash of the content that the
    work adds, if the hashes of the written events do not give it. ``exact_share`` and ``rules``: as in
    ``Checkpoint``. ``replaced``: what the window held, if it is rebuilt. ``made_again``: as in
    ``Checkpoint``. ``made_from``: as in ``WindowState``.
    """

    idempotency_key: str
    batches: tuple[str, ...]
    facts: BatchFacts
    counts: Counts
    companions: tuple[str, ...] = ()
    upstream_version: int | None = None
    found: Mapping[DetectedScenario, int] = field(default_factory=dict)
    past_closing: bool = False
    content: ContentHash | None = None
    exact_share: float | None = None
    rules: RuleResults | None = None
    replaced: Replaced | None = None
    made_again: tuple[str, ...] = ()
    made_from: str = ""


def change_for(
    snapshot: TableSnapshot,
    plan: WindowPlan,
    upstream: Upstream,
    outcome: Outcome,
    identity: Identity,
    staged: StagedFiles,
) -> WindowChange:
    """Return the change that commits ``staged`` to the plan's window, with the checkpoint it leaves.

    An append adds the hash of its new rows to the content hash, so it costs what is new. A closed window is
    open again after an append. A window that is written whole is closed at once; one of which files stay,
    only if it was closed before.
    """
    files, folder = staged.of(plan.window), snapshot.table.folder
    before = snapshot.state(plan.window)
    content = outcome.content
    if content is None:
        holds = sorted({*plan.kept, *(file.path for file in files)})
        content = hash_of_files((at_hand(folder / path) for path in holds), "event_hash")
    if plan.work is Work.APPEND and before is not None:
        content = ContentHash.parse(before.checkpoint.content_hash) + content
    checkpoint = checkpoint_of(snapshot, plan, outcome, identity, content)
    if outcome.content is not None:
        held = before.checkpoint.rows if plan.work is Work.APPEND and before is not None else 0
        checkpoint = replace(checkpoint, rows=held + sum(file.rows for file in files))
    if outcome.replaced is not None:
        keys, why = outcome.replaced.explain(str(content))
        checkpoint = replace(
            checkpoint, replaced_hash=outcome.replaced.content_hash, keys_changed=keys, changed_by=why
        )
    kept = before if plan.work is Work.APPEND else None
    nothing_to_fold = kept is None or (kept.closed and not files)
    if plan.kept and before is not None:
        nothing_to_fold = before.closed
    checkpoint = replace(checkpoint, closed=outcome.past_closing and nothing_to_fold)
    if checkpoint.closed:
        # Content that is made again closes no window.
        was = before.checkpoint if before is not None and before.closed else None
        checkpoint = replace(checkpoint, closed_by=identity.run_id if was is None else was.closed_by)
    state = WindowState(
        generation=plan.generation,
        inputs=tuple(sorted(upstream.units)),
        upstream_table_id=upstream.table_id,
        checkpoint=checkpoint,
        batches=tuple(sorted(outcome.batches)),
        companions=tuple(sorted(outcome.companions)),
        versions=upstream.versions,
        compacted_units={
            path: names
            for path, names in (before.compacted_units if before is not None else {}).items()
            if kept is not None or path in plan.kept
        },
        carried=kept.carried if kept is not None else "",
        made_from=outcome.made_from,
    )
    if not plan.kept:
        return WindowChange(plan.window, files, (), state, plan.work is Work.REPLACE)
    leaving = tuple(file for file in snapshot.files(plan.window) if file.path not in plan.kept)
    return WindowChange(plan.window, files, leaving, state, replaces=False)


def checkpoint_of(
    snapshot: TableSnapshot, plan: WindowPlan, outcome: Outcome, identity: Identity, content: ContentHash
) -> Checkpoint:
    """The checkpoint of a window whose rows hash to ``content`` once the plan is committed."""
    facts = outcome.facts
    return Checkpoint(
        layer=identity.layer,
        table=snapshot.table.spec.path,
        source=identity.source,
        window=plan.window,
        cursor=str(facts.last) if facts.last else "",
        watermark=facts.watermark,
        dedupe_key=DEDUPE_KEY,
        idempotency_key=outcome.idempotency_key,
        last_batch_id=facts.last_batch_id,
        batches=len(outcome.batches),
        lsn_start=str(facts.first.commit_lsn) if facts.first else None,
        lsn_end=str(facts.last.commit_lsn) if facts.last else None,
        rows=content.count,
        raw=outcome.counts.raw,
        deduped=outcome.counts.deduped,
        duplicates=outcome.counts.duplicates,
        quarantined=outcome.counts.quarantined,
        content_hash=str(content),
        generation=plan.generation,
        delta_version=None,
        run_id=identity.run_id,
        committed_at=datetime.now(UTC),
        upstream_version=outcome.upstream_version,
        exact_share=outcome.exact_share,
        rules=outcome.rules,
        made_again=outcome.made_again,
        scenarios={each.scenario: count for each, count in _ordered(outcome.found)},
        detectors={each.scenario: each.detector for each, _ in _ordered(outcome.found)},
    )


def _ordered(found: Mapping[DetectedScenario, int]) -> list[tuple[DetectedScenario, int]]:
    return sorted(found.items(), key=lambda pair: pair[0].scenario)


def found_before(checkpoint: Checkpoint) -> Counter[DetectedScenario]:
    """Return the findings in a checkpoint of their window; one of an older version names no detectors."""
    return Counter(
        {
            DetectedScenario(name, checkpoint.detectors.get(name, SCENARIOS[name].detector)): count
            for name, count in checkpoint.scenarios.items()
            if name in SCENARIOS
        }
    )


def with_found(checkpoint: Checkpoint, found: DetectedScenario) -> Checkpoint:
    """Return ``checkpoint`` with ``found`` added, as a run reports it; the table does not get it."""
    count = checkpoint.scenarios.get(found.scenario, 0) + 1
    return replace(
        checkpoint,
        scenarios={**checkpoint.scenarios, found.scenario: count},
        detectors={**checkpoint.detectors, found.scenario: found.detector},
    )


def report(table: LakeTable, windows: Sequence[str], repeated: Sequence[str] = ()) -> list[Checkpoint]:
    """Return the checkpoints of ``windows`` as the newest version of ``table`` holds them.

    ``repeated``: windows that already held all that was requested; their checkpoints count that. Raises
    ``KeyError`` for a window that was never committed.
    """
    snapshot, again = table.open(), frozenset(repeated)
    found = []
    for window in windows:
        state = snapshot.state(window)
        if state is None:
            raise KeyError(f"{table.spec.path} has no checkpoint of window {window!r}")
        checkpoint = replace(state.checkpoint, delta_version=snapshot.version)
        found.append(with_found(checkpoint, REPEATED) if window in again else checkpoint)
    return found


def read(tables: Iterable[LakeTable]) -> list[Checkpoint]:
    """Every checkpoint of ``tables``, by table and window; tables that are not there yet have none."""
    found: list[Checkpoint] = []
    for table in tables:
        if not table.exists:
            continue
        snapshot = table.open()
        for window in snapshot.windows():
            state = snapshot.state(window)
            if state is not None:
                found.append(replace(state.checkpoint, delta_version=snapshot.version))
    return found
