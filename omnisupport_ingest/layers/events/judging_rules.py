"""The rules that judge a source's events, and what they find in whole windows.

The rules are the source's contracts, decisions, erasures, reviews and secrets.

``reject_batch``: if an event breaks a rule with this policy, every event of its table that the same batch
brought into the same window is withheld, with the reason ``batch_rejected`` and the rule's name. Raw takes in
whole batches, so a batch is judged at once, and a rebuild withholds the same events. They stay in quarantine
until a release or a corrected contract lets them continue, in order. Events that the batch brought into
another window are not withheld, because a window is made from its own events alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.broken_rules import SAMPLES
from omnisupport_ingest.cdc.contents import Contents
from omnisupport_ingest.cdc.event_columns import EventId
from omnisupport_ingest.cdc.judging import JudgingRules
from omnisupport_ingest.contracts.key_service import for_tasks
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.lake.checkpoint import RuleResults
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.erasures import erased_subjects, note_joined_tables
from omnisupport_ingest.layers.events.event_copies import reviews_of_all_forms
from omnisupport_ingest.layers.events.event_tasks import Judged
from omnisupport_ingest.layers.plan import WindowPlan, Work
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.visiting import Visit


def judging_rules_of(
    workspace: Workspace, spark: SparkSession, source: str, windows: Iterable[str]
) -> JudgingRules:
    """Return the rules in force for the events of ``windows``, usable by tasks of ``spark``."""
    raw = workspace.raw(source).open()
    versions = RulesVersions(workspace, source)
    return for_spark(workspace, spark, rules_in_force(workspace, source, versions, raw, windows))


def for_spark(workspace: Workspace, spark: SparkSession, rules: JudgingRules) -> JudgingRules:
    """Return ``rules`` with secrets that tasks of ``spark`` can use, even if they do not see the home."""
    if Visit.of(spark, workspace.home.lake / "any") is None:
        return rules
    return replace(rules, secrets=for_tasks(rules.secrets, workspace.settings))


def rules_in_force(
    workspace: Workspace, source: str, versions: RulesVersions, raw: TableSnapshot, windows: Iterable[str]
) -> JudgingRules:
    """Return the rules for the events of ``windows`` in ``raw``, for this process. ``versions``: read
    before. A table that shares an erased subject now keeps its name from here on."""
    note_joined_tables(workspace, source)
    rules = JudgingRules(
        contracts=workspace.contracts.of_source(source),
        decisions=workspace.decisions,
        window_length=workspace.grid.size.length,
        erasures=versions.erasures.in_force(),
        subjects=erased_subjects(workspace, source),
        secrets=workspace.secrets(workspace.contracts.of_source(source)),
        row_columns=versions.row_columns,
    )
    contents, reviews = contents_of(rules), dict[EventId, str]()
    for window in windows:
        if reviewed := versions.reviews.of_window(window):
            reviews |= reviews_of_all_forms(raw.files(window), contents, reviewed)
    return replace(rules, reviews=reviews)


def contents_of(judging_rules: JudgingRules) -> Contents:
    """Return how the contents of events are compared, which tells copies from collisions."""
    return Contents(judging_rules.contracts, judging_rules.secrets.subjects)


def contracts_needed(
    contracts: Sequence[TableContract], tables: Iterable[frozenset[str] | None]
) -> tuple[TableContract, ...]:
    """Return those of the source's ``contracts`` that judging the events of ``tables`` needs; only these are
    sent to tasks.

    ``tables``: of each window, by full name; None: any table, so all contracts are needed. A contract that
    protects values is always kept: with one, events without a contract are protected too.
    """
    named: set[str] = set()
    for each in tables:
        if each is None:
            return tuple(contracts)
        named |= each
    protected = next((each for each in contracts if needs_protection(each)), None)
    return tuple(each for each in contracts if each.full_name in named or each is protected)


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
