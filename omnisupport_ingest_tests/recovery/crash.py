"""A small real pipeline whose processes die at failpoints: source, capture, layers, and the last word.

Every process is the real one (the command line, or the layers as a run does them) and dies by
SIGKILL at a failpoint. ``CrashDesk.ends_well`` then lets everything run to its end and compares.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake.sweep import sweep, sweepable
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.verify.proof import Proof, prove
from omnisupport_ingest_tests.recovery.dagster_storage import storage_with_failpoints
from omnisupport_ingest_tests.recovery.traces import Trace
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest

KILLED = -signal.SIGKILL
SECONDS = 180

TOO_LONG = 600
"""Characters of a subject that the contract does not allow."""

TABLES = ("tickets",)
"""Contracted at first; every table costs every run something."""


@dataclass(frozen=True)
class Point:
    """A point of a failpoint. ``of``: which of its passes, by a part of the object's name."""

    failpoint: str
    moment: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.failpoint}.{self.moment}" + (f"@{self.of}" if self.of else "")


@dataclass(frozen=True)
class Ended:
    """How a process ended; a negative code is the signal that ended it."""

    code: int
    out: str
    errors: str


@dataclass
class CrashDesk:
    """A filled support desk and the home it is captured into. ``spark`` is the address of a warm server."""

    source: SourceUnderTest
    folder: Path
    spark: str
    died: list[str] = field(default_factory=list)
    """The points at which a process has died, in order."""
    withheld: list[int] = field(default_factory=list)
    """The tickets of which ``change`` had an event go to quarantine, in order."""
    failpoints_in_storage: bool = False
    """Whether what Dagster itself writes passes failpoints (``dagster_storage``)."""

    @classmethod
    def made(
        cls, source: SourceUnderTest, folder: Path, spark: str, tables: Sequence[str] = TABLES
    ) -> CrashDesk:
        contracts = folder / "contracts"
        contracts.mkdir(parents=True)
        source.overrides["contracts_dir"] = contracts
        source.overrides["spark_remote"] = spark
        desk = cls(source, folder, spark)
        for table in tables:
            desk.contract(table)
        SUPPORT_DESK.prepare(source.dsn, seed=1, size=60)
        return desk

    # --- the source -------------------------------------------------------------------------------

    def contract(self, table: str, *, without: Sequence[str] = ()) -> None:
        """Contract ``table``, or contract it again, ``without`` some of its columns and their rules."""
        document = json.loads((default_contracts_dir() / f"{table}.json").read_text())
        for name in without:
            del document["properties"][name]
        quality = document["x-cdc"].get("quality", {})
        quality["rules"] = [
            rule
            for rule in quality.get("rules", ())
            if not any(re.search(rf"\b{name}\b", rule["expression"]) for name in without)
        ]
        if not quality["rules"]:
            del quality["rules"]
        (self.folder / "contracts" / f"{table}.json").write_text(json.dumps(document))

    def change(self) -> None:
        """Traffic, and one event that breaks a row rule with a column that no later event sends again.

        Each time it is an event of another ticket, so that none makes good what another one left open.
        """
        Workload(SUPPORT_DESK, self.source.dsn, seed=1).run(20)
        others = ", ".join(map(str, self.withheld)) or "0"
        ((ticket,),) = self.source.query(f"SELECT min(id) FROM support.tickets WHERE id NOT IN ({others})")
        self.withheld.append(ticket)
        # Long and hard to compress, so it is stored apart: an update that leaves it alone does not send it.
        body = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) AS i)"
        update = "UPDATE support.tickets SET"
        self.source.sql(
            f"{update} body = {body}, subject = repeat('x', {TOO_LONG}) WHERE id = {ticket}",
            f"{update} subject = 'short' WHERE id = {ticket}",
        )

    # --- processes --------------------------------------------------------------------------------

    @property
    def in_bucket(self) -> bool:
        return self.source.settings.storage is not None

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.source.settings)

    @property
    def environment(self) -> dict[str, str]:
        settings = self.source.settings
        workspace = self.workspace
        write_dagster_home(settings, workspace.home)
        if self.failpoints_in_storage:
            storage_with_failpoints(workspace.home.dagster)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return {**inherited, **dagster_environment(settings, workspace.home), "PYTHONWARNINGS": "ignore"}

    def start(
        self,
        *arguments: str,
        at: object = "",
        given: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``python arguments…`` with the desk's settings; it dies at the point ``at``.

        What it prints is for the caller to read, unless there is a ``log``.
        """
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment | {VARIABLE: str(at), **(given or {})},
            # Held open: `ingest-run` ends with it.
            stdin=subprocess.PIPE,
            stdout=log or subprocess.PIPE,
            stderr=log or subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, at: object = "", given: Mapping[str, str] | None = None) -> Ended:
        """The same to its end, or to its death."""
        process = self.start(*arguments, at=at, given=given)
        stdin, process.stdin = process.stdin, None
        try:
            out, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
            if stdin is not None:
                stdin.close()
        if process.returncode == KILLED:
            self.died.append(str(at))
        return Ended(process.returncode, out, errors)

    def command(self, *arguments: str, at: object = "", given: Mapping[str, str] | None = None) -> Ended:
        """A command of the program."""
        return self.run("-m", "omnisupport_ingest.cli.main", *arguments, at=at, given=given)

    def capture(self, *arguments: str, at: object = "") -> Ended:
        """Capture up to now, once."""
        return self.command("capture", "--once", *arguments, at=at)

    def layers(self, at: object = "") -> Ended:
        """Take what has landed through every layer."""
        return self.run("-m", "omnisupport_ingest_tests.recovery.desk_layers", at=at)

    def ingest_run(self, at: object = "") -> Ended:
        """The same as a run of Dagster, recorded in its instance."""
        pending = pending_windows(self.workspace, SOURCE)
        first, last = min(pending.windows), max(pending.windows)
        cursor = ("--cursor", pending.last_batch_id) if pending.last_batch_id else ()
        return self.command("ingest-run", SOURCE, first, last, *cursor, at=at)

    # --- the last word ----------------------------------------------------------------------------

    def ends_well(self) -> None:
        """Run everything to its end; source, counts, chain and folders must say that nothing is wrong.

        The dimensions are the source's, but for the cells that only a quarantined event carried:
        those, and no others, are unresolved. Every landed event is in raw once for each time it
        landed, and was accepted, a duplicate, or quarantined. No gap, nothing pending, and nothing
        is left in a folder that a sweep does not take away.
        """
        self.change()
        finished(self.capture())
        finished(self.layers())
        workspace = self.workspace

        def advance(_lsn: Lsn) -> None:
            finished(self.capture())
            finished(self.layers())

        def no_spark() -> None:
            raise AssertionError("nothing has changed since, so nothing is to be folded")

        proof = prove(workspace, no_spark, advance=advance)  # type: ignore[arg-type]
        self._differs_where_events_are_withheld(proof)
        assert proof.tables and all(table.source_rows for table in proof.tables.values())
        landed = self.landed_rows()
        for contract in workspace.contracts.of_source(SOURCE):
            assert proof.events[contract.name].raw == landed[contract.full_name]
            counts = proof.events[contract.name]
            assert counts.raw == counts.deduped + counts.duplicates + counts.quarantined
        assert sum(counts.quarantined for counts in proof.events.values()) > 0
        assert pending_windows(workspace, SOURCE).windows == ()
        self._nothing_left(workspace)

    def landed_rows(self) -> dict[str, int]:
        """Events of all landed batches by table; fails at a gap, or at a file that is not whole."""
        found: dict[str, int] = {}
        for manifest in self.source.manifests():
            for file in manifest.files:
                for name, rows in file.rows_per_table.items():
                    found[name] = found.get(name, 0) + rows
        return found

    def _differs_where_events_are_withheld(self, proof: Proof) -> None:
        open_rows = self.rows_with_open_body()
        assert self.withheld[-1] in open_rows, "the last withheld event was made good"
        for name, table in proof.tables.items():
            due = {str(ticket): ("body",) for ticket in open_rows} if name == "tickets" else {}
            found = {each.key: each.columns for each in table.examples}
            assert found == due, f"{name}: {found} differ, not {due}"
            assert (table.differences, table.unresolved) == (len(due), len(due)), f"{name}: {table}"
            assert not table.miscounted, name

    def rows_with_open_body(self) -> list[int]:
        """Live tickets whose body only an event in quarantine carried, by the events as they landed."""
        events: dict[tuple[int, int, int], dict[str, Any]] = {}
        for manifest in self.source.manifests():
            for file in manifest.files:
                path = self.workspace.landing(SOURCE).path_of(file)
                for row in pq.read_table(path, partitioning=None).to_pylist():
                    if row["source_table"] == "tickets" and row["key"] is not None:
                        events[row["epoch"], row["commit_lsn"], row["ordinal"]] = row
        last: dict[int, bool] = {}
        ended: dict[int, bool] = {}
        for _, row in sorted(events.items()):
            (ticket,) = map(int, json.loads(row["key"]))
            image = json.loads(row["after"] or "{}")
            if row["op"] == "d":
                ended[ticket] = last.pop(ticket, True)
            elif "body" in image:
                last[ticket] = len(image["subject"]) == TOO_LONG
            elif row["op"] in "cr":
                # The key changed, and a long body came along unsent.
                last[ticket] = ended[int(json.loads(row["moved_from_key"])[0])]
        return sorted(ticket for ticket, is_open in last.items() if is_open)

    def _nothing_left(self, workspace: Workspace) -> None:
        landing = workspace.landing(SOURCE)
        # Objects are as old as whole seconds of the store's clock say.
        older_than = timedelta(seconds=-5 if self.in_bucket else 0)
        landing.sweep(older_than)
        data = landing.folder / "data"
        with_data = {each.path.parent.name for each in storage_of(data / "any").listed(data)}
        assert with_data <= set(landing.batch_ids())
        for table in workspace.tables():
            if table.exists:
                sweep(table, older_than)
                trace = Trace.of(table)
                assert not trace.unfinished | trace.finished, table.spec.path
                if self.in_bucket:
                    assert sweepable(table, older_than) == (0, 0), table.spec.path


def finished(ended: Ended) -> Ended:
    """``ended``, which must have come to its end."""
    assert ended.code == 0, f"code {ended.code}\n{ended.errors[-3000:]}"
    return ended


def died(ended: Ended, at: object) -> None:
    """Fail unless the process was killed."""
    assert ended.code == KILLED, f"{at} was not reached: code {ended.code}\n{ended.errors[-3000:]}"
