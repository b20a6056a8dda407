"""What the steps of a demo share: where it works, what it was asked for, and how it speaks."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings


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


def progress(console: Console) -> Progress:
    """The bar that every step with a countable amount of work shows."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
