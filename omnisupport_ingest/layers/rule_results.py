"""The results of rules for whole windows: the batches they reject, and what the checkpoint says of them.

``reject_batch``: if an event breaks a rule with this policy, every event of its table that the same batch
brought into the same window is withheld, with the reason ``batch_rejected`` and the rule's name. Raw takes in
whole batches, so a batch is judged at once, and a rebuild withholds the same events. They stay in quarantine
until a release or a corrected contract lets them continue, in order. Events that the batch brought into
another window are not withheld, because a window is made from its own events alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame

from omnisupport_ingest.cdc import dedupe
from omnisupport_ingest.cdc.broken_rules import SAMPLES, BrokenRules, RulesLookout
from omnisupport_ingest.cdc.erasing import Erasures
from omnisupport_ingest.cdc.judging import JudgingRules
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import RuleResults
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.event_tasks import Judged
from omnisupport_ingest.layers.plan import WindowPlan, Work
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.visiting import Visit


def with_rejected(marked: DataFrame, judging_rules: JudgingRules, visit: Visit | None = None) -> JudgingRules:
    """Return ``judging_rules`` with the batches that they reject among ``marked`` events
    (``dedupe.mark_copies``).

    If no rule rejects batches, nothing is judged. ``visit``: as in ``dedupe.judge``.
    """
    if not RulesLookout(judging_rules.contracts).rejects:
        return judging_rules
    # Judge without erasing or protecting values: they do not matter here, and would be changed twice.
    found = broken_in(
        dedupe.judge(marked, replace(judging_rules, erasures=Erasures()), visit), judging_rules.contracts
    )
    return replace(judging_rules, rejected=found.rejected)


def broken_in(judged: DataFrame | None, contracts: Iterable[TableContract]) -> BrokenRules:
    """Return the rules that ``judged`` events break. None: there are no events."""
    if judged is None:
        return BrokenRules()
    look = partial(_reports, contracts=tuple(contracts))
    reports = judged.mapInArrow(look, "report string").collect()
    return sum((BrokenRules.parse(each["report"]) for each in reports), BrokenRules())


def _reports(
    batches: Iterable[pa.RecordBatch], contracts: tuple[TableContract, ...]
) -> Iterator[pa.RecordBatch]:
    lookout = RulesLookout(contracts)
    for batch in batches:
        report = pa.array([lookout.found(batch).to_text()], pa.string())
        yield pa.RecordBatch.from_arrays([report], names=["report"])


def rule_results(
    workspace: Workspace, source: str, judged: Judged, plan: WindowPlan, before: WindowState | None
) -> RuleResults:
    """Return the results of rules for the checkpoint of the window of ``plan``.

    If events are appended to those of ``before``, its results are added.
    """
    broken: Counter[str] = Counter()
    keys: dict[str, tuple[str, ...]] = {}
    held = before.checkpoint.rules if before is not None and plan.work is Work.APPEND else None
    if held is not None:
        broken, keys = Counter(held.broken), dict(held.keys)
    here = judged.broken.by_window.get(plan.window, ())
    names = {each.table_name: each.name for each in workspace.contracts.of_source(source)} if here else {}
    for each in here:
        _, schema, table, rule = each
        name = f"{names.get((schema, table), table)}/{rule}"
        broken[name] += judged.broken.counts[each]
        found = judged.broken.keys.get(each, ())
        if found:
            keys[name] = tuple(sorted({*keys.get(name, ()), *found})[:SAMPLES])
    return RuleResults(dict(sorted(broken.items())), dict(sorted(keys.items())), judged.rules_share)
