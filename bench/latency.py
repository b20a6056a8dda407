"""Measure how soon a commit is in a durable, confirmed batch, and how long capture takes to catch up.

Small transactions at a steady rate, cut by several ages; the same with idle slots beside; single commits
after a pause; WAL of some gigabytes that waits for capture. A latency ends when the batch is confirmed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from bench.capture import end_of_wal
from bench.report import write_result
from bench.source import Source, add_tickets, client_program, source
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import connect

_GIGABYTE = 1 << 30
_ROWS = 100_000
"""Tickets that are updated again and again to make WAL."""

_PAUSE_SECONDS = 12.0
"""The pause before a single commit: capture has asked and landed what is idle meanwhile."""

_PATIENCE = 120.0
"""Seconds to wait for a batch before the measurement is given up."""


@click.command()
@click.option("--rate", default=200.0, show_default=True, help="Transactions a second, one row each.")
@click.option("--seconds", default=20.0, show_default=True, help="How long, for each age.")
@click.option(
    "--interval",
    "intervals",
    multiple=True,
    default=(0.05, 0.2, 1.0),
    show_default=True,
    help="Age at which a batch is cut, in seconds; may be given again.",
)
@click.option("--idle-slots", default=10, show_default=True, help="Slots read beside that nothing comes on.")
@click.option("--wakes", default=10, show_default=True, help="Single commits after a pause; 0: none.")
@click.option("--gigabytes", default=0.0, show_default=True, help="WAL to come from behind; 0: none.")
def main(
    rate: float,
    seconds: float,
    intervals: Sequence[float],
    idle_slots: int,
    wakes: int,
    gigabytes: float,
) -> None:
    """State latencies of capture, and what coming from behind takes."""
    client_program("pg_recvlogical")
    figures: dict[str, Any] = {"rate": rate}
    with source(idle_slots) as server:
        server.capture(server.folder / "home", end_of_wal(server))
        click.echo(f"{rate:g} transactions a second of one row, {seconds:g} s each:")
        figures["intervals"] = [_steady(server, each, rate, seconds) for each in intervals]
        if idle_slots:
            with server.idle_slots(idle_slots):
                click.echo(f"the first with {idle_slots} idle slots beside:")
                figures["idle_slots"] = _steady(server, intervals[0], rate, seconds)
        if wakes:
            figures["wakes"] = _wakes(server, intervals[0], wakes)
    if gigabytes:
        figures["behind"] = _behind(gigabytes)
    write_result("latency", figures)


@dataclass
class Followed:
    """A running capture, and the batches that it has said are durable: when, and up to which row."""

    process: subprocess.Popen[str]
    batches: list[tuple[float, int]] = field(default_factory=list)
    rows: int = 0
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "rows" in said:
                self.rows += said["rows"]
                self.batches.append((said["at"], self.rows))
            elif "cpu_seconds" in said:
                self.cpu_seconds = said["cpu_seconds"]
            else:
                self.ready.set()

    def wait_for(self, rows: int) -> None:
        """Wait until so many rows are durable."""
        give_up = time.monotonic() + _PATIENCE
        while self.rows < rows:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise click.ClickException(f"capture landed {self.rows:,} of {rows:,} rows")
            time.sleep(0.01)

    def end(self) -> None:
        """Stop it, and learn what it has spent."""
        self.process.terminate()
        self.process.wait()
        self._reader.join()


@contextmanager
def followed(server: Source, interval: float) -> Iterator[Followed]:
    """A capture that follows, from where the one before ended."""
    # So that it begins with WAL without an event, and says that it follows.
    end_of_wal(server)
    command = [sys.executable, "-m", "bench.followed", server.dsn, str(server.folder / "home")]
    command += [str(default_contracts_dir()), str(interval)]
    capture = Followed(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        if not capture.ready.wait(_PATIENCE):
            raise click.ClickException("capture did not begin to follow")
        yield capture
    finally:
        capture.end()


def _steady(server: Source, interval: float, rate: float, seconds: float) -> dict[str, float]:
    """Commit at ``rate``; say how long the commits took to a durable batch of that age."""
    with server.processor() as spent, followed(server, interval) as capture:
        began = time.monotonic()
        committed = _commits(server, rate, seconds)
        took = time.monotonic() - began
        capture.wait_for(len(committed))
    found = {
        "interval": interval,
        "rate": len(committed) / took,
        **_percentiles(_latencies(capture.batches, committed)),
        "batches_per_second": len(capture.batches) / took,
        "cpu_share": capture.cpu_seconds / took,
        "server_cpu_share": spent.seconds / took,
    }
    click.echo(
        f"  a batch every {interval:g} s: p50 {found['p50']:.3f} s, p95 {found['p95']:.3f} s, "
        f"p99 {found['p99']:.3f} s; {found['rate']:.0f} commits/s, {found['batches_per_second']:.1f} "
        f"batches/s, {found['cpu_share']:.1%} of a core, the server {found['server_cpu_share']:.1%}"
    )
    return found


def _commits(server: Source, rate: float, seconds: float) -> list[float]:
    """Insert a row in each of ``rate`` transactions a second; when each commit returned."""
    committed: list[float] = []
    with closing(connect(server.dsn)) as connection, connection.cursor() as cursor:
        due = time.monotonic()
        ends = due + seconds
        while due < ends:
            time.sleep(max(0.0, due - time.monotonic()))
            _insert(cursor)
            committed.append(time.time())
            due += 1 / rate
    return committed


def _insert(cursor: Any) -> None:
    cursor.execute(
        "INSERT INTO support.organizations SELECT 1 + coalesce(max(id), 0), 'Organization', 'team', '{}', 10,"
        " now(), now() FROM support.organizations"
    )


def _latencies(batches: Sequence[tuple[float, int]], committed: Sequence[float]) -> list[float]:
    """Seconds from each commit, one row each and in their order, to the batch that holds it."""
    ends = np.array([rows for _, rows in batches])
    holding = np.searchsorted(ends, np.arange(1, len(committed) + 1))
    found: list[float] = (np.array([at for at, _ in batches])[holding] - np.array(committed)).tolist()
    return found


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{each}": float(np.percentile(seconds, each)) for each in (50, 95, 99)}


def _wakes(server: Source, interval: float, wakes: int) -> dict[str, float]:
    """Commit once after each pause; say how long these commits took."""
    committed: list[float] = []
    with (
        followed(server, interval) as capture,
        closing(connect(server.dsn)) as connection,
        connection.cursor() as cursor,
    ):
        for _ in range(wakes):
            time.sleep(_PAUSE_SECONDS)
            _insert(cursor)
            committed.append(time.time())
            capture.wait_for(len(committed))
    seconds = _latencies(capture.batches, committed)
    click.echo(
        f"wake after {_PAUSE_SECONDS:g} idle seconds, a batch every {interval:g} s, {wakes} commits: "
        f"p50 {_percentiles(seconds)['p50']:.3f} s, the longest {max(seconds):.3f} s"
    )
    return {"interval": interval, **_percentiles(seconds), "longest": max(seconds)}


def _behind(gigabytes: float) -> dict[str, float]:
    """Write so much WAL that nobody reads, then capture it; say how long that took."""
    with source() as server:
        add_tickets(server, _ROWS)
        server.execute("ALTER TABLE support.tickets SET (autovacuum_enabled = off, fillfactor = 60)")
        server.execute("VACUUM FULL support.tickets")
        server.capture(server.folder / "home", end_of_wal(server))
        start = end_of_wal(server)
        changes = 0
        while _wal(server, start) < gigabytes * _GIGABYTE:
            changes += _update_all(server)
        until = end_of_wal(server)
        behind = _wal(server, start) / _GIGABYTE
        click.echo(f"{behind:.2f} GB of WAL behind, {changes:,} changes:")
        server.settle()
        with server.processor() as spent:
            run = server.capture(server.folder / "home", until)
    found = {
        "gigabytes": behind,
        "changes": changes,
        "seconds": run.seconds,
        **run.seen,
        "server_cpu_seconds": spent.seconds,
    }
    if run.seen["rows"] != changes:
        raise click.ClickException(f"{run.seen['rows']:,.0f} changes landed of {changes:,}")
    click.echo(
        f"  {run.seconds:.1f} s: {behind * 1024 / run.seconds:.0f} MB of WAL/s, "
        f"{changes / run.seconds:,.0f} changes/s, peak memory {run.seen['peak_mb']:.0f} MB, "
        f"{run.seen['cpu_seconds'] / changes * 1e6:.2f} µs of processor time a change, "
        f"of the server {spent.seconds / changes * 1e6:.2f}"
    )
    return found


def _wal(server: Source, start: Lsn) -> int:
    """Bytes of WAL since ``start``."""
    ((size,),) = server.execute(f"SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '{start}')::bigint")
    return int(size)


def _update_all(server: Source) -> int:
    """Update every ticket once, 100 to a transaction; how many."""
    server.execute(
        "SET synchronous_commit = off",
        f"""
        DO $$
        BEGIN
            FOR round IN 0 .. {_ROWS // 100 - 1} LOOP
                UPDATE support.tickets SET priority = 1 + priority % 4, updated_at = now()
                    WHERE id > round * 100 AND id <= round * 100 + 100;
                COMMIT;
            END LOOP;
        END $$
        """,
    )
    return _ROWS


if __name__ == "__main__":
    main()
