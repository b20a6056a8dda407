"""Measures how far each dimension is behind its source.

A batch may have landed a second ago while a table shows its state of ten minutes ago, because its run failed,
waits, or takes long. So the lag of a table counts from its oldest landed change that it does not show; a
table that shows all changes is as far as landing. Only landing and the tables' logs are read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.dimension.shown_net_changes import Shown
from omnisupport_ingest.read.verified import DIFFERS, EQUAL, PART_EQUAL, Verified

FRESH_WITHIN = timedelta(minutes=15)
"""The allowed lag of a table whose contract sets none."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """How far a dimension is behind its source.

    Attributes:
        complete_to: UTC. The table shows all changes of the log that were committed before, and all delivered
            files and snapshot chunks that landed before. None: nothing of a stream has landed, and nothing
            waits.
        landed_to: the landed watermark. None for a table that is delivered without a cursor, if its contract
            does not say how far behind it may be.
        unshown_batches: landed batches with events of the table that it does not show.
    """

    complete_to: datetime | None
    landed_to: datetime | None
    unshown_batches: int

    def lag_seconds(self, now: datetime) -> float | None:
        """Return by how many seconds the table is behind ``now`` (timezone-aware); None if nothing can be
        behind."""
        return None if self.complete_to is None else round((now - self.complete_to).total_seconds(), 1)

    @property
    def behind_landing_seconds(self) -> float | None:
        """Seconds by which the table is behind what has landed; None without a watermark."""
        if self.complete_to is None or self.landed_to is None:
            return None
        return max(0.0, round((self.landed_to - self.complete_to).total_seconds(), 1))


def freshness(
    contract: TableContract,
    net_changes: TableSnapshot | None,
    dimension: TableSnapshot | None,
    landing: LandingStore,
    landed: Landed,
    windows: Collection[str] | None = None,
) -> Freshness:
    """Return the freshness of the dimension of ``contract``.

    ``net_changes``, ``dimension``: None if they do not exist. ``landed``: what has landed in ``landing``.
    ``windows``: those in which the net changes may lack a batch; None: any.
    """
    shown = Shown.of(net_changes, dimension)
    unshown = {
        part.batch_id: part
        for window in (landing.windows() if windows is None else {*windows, *shown.newer})
        for part in landed.untaken(window, shown.in_window(window))
        if contract.full_name in part.rows_per_table
    }
    marked = [each.marked.mark for each in landed.epochs if each.marked is not None]
    landed_to = marked[-1] if marked else None
    if any(each.deliveries for each in landed.epochs) and not allowed_lag(contract)[1]:
        # Only its contract knows how often a table is delivered whole.
        landed_to = None
    waits_since = [_before(part, landing) for part in unshown.values()]
    return Freshness(min(waits_since, default=landed_to), landed_to, len(unshown))


def _before(part: LandedPart, landing: LandingStore) -> datetime:
    """Return the time up to which a table without the batch of ``part`` is still complete."""
    if part.begins is None:
        return part.landed_at
    if part.mark_before is not None:
        return part.mark_before
    # The very first batch had no watermark before it.
    stream = landing.read(part.batch_id).stream
    return stream.first_commit_ts if stream and stream.first_commit_ts else part.landed_at


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a contract promises of a table, and how it stands now.

    Attributes:
        by_contract: the contract says it; otherwise it is the default.
        within: seconds that the table may be behind the clock.
        lag: seconds that it is behind; None if nothing can be behind.
        verified_within: how many seconds ago, at most, it must have been found equal to its source; None: not
            required.
        verified_ago: how many seconds ago it was found equal; None: never.
        broken: why the service level is not kept, in words; empty if it is kept.
    """

    by_contract: bool
    within: float
    lag: float | None
    verified_within: float | None
    verified_ago: float | None
    broken: tuple[str, ...]

    @property
    def kept(self) -> bool | None:
        return None if self.lag is None and not self.broken else not self.broken


def service_level(
    contract: TableContract, freshness: Freshness, verified: Verified | None, now: datetime
) -> ServiceLevel:
    """Return the service level of a dimension at ``now`` (timezone-aware).

    It is about what people read. ``freshness`` advances with the log of the source alone, so a replay or a
    backfill of old windows makes no table fresher. If net changes may wait for their merge, the allowed lag
    is longer by that time.
    """
    promise = contract.quality.freshness
    within, _ = allowed_lag(contract)
    equal_within = promise.verified_within if promise is not None else None
    through = verified.through if verified is not None else None
    lag = freshness.lag_seconds(now)
    ago = None if through is None else round((now - through.at).total_seconds(), 1)
    broken = []
    if lag is not None and lag > within.total_seconds():
        broken.append(f"it is {in_words(lag)} behind, and {in_words(within.total_seconds())} are allowed")
    if equal_within is not None and (ago is None or ago > equal_within.total_seconds()):
        when = "never" if ago is None else f"{in_words(ago)} ago"
        allowed = in_words(equal_within.total_seconds())
        broken.append(f"it was {when} found equal to its source, and {allowed} are allowed")
    return ServiceLevel(
        promise is not None and (promise.max_lag is not None or equal_within is not None),
        within.total_seconds(),
        lag,
        None if equal_within is None else equal_within.total_seconds(),
        ago,
        tuple(broken),
    )


def allowed_lag(contract: TableContract) -> tuple[timedelta, bool]:
    """Return how far the dimension may be behind the clock, and whether its contract says so."""
    promise = contract.quality.freshness
    by_contract = promise is not None and promise.max_lag is not None
    within = promise.max_lag if promise is not None and promise.max_lag is not None else FRESH_WITHIN
    waits = contract.delayed_merge.max_age if contract.delayed_merge is not None else timedelta(0)
    return within + waits, by_contract


def in_words(seconds: float) -> str:
    """Return a length of time for people: ``45 seconds``, ``3 minutes``."""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} seconds"


def verified_in_words(verified: Verified | None, now: datetime) -> str | None:
    """Return what is known of a table and its source, as one sentence; None if it was never checked."""
    if verified is None:
        return None
    through, state = verified.through, verified.state
    if verified.differs and state != DIFFERS:
        state = f"found to differ, and now {state}"
    if through is None:
        return f"{state}: {verified.why}"
    ago = in_words((now - through.at).total_seconds())
    known = f"equal to the source at LSN {through.lsn}, checked {ago} ago"
    if verified.state in (EQUAL, PART_EQUAL) and not verified.differs:
        return known
    return f"{known}; since then {state}: {verified.why}"
