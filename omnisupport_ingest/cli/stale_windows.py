"""How windows that a decision made stale are judged again, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home

_NAMED = 5
"""How many windows or events a sentence names."""


def platform_runs(home: Home) -> bool:
    """Whether a running platform takes up stale windows by itself."""
    from omnisupport_ingest.runtime.dagster_services import DAEMON
    from omnisupport_ingest.runtime.home_lock import in_use
    from omnisupport_ingest.runtime.running import running_services

    # Not in use, its pid files are those of a killed platform.
    return in_use(home) and DAEMON in running_services(home.run)


def who_judges_again(*, runs: bool) -> str:
    """Who makes stale windows again, with or without a running platform."""
    if runs:
        return "The running platform judges them again by itself."
    return "Nothing runs on this home; judge them again by: omnisupport-ingest materialize"


def stale(windows: Sequence[str]) -> str:
    """A sentence that names ``windows``, of which there is at least one."""
    return f"Stale now: window{'s' if len(windows) > 1 else ''} {listed(windows)}."


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
