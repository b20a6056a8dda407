"""The checkpoint of a window: how far the window of one layer is complete, as its last commit recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class MergeCost:
    """What one in-place update of a table cost.

    ``keys``: keys whose row changed. ``rows``: rows of the table before. ``files``: files written again.
    ``held``: files of the table before.
    """

    keys: int
    rows: int
    files: int
    held: int


@dataclass(frozen=True, slots=True)
class MarkedRows:
    """What updates by deletion vectors left in a table: ``dead`` rows, marked as deleted in files that stay,
    and ``fresh_rows`` live rows in ``fresh_files``, files of any keys."""

    dead: int
    fresh_files: int
    fresh_rows: int


@dataclass(frozen=True, slots=True)
class RuleResults:
    """What checking the events of a window against the rules of their contracts found and cost.

    ``broken``: number of events that break a rule, by ``<table>/<rule>``, whatever its policy. ``keys``: a
    few of their keys, for tables whose key is no personal data. ``share``: the rules' share of the time that
    the run's tasks spent judging, over all its windows, from 0 to 1; None where it was not measured.
    """

    broken: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The record of one window after a commit; kept in the table, mirrored in run metadata.

    ``cursor``: text of the last event (or name of the last batch) consumed, inclusive. ``dedupe_key``: what
    identifies an event. ``idempotency_key``: what identifies the work that was done. ``rows``: rows that the
    layer holds for the window; the counts add up as ``raw = deduped + duplicates + quarantined``.
    ``content_hash``: depends on the rows alone, not on their split into files. ``delta_version``: None inside
    the table, because the log numbers a commit only when it accepts it. Times have a time zone.
    ``scenarios``: events of the window by scenario of the decision table, and how often the window was
    rebuilt for a scenario. ``detectors``: what found each scenario.

    A rebuilt window records what it replaced. ``replaced_hash``: the content hash before; None if the window
    was only added to. Where the hashes differ, ``keys_changed`` is the number of keys with another state, and
    ``changed_by`` the reasons (``late events``, ``contract``, …).

    ``exact_share``: share of the run's events, over all its windows, that went one by one through the exact
    kernel, from 0 to 1; None where it was not counted. ``rules``: None where no rule was checked.

    ``closed``: the watermark had passed the window's end and allowed lateness, and the content was written
    whole or compacted since. Events that arrive later open the window again. ``closed_by``: the run that
    closed it; None if it is open, or an earlier program version closed it.

    ``made_again``: tables (``schema.table``) whose events the last commit made again because their contracts
    changed, while the files of the window's other tables stayed; empty if it was not such a commit.

    ``merges``: costs of the last few in-place updates, the newest last. ``marked``: None where no row is
    marked and no file is fresh.
    """

    layer: str
    table: str
    source: str
    window: str
    cursor: str
    watermark: datetime | None
    dedupe_key: str
    idempotency_key: str
    last_batch_id: str | None
    batches: int
    lsn_start: str | None
    lsn_end: str | None
    rows: int
    raw: int
    deduped: int
    duplicates: int
    quarantined: int
    content_hash: str
    generation: int
    delta_version: int | None
    run_id: str
    committed_at: datetime
    upstream_version: int | None
    scenarios: Mapping[str, int] = field(default_factory=dict)
    replaced_hash: str | None = None
    keys_changed: int | None = None
    changed_by: tuple[str, ...] = ()
    closed: bool = False
    detectors: Mapping[str, str] = field(default_factory=dict)
    merges: tuple[MergeCost, ...] = ()
    marked: MarkedRows | None = None
    exact_share: float | None = None
    rules: RuleResults | None = None
    made_again: tuple[str, ...] = ()
    closed_by: str | None = None
