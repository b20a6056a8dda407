"""The gates of durable effects, where a crash test ends the process as ``kill -9`` would.

Whatever outlives the process (a file, a commit, a confirmation) is done inside ``with gate(...)``.
A gate has two points, one just before its effect and one just after; ``OMNISUPPORT_FAILPOINT`` names
the point to die at. Recovery is only proved by dying for real: an exception would still run
``finally`` blocks and flush buffers. A gate costs one comparison at each point when no test asks for
it. This module and ``settings`` are the only readers of the environment; a failpoint is no setting,
so it is not listed there.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

VARIABLE = "OMNISUPPORT_FAILPOINT"
"""``GATE.before`` or ``GATE.after`` ends the process at the first pass of that point, ``…:N`` at the Nth.

``GATE.before@TEXT`` counts only passes whose object (a table's path, a batch's name) contains TEXT.
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """A kind of durable effect. ``owners``: the modules of the package that may pass the gate."""

    name: str
    owners: tuple[str, ...]
    effect: str
    """One line: what is durable after the gate and was not before."""


def _gate(name: str, effect: str, *owners: str) -> Gate:
    return Gate(name, owners, effect)


GATES: dict[str, Gate] = {
    each.name: each
    for each in (
        _gate("home.marker", "`home.json`, which fixes the grid of windows", "home.py"),
        _gate(
            "home.in_force",
            "`in_force.json`, which names contracts and decision table",
            "contracts/in_force.py",
        ),
        _gate("home.identity", "what tells this home from its copies", "sources/postgres/home_identity.py"),
        _gate("source.publication", "the publication, made or extended", "sources/postgres/publication.py"),
        _gate("source.publication_drop", "the publication is gone", "sources/postgres/publication.py"),
        _gate(
            "source.slot_intent", "the note that a slot is about to be made", "sources/postgres/home_slot.py"
        ),
        _gate("source.slot", "the permanent replication slot", "sources/postgres/slot.py"),
        _gate("source.slot_drop", "the replication slot is gone", "sources/postgres/slot.py"),
        _gate("source.slot_intent_clear", "that note is gone", "sources/postgres/home_slot.py"),
        _gate("source.confirm", "the position told to the slot", "sources/postgres/walstream.py"),
        _gate("source.pause", "the note that capture is paused", "sources/postgres/pause.py"),
        _gate("source.resume", "that note is gone", "sources/postgres/pause.py"),
        _gate("source.restart", "the note that capture is to start again", "sources/postgres/restart.py"),
        _gate("source.restart_clear", "that note is gone", "sources/postgres/restart.py"),
        _gate(
            "source.capture_record",
            "how the last capture began or ended",
            "sources/postgres/capture_record.py",
        ),
        _gate(
            "source.snapshot_request",
            "the note that a table is to be read again",
            "sources/postgres/snapshot_requests.py",
        ),
        _gate("landing.snapshot_plan", "the chunks of a snapshot", "landing/snapshot_plans.py"),
        _gate("source.snapshot_request_clear", "that note is gone", "sources/postgres/snapshot_requests.py"),
        _gate(
            "source.partitions",
            "the note of the partitions whose rows are known",
            "sources/postgres/partition_records.py",
        ),
        _gate("landing.epoch", "the record of an epoch", "landing/epochs.py"),
        _gate(
            "source.published",
            "how the tables are published, to be compared with later",
            "sources/postgres/published.py",
        ),
        _gate(
            "source.parked", "the note of the tables that capture leaves out", "sources/postgres/parked.py"
        ),
        _gate("landing.accepted_loss", "the note of a loss that was accepted", "landing/accepted_losses.py"),
        _gate(
            "landing.lost_changes",
            "the stretches in which changes of single tables may be missing",
            "landing/lost_changes.py",
        ),
        _gate("landing.data", "the data files of a batch, synced", "landing/store.py"),
        _gate("landing.manifest", "the manifest: the batch exists", "landing/store.py"),
        _gate("landing.index", "what manifests say, noted in the index", "landing/index.py"),
        _gate("inbox.link", "a file taken from the inbox, beside the others", "sources/debezium/inbox.py"),
        _gate("inbox.unlink", "that file is gone from where it waited", "sources/debezium/inbox.py"),
        _gate("inbox.reason", "why a file was refused", "sources/debezium/inbox.py"),
        _gate("kafka.mirror", "the offsets told to the consumer group", "sources/kafka/sync.py"),
        _gate("query.state", "how far a source has been read by its cursors", "sources/query/state.py"),
        _gate("pii.tokens", "the tokens of values, before a table has them", "contracts/token_map.py"),
        _gate("landing.clear", "what a dead writer left is gone", "landing/folder_lock.py"),
        _gate("lake.table", "a new Delta table", "lake/schema.py"),
        _gate("lake.columns", "columns added to a Delta table", "lake/schema.py"),
        _gate("lake.retype", "the note that a table is made again under other types", "stages/retyping.py"),
        _gate(
            "lake.write",
            "what Spark wrote, in the staging folder",
            "lake/file_tasks.py",
            "lake/staging.py",
            "stages/updating_files.py",
        ),
        _gate("lake.place", "the files of a window in their place", "lake/staging.py"),
        _gate("lake.state", "the file with the state of a window", "lake/state.py"),
        _gate("lake.ledger", "a file of decisions, before its commit", "lake/ledger.py"),
        _gate("lake.commit", "the Delta commit", "lake/commit.py"),
        _gate("lake.noted", "what a look found of the windows, noted", "stages/window_index.py"),
        _gate("lake.earlier", "a folder of an earlier format of homes is gone", "cli/rebuild.py"),
        _gate("lake.sweep", "an unreferenced file or folder, moved aside", "lake/sweep.py"),
        _gate("lake.sweep_delete", "what was moved aside or left unfinished is gone", "lake/sweep.py"),
        _gate("dagster.run", "a run of the ingest job in this process", "defs/direct_run.py"),
        _gate("dagster.process", "which process a run is given, before it begins", "defs/run_launcher.py"),
        _gate("dagster.run_failed", "a lost run, marked failed", "defs/lost_runs.py"),
        _gate("dagster.pool", "the pool slots of a lost run, freed", "defs/lost_runs.py"),
        _gate("dagster.materialization", "a partition reported from the lake", "defs/checkpoints.py"),
        _gate("dagster.backfill", "the request for a backfill", "defs/backfills.py"),
        _gate(
            "sensor.answer",
            "a tick's requests and cursor, handed to Dagster",
            "defs/kafka_sensors.py",
            "defs/late_arrivals.py",
            "defs/query_sensors.py",
            "defs/sensors.py",
            "defs/targets.py",
        ),
        _gate(
            "target.commit", "rows of a target, with the version of the lake they are of", "targets/sync.py"
        ),
        _gate("export.file", "the file of an export", "stages/export.py"),
        _gate("checkpoint.file", "the file of `checkpoint export`", "cli/checkpoint.py"),
        _gate(
            "contract.file",
            "a contract made from its table, or the definition of a source",
            "cli/contracts_new.py",
            "cli/sources.py",
        ),
        _gate(
            "runtime.file",
            "a file that is written anew at every start",
            "runtime/connect_address.py",
            "runtime/connect_server.py",
            "runtime/dagster_home.py",
            "runtime/running.py",
        ),
    )
}
"""Every gate there is, in the order in which data passes them."""

