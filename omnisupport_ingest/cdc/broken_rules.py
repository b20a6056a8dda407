"""Count the row rules that judged events broke, per window, by whole columns.

Checks report these counts. A rule that lets rows pass keeps no event back, so the count and a few sample keys
are the only trace of a breach. Keys that are personal data are not kept. Copies of an event count once, and
discarded events not at all: a person has looked at them.

A rule may reject the whole batch: then the other events of the table in that batch are withheld too. This
module finds these batches in a first judging; a second judging gets them as
``judging.JudgingRules.rejected``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.event_columns import TableOfBatch
from omnisupport_ingest.cdc.judging import DISCARDED, DUPLICATE
from omnisupport_ingest.contracts.decision_table import (
    BATCH_REJECTED,
    DUPLICATE_POSITION,
    ROW_RULE,
    SCHEMA_MISMATCH,
)
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.quality import REJECT_BATCH
from omnisupport_ingest.contracts.row_columns import MISSING_COLUMN, UNKNOWN_COLUMN
from omnisupport_ingest.contracts.row_rules import policies_of

SAMPLES = 3
"""Sample keys that are kept of the rows that break one rule in one window."""

_READ_COLUMNS = ("window", "source_schema", "source_table", "key", "reason", "rules", "review_state")

_UNCOUNTED_REASONS = pa.array([BATCH_REJECTED, DUPLICATE_POSITION])
"""Reasons of events that are not counted: their rows break no rule, or another copy is counted."""

_OF_THE_ROW = pa.array([ROW_RULE, SCHEMA_MISMATCH])
"""Reasons of events whose own row breaks the rules that they name."""

_MISMATCH = f"(?s)^.*:({UNKNOWN_COLUMN}|{MISSING_COLUMN})$"
"""How a row that is not of its contract's columns names them (``contracts.row_columns``)."""

RuleOfWindow = tuple[str, str, str, str]
"""(window, schema, table, rule)"""


@dataclass
class BrokenRules:
    """The rules that some events broke.

    Attributes:
        counts: number of rows per broken rule.
        keys: sample keys of such rows, at most ``SAMPLES`` per rule.
        rejected: batches to reject, as in ``judging.JudgingRules``.
    """

    counts: Counter[RuleOfWindow] = field(default_factory=Counter)
    keys: dict[RuleOfWindow, tuple[str, ...]] = field(default_factory=dict)
    rejected: dict[TableOfBatch, tuple[str, ...]] = field(default_factory=dict)

    def __add__(self, other: BrokenRules) -> BrokenRules:
        keys = dict(self.keys)
        for rule, found in other.keys.items():
            keys[rule] = tuple(sorted({*keys.get(rule, ()), *found})[:SAMPLES])
        rejected = dict(self.rejected)
        for batch, rules in other.rejected.items():
            rejected[batch] = tuple(sorted({*rejected.get(batch, ()), *rules}))
        return BrokenRules(self.counts + other.counts, keys, rejected)

    @cached_property
    def by_window(self) -> Mapping[str, Sequence[RuleOfWindow]]:
        """The broken rules of each window. Cached: every window of a run reads it, and there may be
        thousands."""
        found: dict[str, list[RuleOfWindow]] = {}
        for rule in self.counts:
            found.setdefault(rule[0], []).append(rule)
        return found

    def to_text(self) -> str:
        """Return the rules as JSON text, in which a Spark task reports them (``parse``)."""
        return json.dumps(
            [
                [[*rule, count] for rule, count in sorted(self.counts.items())],
                [[*rule, *keys] for rule, keys in sorted(self.keys.items())],
                [[*batch, *rules] for batch, rules in sorted(self.rejected.items())],
            ]
        )

    @classmethod
    def parse(cls, text: str) -> BrokenRules:
        """Parse what ``to_text`` wrote."""
        counts, keys, rejected = json.loads(text)
        return cls(
            Counter({tuple(rule): count for *rule, count in counts}),
            {tuple(each[:4]): tuple(each[4:]) for each in keys},
            {tuple(each[:4]): tuple(each[4:]) for each in rejected},
        )


