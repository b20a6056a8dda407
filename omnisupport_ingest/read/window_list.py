"""Lists the windows of a source: open or closed, what landed in them, and what replays did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE


class Stand(Enum):
    """The state of a window: open → closed → (late) replayed → closed."""

    OPEN = "open"
    CLOSING = "closing"
    """The watermark has passed it, and its files are not compacted yet."""
    CLOSED = "closed"
    LATE = "late"
    """Closed, and events landed in it since: its replay is due."""
    SEALED = "sealed"
    """Its events have left raw by retention: neither replayed nor stale."""
    SENTINEL = "sentinel"
    """No window of time: events whose time cannot be right."""


@dataclass(frozen=True, slots=True)
class WindowLine:
    """One window of one source.

    ``closes_at``: the watermark that closes it, None for the sentinel. ``events`` and ``batches`` are
    what landed in it, ``late_events`` those that landed after it had closed. ``accepted``,
    ``duplicates`` and ``quarantined`` are None until the window was judged. ``generation`` counts how
    often deduped events were made again, from 1. ``replay``: what the last replay changed, None if
    there was none.
    """

    window: str
    stand: Stand
    closes_at: datetime | None
    events: int
    batches: int
    late_events: int
    late_batches: int
    pending: bool
    accepted: int | None
    duplicates: int | None
    quarantined: int | None
    generation: int | None
    replay: str | None


@dataclass(frozen=True, slots=True)
class WindowList:
    """The windows of ``source`` that anything landed in, in order, and the watermark that closes them now.

    It is the lowest of ``inputs``, the sources that share its database.
    """

    source: str
    watermark: datetime | None
    inputs: tuple[str, ...]
    windows: tuple[WindowLine, ...]


def window_list(workspace: Workspace, source: str) -> WindowList:
    """Read manifests and the tables' logs; changes nothing, and needs no Spark."""
    lateness, watermark = Lateness.of(workspace, source), workspace.closing_watermark(source)
    landing = workspace.landing(source)
    landed = landing.landed()
    pending = pending_windows(workspace, source, limit=sys.maxsize)
    judged, raw = workspace.deduped(source).look(), workspace.raw(source).look()
    parts = {window: of_window for window in landing.windows() if (of_window := landed.parts(window))}
    # Raw may hold batches that landing no longer has. A run over a range of windows makes empty ones too.
    kept = [window for window in raw.windows() if raw.files(window)] if raw is not None else []
    windows, sealed = {*parts, *kept}, Removed.open(workspace, source).sealed
    return WindowList(
        source,
        watermark,
        workspace.inputs(source),
        tuple(
            _line(
                _WindowFacts(
                    window,
                    parts.get(window, ()),
                    judged.state(window) if judged is not None else None,
                    late=window in pending.late_windows,
                    waiting=window in pending.windows,
                    sealed=window in sealed,
                ),
                lateness,
                watermark,
            )
            for window in sorted(windows)
        ),
    )


@dataclass(frozen=True, slots=True)
class _WindowFacts:
    """What landing and the layers know of one ``window``.

    ``parts``: the data files that landed in it. ``state``: that of the deduped events, None before the
    window was judged. ``late``: its replay is due; ``waiting``: its first run is. ``sealed``: by retention.
    """

    window: str
    parts: Sequence[LandedPart]
    state: WindowState | None
    late: bool
    waiting: bool
    sealed: bool

    def stand(self, lateness: Lateness, watermark: datetime | None) -> Stand:
        """Return the state of the window while the watermark of the source is at ``watermark``."""
        if self.sealed:
            return Stand.SEALED
        if self.window == OUT_OF_RANGE:
            return Stand.SENTINEL
        if self.late:
            return Stand.LATE
        if not lateness.closed(self.window, watermark):
            return Stand.OPEN
        closed = self.state is not None and self.state.checkpoint.closed
        return Stand.CLOSED if closed else Stand.CLOSING


def _line(facts: _WindowFacts, lateness: Lateness, watermark: datetime | None) -> WindowLine:
    checkpoint = facts.state.checkpoint if facts.state is not None else None
    arrivals = lateness.late_parts(facts.parts)
    return WindowLine(
        window=facts.window,
        stand=facts.stand(lateness, watermark),
        closes_at=None if facts.window == OUT_OF_RANGE else lateness.closes_at(facts.window),
        events=sum(part.rows for part in facts.parts),
        batches=len({part.batch_id for part in facts.parts}),
        late_events=sum(each.events for each in arrivals),
        late_batches=len({each.batch_id for each in arrivals}),
        pending=facts.late or facts.waiting,
        accepted=checkpoint.deduped if checkpoint else None,
        duplicates=checkpoint.duplicates if checkpoint else None,
        quarantined=checkpoint.quarantined if checkpoint else None,
        generation=checkpoint.generation if checkpoint else None,
        replay=_replay(checkpoint.replaced_hash, checkpoint.changed_by) if checkpoint else None,
    )


def _replay(replaced_hash: str | None, changed_by: Sequence[str]) -> str | None:
    if replaced_hash is None:
        return None
    return f"changed by {', '.join(changed_by)}" if changed_by else "no change"
