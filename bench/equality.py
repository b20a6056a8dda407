"""Measure what it costs to know that source and lake are equal: everything read, and only what has changed.

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
from bench.report import write_result
from bench.source import Source, add_tickets, source
from omnisupport_ingest.equality.checking import CheckOptions, check_source
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings

SOURCE = "support_desk"


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the table.")
@click.option("--budget", default=800_000, show_default=True, help="Rows that the server may read at a time.")
@click.option(
    "--changes", default=6_000, show_default=True, help="Rows that change before a check of changes."
)
@click.option("--repeats", default=3, show_default=True, help="Checks of each kind.")
def main(rows: int, budget: int, changes: int, repeats: int) -> None:
    """Check a large table against its source."""
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        # Every 977th breaks a rule of its contract, and would wait in quarantine.
        add_tickets(server, rows, "id % 977 > 0")
        home = server.folder / "home"
        run_sync(server, home, "none")
        newest, anywhere = f"id > {rows - changes}", f"id % {max(1, rows // changes)} = 0"
        measured: dict[str, list[dict[str, float]]] = {}
        for kind, changed, at_once in (
            ("whole", None, None),
            ("nothing changed", None, budget),
            ("the newest rows changed", newest, budget),
            ("rows anywhere changed", anywhere, budget),
        ):
            for _ in range(repeats):
                if changed is not None:
                    server.execute(f"UPDATE support.tickets SET updated_at = now() WHERE {changed}")
                found = _checked(server, home, at_once)
                measured.setdefault(kind, []).append(found)
                click.echo(f"{kind}: " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
    write_result("equality", measured)


def _checked(server: Source, home: Path, rows_at_once: int | None) -> dict[str, float]:
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
    click.echo(f"  {note.state}: {note.why}", err=True)
    return {
        "rows compared": note.rows,
        "read at the source": note.read,
        "seconds": time.monotonic() - wall,
        "CPU of the server": spent(theirs, latest),
        "CPU of the lake": time.process_time() - ours,
    }


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
