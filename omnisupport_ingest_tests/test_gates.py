"""Every durable effect of the package passes a named gate, or is listed here with the reason why not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import omnisupport_ingest
from omnisupport_ingest.failpoints import GATES
from omnisupport_ingest_tests.durable_effects import Effect, effects_outside_gates, scan
from omnisupport_ingest_tests.recovery import (
    test_crash_commands,
    test_crash_dagster,
    test_crash_inbox,
    test_crash_lake,
    test_crash_source,
)

PACKAGE = Path(omnisupport_ingest.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

PAGE = PACKAGE.parent / "docs" / "recovery.md"
BEGIN = (
    "<!-- gates: made from omnisupport_ingest/failpoints.py, kept by "
    "omnisupport_ingest_tests/test_gates.py -->"
)
END = "<!-- end of gates -->"

ELSEWHERE = {
    "lake.ledger": "review/test_reviews.py",
    "lake.upload": "storage/test_killed.py",
    "source.restart": "sources/postgres/capture/test_operating.py",
    "source.restart_clear": "sources/postgres/capture/test_operating.py",
    "source.capture_record": "sources/postgres/capture/test_operating.py",
    "landing.index": "landing/test_crash.py",
    "landing.accepted_loss": "sources/postgres/capture/test_repair.py",
    "landing.lost_changes": "sources/postgres/catalog/test_lost_changes.py",
    "source.published": "sources/postgres/catalog/test_faults_publication.py",
    "landing.schema_changes": "sources/postgres/catalog/test_schema_watch.py",
    "home.learned": "sources/postgres/catalog/test_schema_watch.py",
    "home.verified": "read/test_verified.py",
    "source.parked": "sources/postgres/capture/test_parked.py",
    "home.identity": "sources/postgres/slot/test_copied_home.py",
    "lake.retype": "layers/test_retyped.py",
    "lake.noted": "layers/test_window_index.py",
    "lake.listed": "lake/test_file_index.py",
    "source.snapshot_request": "sources/postgres/snapshot/test_snapshot_command.py",
    "source.snapshot_request_clear": "sources/postgres/snapshot/test_snapshot_command.py",
    "source.partitions": "sources/postgres/catalog/test_partitions.py",
    "pii.tokens": "contracts/test_token_map_killed.py",
    "pii.subject_keys": "sources/postgres/test_encrypting_killed.py",
    "kafka.mirror": "sources/kafka/test_killed.py",
    "query.state": "sources/query/test_killed.py",
    "lake.earlier": "cli/test_materialize.py",
    "dagster.process": "defs/test_run_launcher.py",
    "target.commit": "targets/test_target.py",
    "retention.landing": "retention/test_killed.py",
    "contract.withdrawn": "cli/test_withdraw.py",
    "lake.withdrawn": "cli/test_withdraw.py",
    "dagster.old_run": "retention/test_killed.py",
}
"""Gates that a test of their own part dies at."""

OWNERS: dict[str, tuple[str, ...]] = {
    "home.marker": ("home.py",),
    "home.in_force": ("contracts/in_force.py",),
    "home.identity": ("sources/postgres/slot/home_identity.py",),
    "source.publication": ("sources/postgres/catalog/publication.py",),
    "source.publication_drop": ("sources/postgres/catalog/publication.py",),
    "source.slot_intent": ("sources/postgres/slot/home_slot.py",),
    "source.slot": ("sources/postgres/slot/slot.py",),
    "source.slot_drop": ("sources/postgres/slot/slot.py",),
    "source.slot_intent_clear": ("sources/postgres/slot/home_slot.py",),
    "source.confirm": ("sources/postgres/protocol/walstream.py",),
    "source.pause": ("sources/postgres/capture/requests.py",),
    "source.resume": ("sources/postgres/capture/requests.py",),
    "source.restart": ("sources/postgres/capture/requests.py",),
    "source.restart_clear": ("sources/postgres/capture/requests.py",),
    "source.capture_record": ("sources/postgres/capture/state.py",),
    "source.snapshot_request": ("sources/postgres/snapshot/requests.py",),
    "landing.snapshot_plan": ("landing/snapshot_plans.py",),
    "source.snapshot_request_clear": ("sources/postgres/snapshot/requests.py",),
    "source.partitions": ("sources/postgres/catalog/partitions.py",),
    "landing.epoch": ("landing/epochs.py",),
    "source.published": ("sources/postgres/catalog/published.py",),
    "source.parked": ("sources/postgres/capture/parked.py",),
    "landing.accepted_loss": ("landing/accepted_losses.py",),
    "landing.lost_changes": ("landing/lost_changes.py",),
    "landing.schema_changes": ("landing/schema_changes.py",),
    "home.learned": ("contracts/learned.py",),
    "home.verified": ("read/verified.py",),
    "landing.data": ("landing/store.py",),
    "landing.manifest": ("landing/store.py",),
    "landing.index": ("landing/index.py",),
    "inbox.link": ("sources/debezium/inbox.py",),
    "inbox.unlink": ("sources/debezium/inbox.py",),
    "inbox.reason": ("sources/debezium/inbox.py",),
    "kafka.mirror": ("sources/kafka/sync.py",),
    "query.state": ("sources/query/state.py",),
    "pii.tokens": ("contracts/token_map.py",),
    "pii.subject_keys": ("contracts/subject_keys.py", "review/subject_erasure.py"),
    "landing.clear": ("landing/folder_lock.py", "landing/store.py"),
    "lake.table": ("lake/schema.py",),
    "lake.columns": ("lake/schema.py",),
    "lake.retype": ("layers/retyping.py",),
    "lake.write": (
        "lake/file_tasks.py",
        "lake/staging.py",
        "layers/updating_files.py",
        "retention/old_versions.py",
    ),
    "lake.place": ("lake/staging.py",),
    "lake.state": ("lake/state.py",),
    "lake.ledger": ("lake/ledger.py",),
    "lake.commit": ("lake/commit.py", "lake/log_entry.py"),
    "lake.upload": ("lake/delta.py",),
    "lake.noted": ("layers/window_index.py",),
    "lake.listed": ("lake/file_index.py",),
    "lake.earlier": ("cli/materialize.py",),
    "retention.landing": ("retention/removing.py",),
    "contract.withdrawn": ("withdrawal.py",),
    "lake.withdrawn": ("withdrawal.py",),
    "dagster.old_run": ("defs/retention.py",),
    "lake.sweep": ("lake/sweep.py",),
    "lake.sweep_delete": ("lake/sweep.py",),
    "dagster.run": ("defs/direct_run.py",),
    "dagster.process": ("defs/run_launcher.py",),
    "dagster.run_failed": ("defs/lost_runs.py",),
    "dagster.pool": ("defs/lost_runs.py",),
    "dagster.materialization": ("defs/checkpoints.py",),
    "dagster.backfill": ("defs/backfills.py",),
    "sensor.answer": (
        "defs/kafka_sensors.py",
        "defs/late_arrivals.py",
        "defs/query_sensors.py",
        "defs/sensors.py",
        "defs/targets.py",
    ),
    "target.commit": ("targets/sync.py",),
    "export.file": ("read/export.py", "read/export_ledger.py"),
    "checkpoint.file": ("cli/checkpoint.py",),
    "contract.file": (
        "cli/contracts_changes.py",
        "cli/contracts_new.py",
        "cli/init.py",
        "cli/sources.py",
    ),
    "runtime.file": (
        "cli/demo.py",
        "runtime/cluster.py",
        "runtime/connect_address.py",
        "runtime/connect_server.py",
        "runtime/dagster_home.py",
        "runtime/running.py",
        "runtime/spark.py",
        "runtime/standalone.py",
        "verify/again.py",
    ),
}
"""Gate → the modules of the package that may pass it."""

_GATED_BY_CALLER = "it is what gates stand around: every call of it is looked at where it is made"
_FOLDER = "a folder: one that is there already is as good"
_LOCK = "a lock of the kernel's, gone with its process; the text only says who holds it"
_EMBEDDED = "the embedded PostgreSQL, a source for trials: made beside its place and renamed into it"
_RUN_FILE = "tells what runs now; nothing in it outlives a restart"
_SCRATCH = "scratch that is removed, also that of a killed process, before it is made again"
_IN_INDEX = "inside the transaction that landing.index stands around; or of an index in memory"
_MEMORY = "a database in memory, or a buffer: nothing of it outlives the process"
_IN_LOOK = "inside the transaction of a look, whose commit lake.noted stands around"
_IN_LIST = "inside the transaction that lake.listed stands around"
_IN_TARGET = "inside the transaction of the target, whose commit target.commit stands around"
_READS = "the statement is made elsewhere in the same room, from SELECT"

_DAGSTERS = "what Dagster does there itself, in its own words: a run asked for, launched or to be ended"

_DRAFT = "a draft in the staging folder that no table names; lake.write stands around the job that writes it"

WITHOUT_GATE: dict[tuple[str, str], str] = {
    ("durable.py", "create_exclusively"): _GATED_BY_CALLER,
    ("durable.py", "replace"): _GATED_BY_CALLER,
    **{
        (f"{module}.py", f"{kind}.{name}"): _GATED_BY_CALLER
        for module, kind in (("storage", "LocalStorage"), ("bucket", "BucketStorage"))
        for name in ("create", "replace", "unlink")
    },
    ("storage.py", "bring_sources"): _FOLDER,
    ("cli/home_copy.py", "copy_home"): "objects of no home, until home.marker puts its marker beside them",
    ("bucket.py", "BucketStorage.first"): _GATED_BY_CALLER,
    ("bucket.py", "BucketStorage._upload"): _GATED_BY_CALLER,
    ("bucket.py", "BucketStorage._copied"): _GATED_BY_CALLER,
    ("bucket.py", "BucketStorage._bring_one"): "a copy of an object: it is brought again if it is lost",
    ("bucket.py", "BucketStorage._copy"): "a copy of an object: it is brought again if it is lost",
    ("landing/store.py", "LandingStore._make_durable"): "what landing.data stands around, where it is called",
    ("sources/postgres/protocol/transport.py", "SocketTransport._send"): _GATED_BY_CALLER,
    ("sources/postgres/protocol/transport.py", "LibpqTransport.send_copy_data"): _GATED_BY_CALLER,
    ("home.py", "Home.open"): _FOLDER,
    ("home.py", "Home._folder"): _FOLDER,
    ("landing/store.py", "LandingStore.__init__"): _FOLDER,
    ("landing/index.py", "LandingIndex._create"): "an empty file in the place of the index: it is made anew",
    ("landing/index.py", "LandingIndex._compare"): _IN_INDEX,
    ("landing/index.py", "LandingIndex._make"): _IN_INDEX,
    ("lake/file_index.py", "_rows_of"): _READS,
    **{
        ("lake/file_index_tables.py", name): _IN_LIST
        for name in ("forward", "_remove", "add", "put", "make_tables")
    },
    ("landing/index_tables.py", "insert"): _IN_INDEX,
    ("landing/index_tables.py", "forget"): _IN_INDEX,
    ("landing/index_tables.py", "touch"): _IN_INDEX,
    ("landing/index_tables.py", "fold"): _IN_INDEX,
    ("landing/folder_lock.py", "FolderLock.take"): _FOLDER,
    ("landing/folder_lock.py", "FolderLock.release"): "only an empty folder goes, and then nothing is lost",
    ("landing/parts.py", "PartFiles._begin"): "a file that no manifest names: it counts from landing.data on",
    ("landing/parts.py", "_Part.__post_init__"): "the same file, open for writing",
    (
        "landing/parts.py",
        "PartFiles.remove",
    ): "files that no manifest names; what stays, landing.clear removes",
    ("lake/schema.py", "open_with_schema"): _FOLDER,
    ("layers/retyping.py", "ask_for"): _FOLDER,
    ("contracts/learned.py", "LearnedColumns.learn"): _FOLDER,
    (
        "contracts/subject_keys.py",
        "SubjectKeys._make",
    ): "its folder, and a draft that is no store of keys until pii.subject_keys links it",
    ("review/subject_erasure.py", "_write"): _FOLDER,
    ("sources/postgres/catalog/schema_watch.py", "read_seen"): _READS,
    ("layers/window_index.py", "WindowIndex.put"): _IN_LOOK,
    ("layers/window_index.py", "WindowIndex.forget_all"): _IN_LOOK,
    ("layers/window_index.py", "WindowIndex._note_held"): _IN_LOOK,
    ("lake/staging.py", "stage_frame"): "the staging folder, and a draft in it that no table names",
    ("lake/staging.py", "place_files"): _DRAFT,
    ("lake/file_tasks.py", "made_by_tasks"): _DRAFT,
    ("lake/staging.py", "gathered"): _DRAFT,
    ("lake/staging.py", "stage_folders"): _DRAFT,
    ("lake/file_tasks.py", "Output.__init__"): _DRAFT,
    ("lake/file_tasks.py", "Output._file"): _DRAFT,
    ("lake/file_tasks.py", "Output.link"): _DRAFT,
    ("layers/event_copies.py", "mark_copies"): _SCRATCH,
    ("lake/file_tasks.py", "_Growing._write"): _DRAFT,
    ("lake/key_files.py", "_write"): _DRAFT,
    ("layers/updating_ranges.py", "_noted"): _DRAFT,
    ("layers/keyed_update.py", "KeyedUpdate.commit"): _DRAFT,
    ("retention/old_versions.py", "_leave"): _DRAFT,
    ("retention/withheld_values.py", "remove_values.attempt"): _DRAFT,
    ("retention/withheld_values.py", "_write"): _DRAFT,
    ("lake/staging.py", "_place"): "the step that lake.place stands around, where it is called",
    ("lake/state.py", "write_state"): _MEMORY,
    ("lake/ledger.py", "Ledger._write"): _MEMORY,
    ("lake/sweep.py", "_remove_if_old"): _FOLDER,
    ("runtime/connect_address.py", "ConnectAddress.forget"): _RUN_FILE,
    ("runtime/connect_server.py", "serve"): _RUN_FILE,
    ("runtime/dagster_services.py", "start_dagster_without_ui"): _SCRATCH,
    ("runtime/dagster_services.py", "prepare_dagster"): _SCRATCH,
    ("runtime/private_folders.py", "socket_folder"): _RUN_FILE,
    ("runtime/private_folders.py", "remove_socket_folder"): _RUN_FILE,
    ("runtime/private_folders.py", "Scratch.take"): _SCRATCH,
    ("runtime/private_folders.py", "Scratch.remove"): _SCRATCH,
    ("runtime/private_folders.py", "_remove_left_behind"): _SCRATCH,
    (
        "runtime/dagster_home.py",
        "remove_old_run_logs",
    ): "logs older than a month; what stays goes at the next start",
    ("cli/source_connect.py", "_with_passphrase"): "a file in memory, which ends with its process",
    ("defs/lost_runs.py", "_NamesItsProcess.execute"): "the steps of a run, which pass gates of their own",
    (
        "defs/lost_runs.py",
        "_record",
    ): "the name of a living process: without it, as with it, a run that was killed is a lost one",
    ("runtime/rotating_log.py", "RotatingLog.write"): "logs",
    ("runtime/rotating_log.py", "RotatingLog.catch_up"): "logs",
    ("runtime/rotating_log.py", "RotatingLog._with_room_for"): "logs",
    ("runtime/rotating_log.py", "RotatingLog._open"): "logs",
    ("runtime/fork_server.py", "ForkServer.serve"): _RUN_FILE,
    **{
        ("defs/run_launcher.py", name): _DAGSTERS
        for name in (
            "ReadyRunLauncher.launch_run",
            "ReadyRunLauncher.terminate",
            "PromptRunCoordinator.submit_run",
        )
    },
    ("runtime/guard.py", "PidFile.write"): _RUN_FILE,
    ("runtime/guard.py", "PidFile.remove"): _RUN_FILE,
    ("runtime/java.py", "_shim"): "a script made again wherever its content is not as it should be",
    ("sources/debezium/inbox.py", "Inbox._waiting"): _FOLDER,
    ("sources/debezium/inbox.py", "_moved"): _FOLDER,
    ("landing/first_windows.py", "FirstWindows.__init__"): "a temporary database of one landing",
    ("landing/first_windows.py", "FirstWindows._note"): "a temporary database of one landing",
    ("sources/debezium/latest_times.py", "LatestTimes.__init__"): "a temporary database of one reading",
    ("locks.py", "NamedLock.take"): _LOCK,
    ("sources/postgres/catalog/live_table.py", "read_live_tables"): _READS,
    ("sources/postgres/session/server.py", "open_transactions"): _READS,
    ("sources/postgres/catalog/partitions.py", "read_partitions"): _READS,
    ("sources/postgres/catalog/partitions.py", "read_root"): _READS,
    ("sources/postgres/catalog/partitions.py", "without_key"): _READS,
    ("sources/postgres/preflight/publication.py", "refused_writes"): _READS,
    ("sources/postgres/session/connection.py", "one_row"): _READS,
    ("sources/postgres/snapshot/comparison_rows.py", "write_text_rows"): _SCRATCH,
    ("sources/postgres/snapshot/compared_reading.py", "ComparedReading._chunk"): _SCRATCH,
    ("read/protected_rows.py", "protect_rows"): _SCRATCH,
    ("contracts/token_map.py", "_tables"): "inside the gate pii.tokens, where the map is made",
    ("read/dimension_rows.py", "DimensionRows.__init__"): _SCRATCH,
    ("read/dimension_rows.py", "DimensionRows.same"): _SCRATCH,
    ("read/dimension_rows.py", "DimensionRows.has"): _SCRATCH,
    ("read/dimension_rows.py", "PinnedDimensions.pin"): _SCRATCH,
    ("read/dimension_rows.py", "PinnedDimensions.rows"): _SCRATCH,
    (
        "sources/postgres/slot/slot.py",
        "_execute",
    ): "source.slot stands around it for a slot that stays; a temporary one goes with its session",
    ("sources/postgres/slot/slot.py", "flush_wal"): "a temporary slot, which goes with its session",
    ("sources/postgres/session/silence.py", "_first_row"): "a question, or the end of a session of ours",
    ("sources/postgres/session/silence.py", "AwaitedCursor._execute"): _GATED_BY_CALLER,
    ("sources/postgres/session/silence.py", "AwaitedReplicationCursor.execute"): _GATED_BY_CALLER,
    ("sources/postgres/snapshot/requests.py", "SnapshotRequests.write"): _FOLDER,
    ("landing/snapshot_plans.py", "SnapshotPlans.write"): _FOLDER,
    **{
        (
            "demo/actor.py",
            f"Actor.{name}",
        ): "the traffic of the demo, a client of its source"
        for name in ("truncate", "rows_of")
    },
    ("demo/actor.py", "Table.change_key"): "the traffic of the demo",
    **{
        ("sources/postgres/embedded/server.py", f"EmbeddedPostgres.{name}"): _EMBEDDED
        for name in ("start", "destroy", "_make_data", "_launch", "_make_database")
    },
    ("sources/postgres/embedded/binaries.py", "make_shared_folder"): _FOLDER,
    ("sources/postgres/embedded/binaries.py", "_copy"): _EMBEDDED,
    ("sources/postgres/embedded/location.py", "Location.choose"): _EMBEDDED,
    ("sources/postgres/embedded/location.py", "Location.remove"): _EMBEDDED,
    ("sources/postgres/embedded/location.py", "make_private_folder"): _EMBEDDED,
    ("sources/postgres/embedded/log.py", "ServerLog.open"): "logs",
    ("sources/postgres/embedded/log.py", "ServerLog._rotate"): "logs",
    ("sources/postgres/embedded/server.py", "remove_stale_locks"): "locks of a server that is dead",
    ("sources/postgres/catalog/cursor_candidates.py", "cursor_candidates"): _READS,
    **{("sources/query/dialect.py", f"DialectReader.{name}"): _READS for name in ("_take", "keys")},
    **{("sources/query/postgres.py", f"PostgresReader.{name}"): _READS for name in ("_asked", "_identity")},
    ("read/lake_keys.py", "DimensionKeys.__init__"): _MEMORY,
    **{
        ("read/lake_keys.py", f"DimensionKeys.{name}"): _MEMORY
        for name in ("_connection", "_one", "ordinals")
    },
    ("read/as_of_files.py", "write_tables"): _SCRATCH,
    ("read/as_of_files.py", "_remove_left_behind"): _SCRATCH,
    **{
        ("read/dimension_ranges.py", name): _MEMORY
        for name in (
            "DimensionRanges.__init__",
            "DimensionRanges.leave_out",
            "DimensionRanges.unresolved_keys",
            "DimensionRanges.even_cuts",
            "DimensionRanges.numbers",
        )
    },
    ("sources/postgres/snapshot/source_ranges.py", "SourceRanges._ask"): _READS,
    ("equality/checking.py", "_Round._compared"): _SCRATCH,
    ("read/brought_forward.py", "MovedOn.compare"): _MEMORY,
    ("read/brought_forward.py", "MovedOn._fold"): _SCRATCH,
    ("read/compare.py", "compare"): _MEMORY,
    ("verify/proof.py", "_ask"): _MEMORY,
    ("read/export.py", "write_file"): "the draft of an export, before export.file",
    ("read/export.py", "write_rows"): "the same draft, written by a database in memory",
    ("cli/doctor_machine.py", "_java"): _SCRATCH,
    ("read/dimension_changes.py", "_rows_of"): _MEMORY,
    ("read/dimension_changes.py", "_rows"): _MEMORY,
    ("report/page.py", "write"): "a page for people; the same command makes it again",
    ("cli/tune.py", "tune"): "a drawing for people; the same command makes it again",
    ("cli/tune.py", "_write"): "the .env with one line changed, in one step: the old or the new one",
    ("tuning/measuring.py", "scratch"): _SCRATCH,
    ("cli/doctor_archive.py", "write_archive"): "a file for people; the same command makes it again",
    **{("targets/sync.py", f"_Sync.{name}"): _IN_TARGET for name in ("_shape", "_merge")},
    ("targets/sync.py", "_Sync._of_target"): _SCRATCH,
    ("targets/sync.py", "_scratch"): _SCRATCH,
    ("targets/lake_rows.py", "Difference.__init__"): _MEMORY,
    ("cli/export.py", "as_of"): _FOLDER,
    (
        "cli/home.py",
        "remove_home",
    ): "a person removes everything; what a crash leaves, the same command removes",
    ("cli/contracts_new.py", "write_contracts"): _FOLDER,
    ("cli/sources.py", "new"): _FOLDER,
    ("verify/runs.py", "IngestRuns._answer"): "logs",
    ("verify/proof.py", "prove"): _SCRATCH,
    ("verify/proof.py", "_remove_left_behind"): _SCRATCH,
    ("equality/checking.py", "_remove_left_behind"): _SCRATCH,
    ("cli/reference.py", "main"): "a page of the documentation, for developers",
}
"""Module and function → why what it does needs no gate."""


def outside(module: str) -> list[Effect]:
    return list(effects_outside_gates((PACKAGE / module).read_text()))


@pytest.mark.parametrize("module", MODULES)
def test_every_durable_effect_passes_a_gate(module: str) -> None:
    bare = [effect for effect in outside(module) if (module, effect.function) not in WITHOUT_GATE]
    assert not bare, "\n".join(
        f"{module}:{effect.line} does {effect.what} in {effect.function or 'the module'}: put `with "
        "gate(...)` around it, or name the reason in WITHOUT_GATE"
        for effect in bare
    )


def test_every_exception_is_still_one() -> None:
    found = {(module, effect.function) for module in MODULES for effect in outside(module)}
    assert WITHOUT_GATE.keys() - found == set()


def test_every_gate_is_named_in_the_list_and_passed_by_its_owners_alone() -> None:
    passed: dict[str, set[str]] = {}
    for module in MODULES:
        for name, line in scan((PACKAGE / module).read_text()).gates:
            assert name is not None, f"{module}:{line}: the name of a gate is written out"
            passed.setdefault(name, set()).add(module)
    assert passed == {name: set(modules) for name, modules in OWNERS.items()}
    assert OWNERS.keys() == GATES.keys()


def gates_for_people() -> str:
    """The table of the documentation."""
    rows = [f"| `{gate.name}` | {gate.effect} |" for gate in GATES.values()]
    return "\n".join(["| gate | durable behind it |", "|---|---|", *rows])


def test_documentation_lists_the_gates_there_are() -> None:
    """To write it anew: ``python -m omnisupport_ingest_tests.test_gates``."""
    before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    assert PAGE.read_text() == f"{before}{BEGIN}\n{gates_for_people()}\n{END}{after}"


def test_every_gate_is_died_at() -> None:
    crashed = (test_crash_commands, test_crash_dagster, test_crash_inbox, test_crash_lake, test_crash_source)
    covered = set().union(*(module.COVERED for module in crashed))
    assert covered | ELSEWHERE.keys() == GATES.keys()
    for name, module in ELSEWHERE.items():
        assert f'"{name}.' in (Path(__file__).parent / module).read_text()


def test_no_gate_is_named_twice() -> None:
    """The second of two with one name would quietly take the place of the first."""
    tree = ast.parse((PACKAGE / "failpoints.py").read_text())
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in called if isinstance(call.func, ast.Name) and call.func.id == "_gate"]
    named = [call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)]
    assert named == list(GATES)


def test_a_gate_holds_something() -> None:
    """A gate around nothing durable would be counted as a point that was tested."""
    around_nothing = []
    for module in MODULES:
        found = scan((PACKAGE / module).read_text())
        held = {effect.gate for effect in found.effects}
        around_nothing += [(module, name) for name, _ in found.gates if name not in held]
    assert set(around_nothing) == {
        # They stand around calls of functions whose effects are found where they are made.
        ("landing/store.py", "landing.data"),
        ("lake/file_tasks.py", "lake.write"),
        ("retention/old_versions.py", "lake.write"),
        ("lake/staging.py", "lake.place"),
        ("sources/postgres/slot/slot.py", "source.slot"),
        # The cluster does.
        ("sources/kafka/sync.py", "kafka.mirror"),
        # Dagster makes them durable when it has the answer.
        ("defs/sensors.py", "sensor.answer"),
        ("defs/query_sensors.py", "sensor.answer"),
        ("defs/kafka_sensors.py", "sensor.answer"),
        ("defs/targets.py", "sensor.answer"),
        ("defs/late_arrivals.py", "sensor.answer"),
    }


PLANTED = {
    "os.link": "import os\ndef f(a, b):\n    os.link(a, b)",
    "os under another name": "import os as o\ndef f(a, b):\n    o.replace(a, b)",
    "a name of os": "from os import replace\ndef f(a, b):\n    replace(a, b)",
    "shutil.rmtree": "import shutil\ndef f(a):\n    shutil.rmtree(a)",
    "os.open for writing": "import os\ndef f(a):\n    return os.open(a, os.O_WRONLY | os.O_CREAT)",
    "open for writing": "def f(a):\n    with open(a, 'ab') as file:\n        return file",
    "open in a mode from elsewhere": "def f(a, mode):\n    return open(a, mode)",
    "Path.open for writing": "def f(path):\n    return path.open('w')",
    "Path.open by keyword": "def f(path):\n    return path.open(mode='xb')",
    "Path.write_text": "def f(path):\n    path.write_text('x')",
    "Path.unlink": "def f(path):\n    path.unlink(missing_ok=True)",
    "Path.rename": "def f(path, other):\n    path.rename(other)",
    "Path.mkdir": "def f(path):\n    path.mkdir()",
    "our own durable write": "from omnisupport_ingest import durable\ndef f(a):\n    durable.replace(a, b'')",
    "our own durable name": (
        "from omnisupport_ingest.durable import create_exclusively as make\ndef f(a):\n    make(a, b'')"
    ),
    "a Delta commit": "def f(handle):\n    handle.create_write_transaction([], mode='append')",
    "a Delta write": "from deltalake import write_deltalake\ndef f(a, rows):\n    write_deltalake(a, rows)",
    "a new Delta table": "from deltalake import DeltaTable\ndef f(a, s):\n    DeltaTable.create(a, s)",
    "Delta columns": "def f(handle, fields):\n    handle.alter.add_columns(fields)",
    "a Delta vacuum": "def f(handle):\n    handle.vacuum(retention_hours=1, dry_run=False)",
    "a Delta compaction": "def f(handle):\n    handle.optimize.compact()",
    "a data frame's writer": "def f(frame, a):\n    frame.write.parquet(a)",
    "a data frame's writer kept": "def f(frame, a):\n    writer = frame.write\n    writer.parquet(a)",
    "a Parquet file": "import pyarrow.parquet as pq\ndef f(rows, a):\n    pq.write_table(rows, a)",
    "a confirmation": "def f(cursor, lsn):\n    cursor.send_feedback(flush_lsn=lsn)",
    "a backfill": "def f(instance, backfill):\n    instance.add_backfill(backfill)",
    "an event of Dagster": "def f(instance, event):\n    instance.report_runless_asset_event(event)",
    "a slot": "def f(cursor):\n    cursor.execute('SELECT pg_drop_replication_slot(%s)', ('s',))",
    "a table at the source": "def f(cursor, name):\n    cursor.execute(f'CREATE TABLE {name} (id int)')",
    "SQL from elsewhere": "def f(cursor, statement):\n    cursor.execute(statement)",
    "an export": "def f(connection, a):\n    connection.execute(f\"COPY (SELECT 1) TO '{a}'\")",
    "in another thread than its gate": (
        "from omnisupport_ingest.failpoints import gate\nimport os\ndef f(run, a):\n"
        "    with gate('lake.commit'):\n        run(lambda: os.unlink(a))"
    ),
    "behind its gate": (
        "from omnisupport_ingest.failpoints import gate\nimport os\ndef f(a):\n"
        "    with gate('lake.commit'):\n        pass\n    os.unlink(a)"
    ),
    "inside another gate": (
        "import os\ndef gate(name):\n    ...\ndef f(a):\n    with gate('x'):\n        os.unlink(a)"
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_effect_is_found(planted: str) -> None:
    found = list(effects_outside_gates(planted))
    assert found and all(effect.function for effect in found)


HARMLESS = {
    "a text": "def f(text):\n    return text.replace('a', 'b')",
    "a time": "def f(moment):\n    return moment.replace(minute=0)",
    "a dataclass": "from dataclasses import replace\ndef f(x):\n    return replace(x, a=1)",
    "open for reading": "def f(path):\n    return open(path).read(), path.open('rb').read(), path.open()",
    "os.open for reading": "import os\ndef f(a):\n    return os.open(a, os.O_RDONLY | os.O_DIRECTORY)",
    "a file's own write": "def f(file):\n    file.write(b'x')",
    "a dry vacuum": "def f(handle):\n    return handle.vacuum(dry_run=True)",
    "a question": "def f(cursor):\n    cursor.execute('SELECT 1')",
    "in its gate": (
        "from omnisupport_ingest.failpoints import gate\nimport os\ndef f(a):\n"
        "    with gate('lake.commit', a):\n        os.unlink(a)"
    ),
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_not_durable_is_left_alone(text: str) -> None:
    assert list(effects_outside_gates(text)) == []


@pytest.mark.parametrize(
    ("module", "function", "what"),
    [
        ("lake/commit.py", "commit_actions", ".create_write_transaction"),
        ("sources/postgres/protocol/walstream.py", "WalStream.confirm", ".send_copy_data"),
    ],
)
def test_a_planted_effect_in_a_real_module_is_found(module: str, function: str, what: str) -> None:
    """The one that a commit or a confirmation without its gate would be: its `with` is taken out of the real
    text.
    """
    tree = ast.parse((PACKAGE / module).read_text())

    class WithoutGates(ast.NodeTransformer):
        def visit_With(self, node: ast.With) -> list[ast.stmt]:
            self.generic_visit(node)
            return node.body

    bare = ast.unparse(ast.fix_missing_locations(WithoutGates().visit(tree)))
    (found,) = effects_outside_gates(bare)
    assert (found.function, found.what) == (function, what)


if __name__ == "__main__":
    head, tail = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{gates_for_people()}\n{END}{tail}")
