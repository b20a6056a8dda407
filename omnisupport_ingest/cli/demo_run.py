"""What the steps of a demo share: where it works, what it was asked for, and how it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from omnisupport_ingest.demo.domain import Domain


@dataclass(frozen=True)
class Demo:
    """One run of the demo: where it works, what it was asked for, and how it speaks."""

    settings: Settings
    home: Home
    supervisor: Supervisor
    console: Console
    changes: int
    """Row changes that the workload commits."""
    seed: int
    again: str
    """What stands before the next command of a person, so that it finds this home."""

    @property
    def domain(self) -> Domain[Any]:
        """What the embedded server of the home holds."""
        from omnisupport_ingest.demo.domains import embedded_domain

        return embedded_domain(self.settings)


def progress(console: Console) -> Progress:
    """The bar that every step with a countable amount of work shows."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
