"""The results of rules for whole windows: the batches they reject, and what the checkpoint says of them.

``reject_batch``: if an event breaks a rule with this policy, every event of its table that the same batch
brought into the same window is withheld, with the reason ``batch_rejected`` and the rule's name. Raw takes in
whole batches, so a batch is judged at once, and a rebuild withholds the same events. They stay in quarantine
until a release or a corrected contract lets them continue, in order. Events that the batch brought into
another window are not withheld, because a window is made from its own events alone.
"""

from __future__ import annotations

from collections import Counter

from omnisupport_ingest.cdc.broken_rules import SAMPLES
from omnisupport_ingest.lake.checkpoint import RuleResults
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.events.event_tasks import Judged
from omnisupport_ingest.layers.plan import WindowPlan, Work
from omnisupport_ingest.layers.workspace import Workspace


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
