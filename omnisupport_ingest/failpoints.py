"""The gates of durable effects, where a crash test ends the process as ``kill -9`` would.

Whatever outlives the process (a file, a commit, a confirmation) is done inside ``with gate(...)``. Which
modules may pass which gate is for ``test_gates.py``: this module knows none of them. A gate has two points,
one just before its effect and one just after; ``OMNISUPPORT_FAILPOINT`` names the point to die at. Recovery
is only proved by dying for real: an exception would still run ``finally`` blocks and flush buffers. A gate
costs one comparison at each point when no test asks for it. This module and ``settings`` are the only
readers of the environment; a failpoint is no setting, so it is not listed there.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

VARIABLE = "OMNISUPPORT_FAILPOINT"
"""``GATE.before`` or ``GATE.after`` ends the process at the first pass of that point, ``…:N`` at the Nth.

``GATE.before@TEXT`` counts only passes whose object (a table's path, a batch's name) contains TEXT.
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """A kind of durable effect. ``effect``: in one line, what is durable after the gate."""

    name: str
    effect: str


def _gate(name: str, effect: str) -> Gate:
    return Gate(name, effect)


GATES: dict[str, Gate] = {
    each.name: each
    for each in (
        _gate("home.marker", "`home.json`, which fixes the grid of windows"),
        _gate("home.in_force", "`in_force.json`, which names contracts and decision table"),
        _gate("home.identity", "what tells this home from its copies"),
        _gate("source.publication", "the publication, made, extended, or without a withdrawn table"),
        _gate("source.publication_drop", "the publication is gone"),
        _gate("source.slot_intent", "the note that a slot is about to be made"),
        _gate("source.slot", "the permanent replication slot"),
        _gate("source.slot_drop", "the replication slot is gone"),
        _gate("source.slot_intent_clear", "that note is gone"),
        _gate("source.confirm", "the position told to the slot"),
        _gate("source.pause", "the note that capture is paused"),
        _gate("source.resume", "that note is gone"),
        _gate("source.restart", "the note that capture is to start again"),
        _gate("source.restart_clear", "that note is gone"),
        _gate("source.capture_record", "how the last capture began or ended"),
        _gate("source.snapshot_request", "the note that a table is to be read again"),
        _gate("landing.snapshot_plan", "the chunks of a snapshot, and that it needs the stream no more"),
        _gate("source.snapshot_request_clear", "that note is gone"),
        _gate("source.partitions", "the note of the partitions whose rows are known"),
        _gate("landing.epoch", "the record of an epoch"),
        _gate("source.published", "how the tables are published, to be compared with later"),
        _gate("source.parked", "the note of the tables that capture leaves out"),
        _gate("landing.accepted_loss", "the note of a loss that was accepted"),
        _gate("landing.schema_changes", "how captured tables look, and every change of it"),
        _gate("home.learned", "the columns that a contract has learned"),
        _gate("home.verified", "what is known of a table: equal to its source at which LSN"),
        _gate("landing.lost_changes", "the stretches in which changes of single tables may be missing"),
        _gate("landing.data", "the data files of a batch, synced"),
        _gate("landing.manifest", "the manifest: the batch exists"),
        _gate("landing.index", "what manifests say, noted in the index"),
        _gate("inbox.link", "a file taken from the inbox, beside the others"),
        _gate("inbox.unlink", "that file is gone from where it waited"),
        _gate("inbox.reason", "why a file was refused"),
        _gate("kafka.mirror", "the offsets told to the consumer group"),
        _gate("query.state", "how far a source has been read by its cursors"),
        _gate("pii.tokens", "the tokens of values, before a table has them"),
        _gate(
            "pii.subject_keys",
            "keys of subjects, before a file has values; that one is gone, certified",
        ),
        _gate("landing.clear", "what a dead writer left is gone"),
        _gate("lake.table", "a new Delta table"),
        _gate("lake.columns", "columns added to a Delta table"),
        _gate("lake.retype", "the note that a table is made again under other types"),
        _gate("lake.write", "what Spark wrote, in the staging folder"),
        _gate("lake.place", "the files of a window in their place"),
        _gate("lake.state", "the file with the state of a window"),
        _gate("lake.ledger", "a file of decisions, before its commit"),
        _gate("lake.upload", "the files that a commit is to name, in the object store"),
        _gate("lake.commit", "the Delta commit"),
        _gate("lake.noted", "what a look found of the windows, noted"),
        _gate("lake.listed", "which files a table holds, noted by window"),
        _gate("lake.earlier", "a folder of an earlier format of homes is gone"),
        _gate("retention.landing", "a data file or its empty folder has left landing; the ledger names it"),
        _gate("lake.sweep", "an unreferenced file or folder, moved aside"),
        _gate("lake.sweep_delete", "what was moved aside or left unfinished is gone"),
        _gate("dagster.run", "a run of the ingest job in this process"),
        _gate("dagster.process", "which process a run is given, before it begins"),
        _gate("dagster.run_failed", "a lost run, marked failed"),
        _gate("dagster.pool", "the pool slots of a lost run, freed"),
        _gate("dagster.materialization", "a partition reported from the lake"),
        _gate("dagster.old_run", "an old run is gone from Dagster's records"),
        _gate("dagster.backfill", "the request for a backfill"),
        _gate("sensor.answer", "a tick's requests and cursor, handed to Dagster"),
        _gate("target.commit", "rows of a target, with the version of the lake they are of"),
        _gate("export.file", "the file of an export, and its line in the ledger of exports"),
        _gate("checkpoint.file", "the file of `checkpoint export`"),
        _gate("contract.withdrawn", "the file of a contract or a source, moved to `withdrawn`"),
        _gate("lake.withdrawn", "a folder with the data of a withdrawn table or source is gone"),
        _gate(
            "contract.file",
            "a contract made from its table, the definition of a source, or a file of a new project",
        ),
        _gate("runtime.file", "a file that is written anew at every start"),
    )
}
"""Every gate there is, in the order in which data passes them."""

_FAILPOINT = re.compile(r"(?P<point>[a-z_.]+\.(?:before|after))(?:@(?P<of>[^:]+))?(?::(?P<pass>\d+))?")


@dataclass(slots=True)
class _Armed:
    """A failpoint that the environment sets."""

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
    match = _FAILPOINT.fullmatch(text)
    if match is None:
        raise ValueError(f"{VARIABLE}={text} is not GATE.before or GATE.after, with @TEXT or :N behind it")
    return _Armed(match["point"], match["of"] or "", int(match["pass"] or 1))


_armed = _armed_by(os.environ.get(VARIABLE, ""))

_watcher: Callable[[str, object], AbstractContextManager[object]] | None = None


def watched_by(watcher: Callable[[str, object], AbstractContextManager[object]] | None) -> None:
    """Have ``watcher`` be asked for what is around each effect of a gate from now on, by the gate's name and
    what it is on; None: nothing is."""
    global _watcher
    _watcher = watcher


class gate:
    """``with gate(name, of):`` around exactly one durable effect on ``of`` (named for filters only).

    The point ``name.after`` is passed only if the effect did not raise.
    """

    __slots__ = ("_name", "_of", "_watched")

    def __init__(self, name: str, of: object = "") -> None:
        self._name, self._of = name, of
        self._watched = _watcher(name, of) if _watcher is not None else None

    def __enter__(self) -> None:
        if self._watched is not None:
            self._watched.__enter__()
        if _armed is not None:
            _armed.reached(f"{self._name}.before", self._of)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _armed is not None and kind is None:
            _armed.reached(f"{self._name}.after", self._of)
        if self._watched is not None:
            self._watched.__exit__(kind, error, trace)
