"""Takes landed batches through every layer again: the content of no table may change.

The content of a layer depends only on what has landed. Hashes of the contents are compared in two ways. The
Dagster daemon replays a finished window by a backfill: every table must have the same content as before. And
the batches of a home go through every layer of another home with other settings: one machine, a cluster, and
a cluster of another size must give the same content, however the work was divided.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import parse_json, read_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers import checkpoints
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.records import encode
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest.storage import MARKER, at_hand, storage_of

if TYPE_CHECKING:
    from omnisupport_ingest.lake.table import LakeTable

# --- a window, replayed --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartedReplay:
    """The backfill that replays ``window``. ``before``: path of each table → content hash of the window
    before it."""

    source: str
    window: str
    backfill_id: str
    before: dict[str, str]


def replayable(workspace: Workspace, source: str) -> list[Checkpoint]:
    """Return the checkpoints of windows that have accepted events and are in every layer."""
    # Without a limit: a window may be behind only because of the last of very many batches.
    behind = pending_windows(workspace, source, limit=sys.maxsize).windows
    committed = checkpoints.read([workspace.deduped(source)])
    return [each for each in committed if each.deduped and each.window not in behind]


def start_replay(workspace: Workspace, source: str, launch: Callable[[str], str]) -> StartedReplay:
    """Start the replay of that replayable window which has the most events.

    ``launch``: called with the window; starts its backfill and returns the backfill's id.
    """
    window = max(replayable(workspace, source), key=lambda each: each.deduped).window
    # The hashes are read first: the backfill may be fast.
    before = _content_hashes(workspace, source, window)
    return StartedReplay(source, window, launch(window), before)


def changed_tables(workspace: Workspace, replay: StartedReplay) -> list[str]:
    """Return the paths of tables whose content the replay changed; empty if none did."""
    after = _content_hashes(workspace, replay.source, replay.window)
    return sorted(table for table, content in replay.before.items() if after.get(table) != content)


def _content_hashes(workspace: Workspace, source: str, window: str) -> dict[str, str]:
    hashes = {}
    for table in workspace.windowed_tables(source):
        snapshot = table.look()
        # A table without new events has no files in the open window.
        state = snapshot.state(window) if snapshot is not None else None
        if state is not None:
            hashes[table.spec.path] = state.checkpoint.content_hash
    return hashes


# --- all batches, in another home -----------------------------------------------------------------------

_NOT_COPIED = ("lake", "dagster", "logs", "run", "postgres", "inbox")
"""Folders of a home with what is made of its batches, or what only its processes need."""

Contents = Mapping[tuple[str, str], str]
"""Path of a table and window (``""`` for the current state) → content hash; only where there are rows."""


class NotMadeAgain(IngestError):
    """The batches of a home could not be taken through the layers again, so there is nothing to compare with.

    Fix: Read the logs that the message names.
    """


@dataclass(frozen=True)
class MadeAgain:
    """The contents that the same batches gave. ``seconds``: duration of the pass, with the start of Spark."""

    contents: Contents
    seconds: float


def contents(settings: Settings) -> Contents:
    """Return the content hash of every window with rows, in every table of the home of ``settings``."""
    workspace = Workspace.open(settings)
    nothing = str(ContentHash())
    hashes = {}
    for table in _tables(workspace):
        snapshot = table.look()
        if snapshot is None:
            continue
        for window in (*snapshot.windows(), WHOLE_TABLE):
            state = snapshot.state(window)
            if state is not None and state.checkpoint.content_hash != nothing:
                hashes[table.spec.path, window] = state.checkpoint.content_hash
    return hashes


def make_again(settings: Settings, home: Home, folder: Path, **changed: Any) -> MadeAgain:
    """Take the batches of ``home`` through every layer in the new home ``folder``; return the contents.

    ``changed``: settings that differ in the new home. No process may run on ``home`` meanwhile. Raises
    ``NotMadeAgain`` with the last line of the pass's output if the pass fails.
    """
    copy_batches(home, folder)
    own = {"home": folder, "storage": None, "dagster_pg_url": None}
    there = settings.model_copy(update={**own, **changed})
    outside = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "materialize"],
        # In a folder without an .env file, which could set what is None here.
        cwd=folder,
        env=outside | settings_environment(there),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise NotMadeAgain(
            f"The batches of {home.path} were not made again in {folder} (exit code {done.returncode}): "
            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}",
            fix=f"Read the logs in {folder / 'logs'}.",
        )
    return MadeAgain(contents(there), seconds)


def copy_batches(home: Home, folder: Path) -> None:
    """Make the new home ``folder``, which keeps everything in folders, with the landed batches of ``home``
    only.

    If ``home`` is in a bucket, its objects are downloaded first: the new home must not write to the same
    tables.
    """
    for each in storage_of(home.landing / "any").listed(home.landing):
        at_hand(each.path)
    with failpoint("runtime.file"):
        folder.mkdir(mode=0o700)
        for found in home.path.iterdir():
            if found.name not in _NOT_COPIED:
                target = folder / found.name
                shutil.copytree(found, target) if found.is_dir() else shutil.copy2(found, target)
        record = parse_json(read_file(folder / MARKER))
        if record.pop("storage", None) is not None:
            replace(folder / MARKER, encode(record))


def differing(one: Contents, other: Contents) -> list[str]:
    """Return the tables and windows whose content differs, named for a person, sorted."""
    return sorted(
        f"{table} {window}".rstrip()
        for table, window in one.keys() | other.keys()
        if one.get((table, window)) != other.get((table, window))
    )


def _tables(workspace: Workspace) -> Iterator[LakeTable]:
    for source in workspace.contracts.sources():
        yield from workspace.windowed_tables(source)
        for contract in workspace.contracts.of_source(source):
            yield workspace.dimension(contract)
