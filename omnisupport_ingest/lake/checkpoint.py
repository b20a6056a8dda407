"""What one window of one layer is complete to, as its last commit recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from omnisupport_ingest.json_values import from_note

_MOMENTS = frozenset({"watermark", "committed_at"})


@dataclass(frozen=True, slots=True)
class MergeCost:
    """What one update of a table that is updated in place came to: ``keys`` with another row, of ``rows``
    before it, and ``files`` written anew, of ``held`` ones."""

    keys: int
    rows: int
    files: int
    held: int


@dataclass(frozen=True, slots=True)
class RulesAsked:
    """What asking the events of a window for the rules of their contracts came to.

    ``broken``: by rule, as ``<table>/<rule>``, the events that break it, whatever its policy; ``keys``: a few
    of their keys, of tables whose key is no personal data. ``share``: of the time that the run's tasks took
    to judge, over all its windows, the share that the rules took; None where nobody measured.
    """

    broken: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The record of one window after a commit; kept in the table, mirrored in run metadata.

    ``cursor`` is the text of the last event (or the name of the last batch) taken, inclusive.
    ``dedupe_key`` says what identifies an event, ``idempotency_key`` what identifies the work that
    was done. ``rows`` counts what the layer holds for the window; ``raw``, ``deduped``,
    ``duplicates`` and ``quarantined`` add up as ``raw = deduped + duplicates + quarantined``.
    ``content_hash`` depends on the rows alone, not on their split into files. ``delta_version`` is
    ``None`` inside the table, whose log numbers the commit only as it accepts it. Moments are
    timezone-aware. ``scenarios`` counts the window's events by scenario of the decision table, and how often
    the window was made again for a scenario; ``detectors`` names what found each of them.

    A window that was made again says what it replaced: ``replaced_hash`` is the content hash before,
    None where the window was only added to; where the two differ, ``keys_changed`` is how many keys have
    another state, and ``changed_by`` why (``late events``, ``contract``, …).

    ``exact_share``: of the events that the run took here, over all its windows, the share that went one by
    one through the exact kernel; None where nobody counted. ``rules``: None where no rule was asked.

    ``closed``: the watermark had passed the window's end and allowed lateness, and the content was
    written whole or folded since. What the window takes in later opens it again.

    ``merges``: what the last few updates in place came to, the newest last.
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
    exact_share: float | None = None
    rules: RulesAsked | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; moments in ISO 8601."""
        record = asdict(self) | {
            "changed_by": list(self.changed_by),
            "merges": [asdict(m) for m in self.merges],
        }
        for name in _MOMENTS:
            if record[name] is not None:
                record[name] = record[name].isoformat()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Checkpoint:
        """Read what ``to_json`` wrote; fields a newer version added are passed over.

        What older versions did not record keeps its default. ``FieldProblem`` names a field that is missing,
        or is not what it must be.
        """
        return from_note(cls, record)
