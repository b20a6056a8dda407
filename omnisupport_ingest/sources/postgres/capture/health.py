"""The health of a captured source: its level, its problems, and numbers to plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.status import SourceStatus, source_status
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.slot.retention import Level, SlotWarning


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one source. ``level``: the level of its worst problem.

    ``numbers``: measurements by name, sizes in bytes, times in seconds; a number that could not be measured
    is left out.
    """

    source: str
    level: Level
    problems: tuple[SlotWarning, ...]
    numbers: dict[str, int | float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One sentence per problem, with its fix; or a sentence that all is well."""
        if not self.problems:
            return "Nothing threatens what is captured of it."
        return " ".join(f"{each.problem} Fix: {each.fix}" for each in self.problems)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The level and the kind of each problem, sorted: one whose numbers changed is not a new one, but one
        that became an alarm is."""
        return tuple(sorted(f"{each.level.name.lower()}: {each.kind}" for each in self.problems))

    def document(self, at: datetime) -> dict[str, object]:
        """Return the health as JSON values, for messages to people."""
        return {
            "source": self.source,
            "level": self.level.name.lower(),
            "at": at.isoformat(),
            "problems": [
                {"problem": each.problem, "fix": each.fix, "level": each.level.name.lower()}
                for each in self.problems
            ],
            "numbers": self.numbers,
        }


def source_health(settings: Settings, home: Home, tables: Sequence[TableContract]) -> Health:
    """Query the server and landing once. A server that does not answer is a problem in the result.

    A source that was never captured has no slot to watch, so its level is ``WELL``.
    """
    if LandingStore(home.landing, settings.source).current_epoch() is None:
        return Health(settings.source, Level.WELL, ())
    dsn: str | IngestError
    try:
        dsn = source_dsn(settings, home)
    except SourceUnavailable as error:
        dsn = error
    return health_of(source_status(dsn, settings, home, tables))


def health_of(status: SourceStatus) -> Health:
    """Return the health of a source from its ``status``."""
    level = max((each.level for each in status.warnings), default=Level.WELL)
    return Health(status.source, level, status.warnings, _numbers(status))


def _numbers(status: SourceStatus) -> dict[str, int | float]:
    server, landed = status.server, status.landed
    slot = server.slot if server is not None else None
    ahead = server.forecast if server is not None else None
    measured: dict[str, int | float | None] = {
        "wal_kept_bytes": slot.retained_bytes if slot is not None else None,
        "bytes_behind": landed.behind if landed is not None else None,
        "wal_bytes_per_second": ahead.rate if ahead is not None else None,
        "seconds_until_danger": ahead.seconds if ahead is not None else None,
    }
    return {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in measured.items()
        if value is not None
    }
