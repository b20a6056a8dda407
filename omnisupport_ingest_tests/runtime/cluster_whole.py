"""Takes a stream of which much is not as it should be through every layer, as a program of its own.

On the Spark of its settings: two passes with a window that closes between them, the erasure of a row, and a
replay of everything. Then it looks: checks, the preview of a replay and a state of the past, whose results go
to the file that ``looks_of`` names. Where the contract encrypts: a pass, the erasure of a subject and of a
row, and another pass. With a folder as its argument, a task on each executor first notes there what it sees
of the home.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from bench.landed import MIXED, Tickets
from omnisupport_ingest.checks import content_checks, history_checks
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.subject_keys import NOTE
from omnisupport_ingest.contracts.token_map import FILE as TOKENS
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import Reading
from omnisupport_ingest.read.replay_preview import preview_replay
from omnisupport_ingest.review.erasing import erase
from omnisupport_ingest.review.subject_erasure import erase_subject
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest_tests.recovery.pipeline import run_layers

SOURCE = "support_desk"
START = datetime(2026, 3, 2, 12, tzinfo=UTC)
ASKED: dict[str, str] = {"erased_by": "A test", "why": "It asked for it"}


def look(batches: Iterable[pa.RecordBatch], *, home: str, said: str) -> Iterator[pa.RecordBatch]:
    """Note what this executor sees in the ``home``."""
    for batch in batches:
        (Path(said) / f"seen-{os.getpid()}").write_text(
            "\n".join(sorted(each.name for each in Path(home).iterdir()))
        )
        # So that the other executor takes the other task.
        time.sleep(1)
        yield batch


def main(said: str | None) -> None:
    settings = Settings(_env_file=None)
    workspace, spark = Workspace.open(settings), session(settings)
    if said is not None:
        noted = partial(look, home=str(settings.home), said=said)
        spark.range(0, 2, 1, 2).mapInArrow(noted, "id long").collect()
    [contract] = workspace.contracts.of_source(SOURCE)
    (plain if contract.subject is None else protected)(workspace, spark)


def plain(workspace: Workspace, spark: SparkSession) -> None:
    stream = Tickets(workspace.landing(SOURCE), workspace.grid, mix=MIXED)
    stream.land(24_000, START)
    stream.land(2_000, START + timedelta(hours=1))
    take_in(workspace, spark)
    earlier = Position(1, Lsn(stream.lsn), 0)
    stream.land(3_000, START)
    stream.land(1_000, START + timedelta(hours=5))
    take_in(workspace, spark)
    [contract] = workspace.contracts.of_source(SOURCE)
    erase(workspace, contract, a_key(workspace, is_deleted=True), **ASKED)
    take_in(workspace, spark)
    take_in(workspace, spark, replay=True)
    looks = look_at_all(workspace, spark, earlier)
    looks_of(workspace.settings).write_text(json.dumps(looks, indent=1))


def protected(workspace: Workspace, spark: SparkSession) -> None:
    [contract] = contracts = workspace.contracts.of_source(SOURCE)
    exchange_secrets(workspace.settings, taken=True)
    store = encrypting_store(workspace.home, SOURCE, contracts)
    Tickets(store, workspace.grid, mix=MIXED).land(3_000, START)
    take_in(workspace, spark)
    exchange_secrets(workspace.settings, taken=False)
    erase_subject(workspace, contract, a_key(workspace, is_deleted=False), **ASKED)
    erase(workspace, contract, a_key(workspace, is_deleted=True), **ASKED)
    take_in(workspace, spark)


def exchange_secrets(settings: Settings, *, taken: bool) -> None:
    """Give the keys and tokens of this home to a folder beside it, or take those that another home gave.

    By the same ones two homes have the same content.
    """
    shared = settings.home.parent / "secrets"
    for name in (SUBJECT_KEYS, NOTE, TOKENS):
        source, target = settings.home / name, shared / name
        if taken:
            source, target = target, source
        if source.exists() and not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def looks_of(settings: Settings) -> Path:
    """The file with what a run in this home saw when it looked."""
    return settings.home.with_suffix(".looks.json")


def look_at_all(workspace: Workspace, spark: SparkSession, earlier: Position) -> dict[str, Any]:
    """What is seen by tasks of Spark: checks, what a replay would change, and the state at ``earlier``."""
    [contract] = contracts = workspace.contracts.of_source(SOURCE)
    files = EventFiles.newest(workspace, SOURCE)
    assert files is not None
    past = Reading(tuple(contracts), earlier, files).table(spark, contract)
    checks = [
        *(
            check(workspace, spark, contract)
            for check in (
                content_checks.keys_unique,
                content_checks.no_unresolved_cells,
                content_checks.meets_contract,
            )
        ),
        *(
            check(workspace, spark, contract, whole=whole)
            for check in (history_checks.open_rows_are_current_state, history_checks.versions_do_not_overlap)
            for whole in (False, True)
        ),
    ]
    windows = workspace.landing(SOURCE).windows()
    return {
        "past": sorted(map(list, past.select("_cdc_key", "_cdc_is_deleted", "status", "body").collect())),
        "preview": asdict(preview_replay(workspace, spark, SOURCE, windows, contracts)),
        "checks": [asdict(each) for each in checks],
    }


def take_in(workspace: Workspace, spark: SparkSession, *, replay: bool = False) -> None:
    windows = workspace.landing(SOURCE).windows()
    run_layers(workspace, spark, windows, SOURCE, replay=replay)
    for contract in workspace.contracts.of_source(SOURCE):
        history.materialize(workspace, spark, contract, "run", replay=replay)


def a_key(workspace: Workspace, *, is_deleted: bool) -> str:
    """The first key, as text, of the rows that have ended, or of those that live."""
    [contract] = workspace.contracts.of_source(SOURCE)
    table = workspace.dimension(contract)
    rows = rows_of(table.open().all_files(), arrow_schema(table.spec.schema, without=()))
    return str(min(row["_cdc_key"] for row in rows.to_pylist() if row["_cdc_is_deleted"] == is_deleted))


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
