"""Measure what it costs to know that source and lake are equal: checksums of key ranges, whole and in parts.

Both sides run on this machine at the same time; the CPU of the server's processes is reported separately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bench.first_sync import run_sync
from bench.processes import processor_seconds, spent
from bench.source import Source, add_tickets, source
from omnisupport_ingest.equality.checking import CheckOptions, check_source
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings

SOURCE = "support_desk"


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the table.")
@click.option("--part", default=1_000_000, show_default=True, help="Rows of a part, for the check in parts.")
@click.option("--repeats", default=3, show_default=True, help="Checks of each kind.")
def main(rows: int, part: int, repeats: int) -> None:
    """Check a large table against its source."""
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        # Every 977th breaks a rule of its contract, and would wait in quarantine.
        add_tickets(server, rows, "id % 977 > 0")
        home = server.folder / "home"
        run_sync(server, home, "none")
        for kind, at_once in (("whole", None), ("part", part)):
            for _ in range(repeats):
                click.echo(f"{kind}: {_checked(server, home, at_once)}")


def _checked(server: Source, home: Path, rows_at_once: int | None) -> str:
    ((data,),) = server.execute("SELECT current_setting('data_directory')")
    postmaster = int((Path(data) / "postmaster.pid").read_text().split()[0])
    settings = Settings(home=home, source=SOURCE, source_dsn=server.dsn, _env_file=None)  # type: ignore[call-arg]
    began: list[tuple[dict[int, float], float, float]] = []

    def landed() -> None:
        """Let the lake come to the LSN; what that costs is not counted."""
        run_sync(server, home, "none")
        began.append((processor_seconds(postmaster), time.monotonic(), time.process_time()))

    server.settle()
    with _watched(postmaster) as latest:
        (checked,) = check_source(
            Workspace.open(settings), CheckOptions(("tickets",), rows_at_once, advance=landed)
        )
    theirs, wall, ours = began[-1]
    note = checked.note
    return (
        f"{note.state}, {note.rows:,} rows in {time.monotonic() - wall:.1f} s; CPU: server"
        f" {spent(theirs, latest):.1f} s, lake {time.process_time() - ours:.1f} s ({note.why})"
    )


@contextmanager
def _watched(postmaster: int) -> Iterator[dict[int, float]]:
    """What each process of the server had spent when it was seen last: that of the check ends with it."""
    latest: dict[int, float] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            latest.update(processor_seconds(postmaster))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield latest
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