_FAILPOINT = re.compile(r"(?P<point>[a-z_.]+\.(?:before|after))(?:@(?P<of>[^:]+))?(?::(?P<pass>\d+))?")


@dataclass(slots=True)
class _Armed:
    """A failpoint that was asked for."""

    point: str
    of: str
    passes_left: int

    def reached(self, point: str, of: object) -> None:
        if point != self.point or self.of not in str(of):
            return
        self.passes_left -= 1
        if self.passes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _armed_by(text: str) -> _Armed | None:
    if not text:
        return None
    found = _FAILPOINT.fullmatch(text)
    if found is None:
        raise ValueError(f"{VARIABLE}={text} is not GATE.before or GATE.after, with @TEXT or :N behind it")
    return _Armed(found["point"], found["of"] or "", int(found["pass"] or 1))


_armed = _armed_by(os.environ.get(VARIABLE, ""))


class gate:
    """``with gate(name, of):`` around exactly one durable effect on ``of`` (named for filters only).

    The point ``name.after`` is passed only if the effect did not raise.
    """

    __slots__ = ("_name", "_of")

    def __init__(self, name: str, of: object = "") -> None:
        self._name, self._of = name, of

    def __enter__(self) -> None:
        if _armed is not None:
            _armed.reached(f"{self._name}.before", self._of)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _armed is not None and kind is None:
            _armed.reached(f"{self._name}.after", self._of)