class RulesLookout:
    """Finds broken rules in judged events of the tables of ``contracts``."""

    def __init__(self, contracts: Iterable[TableContract]) -> None:
        every = {each.table_name: each for each in contracts}
        self._personal = {table_name for table_name, each in every.items() if each.personal_key}
        self._rejecting = {
            table_name: rules for table_name, each in every.items() if (rules := _rejecting(each))
        }

    @property
    def rejects(self) -> bool:
        """Whether any rule rejects batches."""
        return bool(self._rejecting)

    def found(self, judged: pa.RecordBatch) -> BrokenRules:
        """Return the rules that ``judged`` events break. ``judged`` needs ``batch_id`` only if it has events
        that are not accepted."""
        broken = pc.greater(pc.list_value_length(judged.column("rules")), 0)
        if not broken.true_count:
            return BrokenRules()
        # Copies are dropped or, if the decision table says so, quarantined. Rows of a rejected batch name the
        # rule of the row that rejected it, which is counted there.
        uncounted = pc.or_(
            pc.equal(judged.column("verdict"), DUPLICATE),
            pc.is_in(judged.column("reason"), _UNCOUNTED_REASONS),
        )
        # Accepted events reject no batch and may come without this column.
        read = [*_READ_COLUMNS, *(["batch_id"] if "batch_id" in judged.schema.names else [])]
        rows = pa.table({name: judged.column(name) for name in read}).filter(pc.and_not(broken, uncounted))
        # A discarded event still rejects its batch: its rule does not depend on reviews.
        undiscarded = rows.filter(pc.fill_null(pc.not_equal(rows["review_state"], DISCARDED), True))
        return BrokenRules(*self._count(undiscarded), self._rejected(rows))

    def _count(self, rows: pa.Table) -> tuple[Counter[RuleOfWindow], dict[RuleOfWindow, tuple[str, ...]]]:
        lists = rows["rules"].combine_chunks()
        row_of_rule = pc.list_parent_indices(lists)
        by_rule = rows.select(["window", "source_schema", "source_table", "key"]).take(row_of_rule)
        # Names of columns that no contract names are anything, and as many as there are; the event has them.
        rules = pc.replace_substring_regex(pc.list_flatten(lists), _MISMATCH, r"\1")
        by_rule = by_rule.append_column("rule", rules)
        of = ["window", "source_schema", "source_table", "rule"]
        counts: Counter[RuleOfWindow] = Counter()
        keys = {}
        for each in by_rule.group_by(of).aggregate([([], "count_all")]).to_pylist():
            rule = tuple(each[name] for name in of)
            counts[rule] = each["count_all"]
            if rule[1:3] not in self._personal:
                masks = [pc.equal(by_rule[name], value) for name, value in zip(of, rule, strict=True)]
                mask = pc.and_(pc.and_(masks[0], masks[1]), pc.and_(masks[2], masks[3]))
                first = by_rule["key"].take(pc.indices_nonzero(mask).slice(0, SAMPLES))
                keys[rule] = tuple(sorted({key for key in first.to_pylist() if key is not None}))
        return counts, keys

    def _rejected(self, rows: pa.Table) -> dict[TableOfBatch, tuple[str, ...]]:
        found: dict[TableOfBatch, tuple[str, ...]] = {}
        if not self._rejecting:
            return found
        for row in rows.filter(pc.fill_null(pc.is_in(rows["reason"], _OF_THE_ROW), False)).to_pylist():
            rules = self._rejecting.get((row["source_schema"], row["source_table"]), frozenset())
            if broken := rules & set(row["rules"]):
                batch = (row["window"], row["source_schema"], row["source_table"], row["batch_id"])
                found[batch] = tuple(sorted({*found.get(batch, ()), *broken}))
        return found


def _rejecting(contract: TableContract) -> frozenset[str]:
    return frozenset(name for name, policy in policies_of(contract).items() if policy == REJECT_BATCH)
