"""Numbers about the quarantine of each window; the checks of the quarantine read these and their totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.judging import DISCARDED, OPEN
from omnisupport_ingest.contracts.decision_table import COLLISION, OLDER_EPOCH
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.window_index import (
    DISCARDED_OF,
    HELD,
    LEFT_COLLISION,
    LEFT_OLDER,
    UNAPPLIED,
)

REVIEWS = "reviews:"
"""Prefix of the version of a ``deduped_events`` window that names the reviews it was judged with."""

LEFT = {COLLISION: LEFT_COLLISION, OLDER_EPOCH: LEFT_OLDER}
"""Reason → name of the number of its events that somebody may have to look at."""

_STATE = "review_state"


def withheld_numbers(files: QuarantineFiles, window: str, digest: str | None) -> Mapping[str, int]:
    """Return the numbers of ``window``. ``digest``: of the decisions on its events (``ReviewLedger.digest``).

    If the window was judged without some of these decisions, no event counts as discarded, and all events
    with a reason in ``LEFT`` count as left.
    """
    state = files.state(window)
    applied, found = judged_with(state) == digest, Counter[str]()
    for file in files.quarantine.files(window) if state is None else files.there(window):
        reason = reason_of(file)
        found[f"{HELD}{reason}"] += file.rows
        if reason not in LEFT and digest is None:
            continue
        states = states_in(file) if applied else {}
        if reason in LEFT:
            found[LEFT[reason]] += states.get(OPEN, 0) if applied else file.rows
        found[f"{DISCARDED_OF}{reason}"] += states.get(DISCARDED, 0)
    return {**found, UNAPPLIED: int(not applied)}


def judged_with(state: WindowState | None) -> str | None:
    """Return the digest of the decisions that a ``deduped_events`` window was judged with; None: with
    none."""
    found = [each for each in (state.versions if state is not None else ()) if each.startswith(REVIEWS)]
    return found[0].removeprefix(REVIEWS) if found else None


def reason_of(file: LakeFile) -> str:
    """Why the events of a file of quarantine are there."""
    return dict(file.partition).get("reason") or "unknown"


def states_in(file: LakeFile) -> Mapping[str, int]:
    """Return the number of events of ``file`` in each state of review; all count as open where that is
    unknown."""
    try:
        with pq.ParquetFile(file.uri) as parquet:
            if _STATE not in parquet.schema_arrow.names:
                return {OPEN: file.rows}
            counted = pc.value_counts(parquet.read([_STATE])[_STATE].combine_chunks())
    except (OSError, pa.ArrowException):
        return {OPEN: file.rows}
    return Counter({(each["values"].as_py() or OPEN): each["counts"].as_py() for each in counted})
