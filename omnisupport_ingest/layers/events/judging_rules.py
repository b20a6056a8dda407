"""The rules that judge a source's events: its contracts, decisions, erasures, reviews and secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.contents import Contents
from omnisupport_ingest.cdc.judging import EventId, JudgingRules
from omnisupport_ingest.contracts.key_service import for_tasks
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.erasures import erased_subjects, note_joined_tables
from omnisupport_ingest.layers.events.event_copies import reviews_of_all_forms
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
