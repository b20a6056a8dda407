"""Judging events, in plain Python on Arrow batches: what ``dedupe.judge`` hands to Spark's workers.

The rules of hundreds of tables are a table of functions here; as column expressions they would be a
plan of thousands of nodes, built again for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.windows import OUT_OF_RANGE

ACCEPTED, DUPLICATE, QUARANTINED = "accepted", "duplicate", "quarantined"

DETECTORS = {
    "out_of_range": "window",
    "collision": "dedupe_key",
    "older_epoch": "epoch",
    "malformed_image": "envelope",
    "row_rule": "contract",
}
"""Reason of a quarantined event → what found it, in the order in which reasons count."""

_IMAGE_OPS = frozenset("cur")
_MARKS = ("copy", "collision")


def judge_batches(
    batches: Iterable[pa.RecordBatch], contracts: Sequence[TableContract]
) -> Iterator[pa.RecordBatch]:
    """Add ``rules``, ``reason``, ``verdict`` and ``detector`` to marked events, taking the marks away."""
    rules_of = _RulesOfTables(contracts)
    for batch in batches:
        kept = [name for name in batch.schema.names if name not in _MARKS]
        yield pa.RecordBatch.from_arrays(
            [*(batch.column(name) for name in kept), *_judged(batch, rules_of)],
            names=[*kept, "rules", "reason", "verdict", "detector"],
        )


class _RulesOfTables:
    """The rules of each table's contract, made when the first event of the table comes by."""

    def __init__(self, contracts: Sequence[TableContract]) -> None:
        self._contracts = {(each.schema, each.table): each for each in contracts}
        self._rules: dict[tuple[str, str], RowRules | None] = {}

    def broken(self, place: tuple[str, str], image: Mapping[str, str | None]) -> list[str]:
        if place not in self._rules:
            contract = self._contracts.get(place)
            self._rules[place] = None if contract is None else RowRules(contract)
        rules = self._rules[place]
        return rules.broken(image) if rules is not None else []


def _judged(batch: pa.RecordBatch, rules_of: _RulesOfTables) -> list[pa.Array]:
    names = ("window", "copy", "collision", "epoch", "newest_epoch_before", "op", "key", "after")
    columns = [batch.column(name).to_pylist() for name in (*names, "source_schema", "source_table")]
    rules: list[Sequence[str]] = []
    reasons: list[str | None] = []
    verdicts: list[str] = []
    for window, copy, collision, epoch, newest, op, key, after, schema, table in zip(*columns, strict=True):
        broken: Sequence[str] = ()
        malformed = False
        if op in _IMAGE_OPS:
            image = read_image(after)
            malformed = image is None or key is None
            if image is not None:
                broken = rules_of.broken((schema, table), image)
        reason: str | None
        if window == OUT_OF_RANGE:
            reason = "out_of_range"
        elif collision:
            reason = "collision"
        elif newest is not None and newest > epoch:
            reason = "older_epoch"
        elif malformed:
            reason = "malformed_image"
        else:
            reason = "row_rule" if broken else None
        rules.append(broken)
        reasons.append(reason)
        verdicts.append(DUPLICATE if copy > 1 else ACCEPTED if reason is None else QUARANTINED)
    return [
        pa.array(rules, pa.list_(pa.string())),
        pa.array(reasons, pa.string()),
        pa.array(verdicts, pa.string()),
        pa.array([None if reason is None else DETECTORS[reason] for reason in reasons], pa.string()),
    ]
