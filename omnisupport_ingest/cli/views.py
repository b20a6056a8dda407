"""What several commands show, in words and as JSON: batches, comparisons, quarantined events, stale windows.

``render`` writes numbers, times and tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cli import render
from omnisupport_ingest.landing.snapshot_plans import SCHEMA_ONLY
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.home_lock import in_use
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.verify.one_pass import Progress

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
    from omnisupport_ingest.layers.reviews import Review
    from omnisupport_ingest.review.quarantined import Quarantined
    from omnisupport_ingest.verify.proof import Proof

# --- batches that land, and the progress of a pass ---------------------------------------------------------


def landed_line(batch: Manifest) -> str | None:
    """Return what ``batch`` brought; None for an idle stretch, or for the end of a snapshot of one chunk."""
    if batch.chunk is not None:
        return _landed_chunk(batch.chunk, batch.rows)
    if batch.stream is not None and batch.rows:
        return f"Landed {batch.rows:,} changes, up to {batch.stream.end_lsn}"
    return None


def _landed_chunk(chunk: ChunkSpan, rows: int) -> str | None:
    if chunk.snapshot_id == SCHEMA_ONLY:
        return f"Landed the schema of {chunk.table}"
    # The key range is not shown: lines go to logs, and keys may be personal data.
    covered = chunk.table if chunk.scope is None else f"a range of {chunk.table}"
    if chunk.boundary:
        return f"Landed all of the snapshot of {covered}" if chunk.chunk > 1 else None
    whole = chunk.chunk == 0 and chunk.end is None
    which = "" if whole else f", chunk {chunk.chunk + 1}"
    return f"Landed the snapshot of {covered}{which}: {rows:,} rows"


def pass_progress() -> Progress:
    """Return a progress that prints on standard error, so that standard output has only the result."""

    def landed(batch: Manifest) -> None:
        if line := landed_line(batch):
            render.say_err(line)

    return Progress(render.say_err, landed)


# --- a comparison of source and lake -----------------------------------------------------------------------


def show_proof(proof: Proof) -> None:
    """Print the outcome of a comparison as a table, with the keys that differ. A key may be personal data."""
    click.echo(f"\nSource and lake at LSN {proof.lsn}. {_legend(proof)}\n")
    numbers = {name: _numbers(proof, name) for name in proof.tables}
    titles = list(next(iter(numbers.values()), {}))
    rows = [[name, *(f"{number:,}" for number in row.values())] for name, row in numbers.items()]
    render.table(["table", *titles], rows, right=titles)
    for name, compared in proof.tables.items():
        if compared.unresolved:
            click.echo(f"  {name}: {compared.unresolved} live rows have an unresolved column")
        if compared.miscounted:
            few, many = ("lake", "source") if compared.miscounted > 0 else ("source", "lake")
            click.echo(f"  {name}: the {few} has {abs(compared.miscounted):,} live rows less than the {many}")
        if compared.forwarded:
            click.echo(
                f"  {name}: {compared.forwarded:,} keys have changed since that LSN; they were compared with "
                "the source's rows after these changes"
            )
        for each in compared.examples:
            click.echo(f"  {name} {each.key}: {', '.join(each.columns)}")
        if compared.differences > len(compared.examples):
            click.echo(f"  {name}: {compared.differences - len(compared.examples):,} more keys differ")
    click.echo()
    render.heading(_verdict(proof))


def proof_document(proof: Proof) -> dict[str, Any]:
    """Return the outcome for ``--json``: counts only, no key and no value of a row."""
    return {
        "lsn": str(proof.lsn),
        "mode": "full" if proof.sample is None else "sample",
        "sample_per_table": proof.sample,
        "holds": proof.holds,
        "tables": {
            name: {
                "source_rows_compared": table.source_rows,
                "lake_current_rows": table.current_rows,
                "lake_deleted_rows": table.deleted_rows,
                "lake_unresolved_rows": table.unresolved,
                "keys_changed_since_left_out": table.skipped,
                "keys_changed_since_compared": table.forwarded,
                "live_rows_source_minus_lake": table.miscounted,
                "keys_differing": table.differences,
                "events": asdict(proof.events[name]) if name in proof.events else None,
            }
            for name, table in proof.tables.items()
        },
    }


def _numbers(proof: Proof, name: str) -> dict[str, int]:
    table = proof.tables[name]
    if proof.sample is not None:
        return {
            "compared": table.source_rows,
            "current": table.current_rows,
            "deleted": table.deleted_rows,
            "changed": table.skipped,
            "differ": table.differences,
        }
    events = proof.events[name]
    return {
        "source": table.source_rows,
        "current": table.current_rows,
        "deleted": table.deleted_rows,
        "raw": events.raw,
        "dupl.": events.duplicates,
        "quar.": events.quarantined,
        "deduped": events.deduped,
        "differ": table.differences,
    }


def _legend(proof: Proof) -> str:
    if proof.sample is not None:
        return (
            "Rows: compared of the\nsource (a sample by key), current and softly deleted in the lake;\n"
            "keys that have changed since and are left out; keys that differ."
        )
    return (
        "Rows: source, current, softly deleted;\n"
        "events: raw, duplicate, quarantined, deduped; keys that differ."
    )


def _verdict(proof: Proof) -> str:
    if not proof.holds:
        return "The lake differs from the source."
    return "No difference." if proof.sample is None else "No difference in the sample."


# --- windows that a decision made stale --------------------------------------------------------------------


def platform_runs(home: Home) -> bool:
    """Whether a platform runs on ``home``, which replays stale windows by itself."""
    # If nobody holds the lock of the home, its pid files are left over from a killed platform.
    return in_use(home) and DAEMON in running_services(home.run)


def who_judges_again(*, runs: bool) -> str:
    """Return who replays stale windows. ``runs``: a platform runs on the home."""
    if runs:
        return "The running platform judges them again by itself."
    return "Nothing runs on this home; judge them again by: omnisupport-ingest materialize"


def stale(windows: Sequence[str]) -> str:
    """Return a sentence that names ``windows``, at least one."""
    return f"Stale now: window{'s' * (len(windows) > 1)} {render.some(windows)}."


# --- quarantined events and the decisions on them ----------------------------------------------------------

_OPERATIONS = {
    "c": "create",
    "u": "update",
    "d": "delete",
    "r": "snapshot row",
    "t": "truncate",
    "b": "snapshot end",
    "m": "message",
}
_TEXTS = ("key", "moved_from_key", "before", "after", "envelope")
"""The columns with values of the row."""


def event_document(row: Quarantined) -> dict[str, Any]:
    """Return an event for ``--json``, without the values of its row."""
    return {
        "id": str(row.event),
        "window": row.window,
        "reason": row.reason,
        "detector": row.detector,
        "rules": list(row.rules),
        "table": row.table,
        "op": row.op,
        "source_ts": row.source_ts.isoformat(),
        "first_seen": row.first_seen.isoformat(),
        "batch_id": row.batch_id,
        "file_name": row.file_name,
        "file_row": row.file_row,
        "review_state": row.state,
        "waits_for_run": row.waits,
        "review": review_document(row.review) if row.review else None,
    }


def review_document(review: Review) -> dict[str, Any]:
    """Return a decision for ``--json``."""
    return {
        "id": str(review.event),
        "decision": review.decision,
        "by": review.reviewer,
        "why": review.why,
        "at": review.reviewed_at.isoformat(),
        "window": review.window,
        "reason": review.reason,
    }


def event_counts(rows: Sequence[Quarantined]) -> dict[str, Any]:
    """Return how many events there are, by reason and by state."""
    return {
        "events": len(rows),
        "by_reason": dict(Counter(row.reason for row in rows).most_common()),
        "by_state": dict(Counter(row.state for row in rows).most_common()),
    }


def event_in_list(row: Quarantined) -> Iterator[str]:
    """Yield the lines of an event in a list: first its id, which `release` and `discard` need."""
    rules = f" ({', '.join(row.rules)})" if row.rules else ""
    yield f"{row.event}  {row.reason}{rules}  {_state(row)}"
    seen = render.clock(row.first_seen)
    yield f"    {row.table}, {operation_name(row.op)}, window {row.window}, first seen {seen}"
    yield f"    from {_origin(row)}"


def event_facts(
    row: Quarantined, history: Sequence[Review], columns: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: everything about an event except the values of its row."""
    yield "found by", row.detector or "unknown"
    yield "rules broken", ", ".join(row.rules) or "none"
    yield "table", f"{row.table}, {operation_name(row.op)}"
    yield "committed", f"{render.clock(row.source_ts)}, window {row.window}"
    yield "transaction", str(columns["tx_id"]) if columns["tx_id"] is not None else "unknown"
    yield "first seen", render.clock(row.first_seen)
    yield "batch", row.batch_id
    if row.file_name is not None:
        yield "file", row.file_name
        yield "line", str(row.file_row) if row.file_row is not None else "unknown"
    yield from review_facts(history)


