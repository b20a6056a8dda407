"""Both captures at work at once, over every hand-made script and every seed."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import click

from omnisupport_ingest.position import Lsn
from parity import debezium, ours, workload
from parity.marks import BEGIN, END
from parity.modes import Modes
from parity.ours import Ours
from parity.scripts import SCRIPTS
from parity.server import Server
from parity.tables import DDL, PUBLISHED, SCHEMA

_READY_SECONDS = 60
_CATCH_UP_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Captured:
    """What both have captured: our home; the file of Debezium's records; and a home for each way that they
    come by, files and topics."""

    ours: Ours
    events: Path
    files: Ours
    topics: Ours

    def on(self, remote: str) -> Captured:
        """Return the same, with homes whose commands have their session on the Spark server ``remote``."""
        return replace(
            self, ours=self.ours.on(remote), files=self.files.on(remote), topics=self.topics.on(remote)
        )


def capture(server: Server, seeds: range, modes: Modes, broker: str | None) -> Captured:
    """Make the tables, start both captures, run everything, and wait until both have all of it.

    ``broker``: the address that Debezium's records go to beside their file; None: nowhere.
    """
    server.execute(DDL)
    listed = ", ".join(f'{SCHEMA}."{name}"' for name in PUBLISHED)
    for publication in (ours.PUBLICATION, debezium.PUBLICATION):
        server.execute(
            f"CREATE PUBLICATION {publication} FOR TABLE {listed} WITH (publish_via_partition_root = true)"
        )
    server.execute(f"SELECT pg_create_logical_replication_slot('{debezium.SLOT}', 'pgoutput')")
    home = ours.home_of(server, "ours", ours.SOURCE)
    # Now: a contract that is made later may have a column of which rows from before tell nothing.
    files = ours.home_of(server, "files", ours.FILES)
    topics = ours.home_of(server, "topics", ours.TOPICS)
    following = ours.start(server, home)
    try:
        engine = debezium.start(server, modes, broker)
        try:
            _wait_until_both_read(server)
            _work(server, seeds)
            server.execute(f"SELECT pg_logical_emit_message(true, '{END}', '')")
            ((end,),) = server.execute("SELECT pg_current_wal_flush_lsn()")
            engine.wait(_CATCH_UP_SECONDS)
        finally:
            engine.stop()
        following.wait(Lsn.parse(end), _CATCH_UP_SECONDS)
    finally:
        following.stop()
    return Captured(home, engine.events, files, topics)


def _work(server: Server, seeds: range) -> None:
    for script in SCRIPTS:
        _announce(server, script.name)
        with closing(server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET search_path = {SCHEMA}")
            for statement in script.statements:
                cursor.execute(statement)
    for seed in seeds:
        _announce(server, f"seed {seed}")
        workload.run(server, seed)


def _announce(server: Server, name: str) -> None:
    server.execute(f"SELECT pg_logical_emit_message(true, '{BEGIN}', '{name}')")


def _wait_until_both_read(server: Server) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        rows = server.execute("SELECT slot_name FROM pg_replication_slots WHERE active")
        if {name for (name,) in rows} >= {ours.SLOT, debezium.SLOT}:
            return
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"After {_READY_SECONDS} s not both captures read. With --keep their logs stay."
            )
        time.sleep(0.2)