def event_title(row: Quarantined) -> str:
    return f"{row.event}: {row.reason}, {_state(row)}"


def review_facts(history: Sequence[Review]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: every decision on an event, the first one first."""
    if not history:
        yield "reviews", "none"
    for each in history:
        yield "review", f"{each.decision} by {each.reviewer}, {render.clock(each.reviewed_at)}: {each.why}"


def values_document(columns: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the values of the row for ``--json``, as they landed."""
    return {name: columns[name] for name in _TEXTS}


def lengths_document(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row for ``--json`` without its values: the columns of each image, and the length of each
    text."""
    return {name: _length(name, columns[name]) for name in _TEXTS}


def values_facts(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: the values of the row, which may be personal data."""
    for name, text in values_document(columns).items():
        if text is not None:
            yield name, text
    yield from _not_sent(columns)


def lengths_facts(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: the columns of the row and the lengths of their values, without values."""
    for name, length in lengths_document(columns).items():
        if isinstance(length, int):
            yield name, f"{length} characters"
        elif length is not None:
            lines = [f"{column}: {'null' if size is None else size}" for column, size in length.items()]
            yield name, "\n".join([f"{len(length)} columns, with the length of their text:", *lines])
    yield from _not_sent(columns)


def _not_sent(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if columns["unchanged"]:
        yield "not sent", ", ".join(columns["unchanged"])


def _state(row: Quarantined) -> str:
    return f"{row.state}, waits for a run" if row.waits else row.state


def operation_name(op: str) -> str:
    """Return the name of an operation, for people."""
    return _OPERATIONS.get(op, op)


def _origin(row: Quarantined) -> str:
    """Return the line of a file, or the batch, that brought the event."""
    if row.file_name is None:
        return f"batch {row.batch_id}"
    return row.file_name if row.file_row is None else f"{row.file_name}, line {row.file_row}"


def _length(name: str, text: str | None) -> int | dict[str, int | None] | None:
    if text is None:
        return None
    if name in ("before", "after"):
        image = read_image(text)
        if image is not None:
            return {column: None if value is None else len(value) for column, value in image.items()}
    return len(text)
