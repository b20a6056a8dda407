"""Facts about files that the log of a table has and delta-rs does not pass on.

These are deletion vectors, statistics as text, and when a file left the table. They are read only for tables
that may have deletion vectors: from the newest checkpoint up to the version, then from the entries after it
(Delta protocol, "Action Reconciliation").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import DeltaTable

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.deletion_vectors import FEATURE, DeletionVector
from omnisupport_ingest.lake.delta import entry_file
from omnisupport_ingest.storage import at_hand, put_back, storage_of, take_away

_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
"""The name of a checkpoint in one file or in parts (Delta protocol, "Checkpoint Naming Scheme")."""

_READ = [f"add.{name}" for name in ("path", "stats", "deletionVector")]
_READ += [f"remove.{name}" for name in ("path", "deletionTimestamp", "deletionVector")]


class LogUnreadable(IngestError):
    """The log of a table does not say which files the table has, which have left it, or which rows are
    deleted.

    Fix: Restore the folder of the table from a backup; or remove it, and ``omnisupport-ingest materialize``
    makes the table anew.
    """

    exit_code = 4


@dataclass(frozen=True, slots=True)
class LoggedFile:
    """What the log says of a file that the table holds. ``stats``: JSON text; None if there is none."""

    vector: DeletionVector | None
    stats: str | None


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files of one version, by path.

    ``held``: files that the version holds. ``left``: path and vector of files that left → when (milliseconds
    since 1970), as far back as the log knows. A file that got another vector counts as left with its old one.
    """

    held: dict[str, LoggedFile] = field(default_factory=dict)
    left: dict[tuple[str, DeletionVector | None], int] = field(default_factory=dict)

    def needed(self, since: datetime) -> set[str]:
        """Return the paths of files, including those of vectors, that this version needs, or that one after
        ``since`` needed."""
        after = since.timestamp() * 1000
        found = {*self.held, *_paths_of(each.vector for each in self.held.values())}
        for (path, vector), moment in self.left.items():
            if moment > after:
                found |= {path, *_paths_of([vector])}
        return found

    def gone_vectors(self) -> set[str]:
        """Return the paths of vector files that left the table and that none of its files needs now."""
        held = set(_paths_of(each.vector for each in self.held.values()))
        return {*_paths_of(vector for _, vector in self.left)} - held


def _paths_of(vectors: Iterable[DeletionVector | None]) -> list[str]:
    paths = (vector.path for vector in vectors if vector is not None)
    return [path for path in paths if path is not None]


def has_vectors(handle: DeltaTable) -> bool:
    """Return whether the version that ``handle`` has open may have deletion vectors."""
    return FEATURE in (handle.protocol().reader_features or ())


def files_in_log(folder: Path, version: int) -> LogFiles:
    """Return the files of the table in ``folder`` at ``version``. Raises ``LogUnreadable``."""
    found, at = LogFiles(), -1
    for number, parts in sorted(_checkpoints(folder / "_delta_log").items(), reverse=True):
        if number <= version:
            for part in parts:
                _apply_checkpoint(found, part)
            at = number
            break
    for number in range(at + 1, version + 1):
        entry = entry_file(folder, number)
        try:
            lines = at_hand(entry).read_bytes().splitlines()
            for action in map(json.loads, lines):
                _apply(found, action)
        except FileNotFoundError:
            problem = f"its entry {entry.name} is gone, and no checkpoint stands for it"
            raise _unreadable(folder, problem) from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise _unreadable(folder, f"its entry {entry.name} cannot be read") from None
    return found


def left_since(folder: Path, version: int, since: datetime) -> set[str]:
    """Return the paths of files that left the table in ``folder`` after ``since``, including vector files.

    Reads the entries of the log up to ``version``, as far as they go back. Checkpoints cannot tell: they
    forget after a week which files left.
    """
    after, found = since.timestamp() * 1000, set[str]()
    for number in range(version, -1, -1):
        entry = entry_file(folder, number)
        committed = None
        try:
            for action in map(json.loads, at_hand(entry).read_bytes().splitlines()):
                if (fields := action.get("remove")) is not None and fields.get(
                    "deletionTimestamp", 0
                ) > after:
                    found |= {unquote(fields["path"]), *_paths_of([vector_of(fields)])}
                committed = action.get("commitInfo", {}).get("timestamp", committed)
        except FileNotFoundError:
            break
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            problem = f"its entry {entry.name} cannot be read"
            raise _unreadable(folder, problem, "what left the table lately") from None
        if committed is not None and committed <= after:
            break
    return found


def names_bounds_of(folder: Path, columns: Iterable[str]) -> bool:
    """Return whether the log of the table in ``folder`` has a bound of one of ``columns``, in an entry or a
    checkpoint of any version. Raises ``LogUnreadable``."""
    log, wanted = folder / "_delta_log", frozenset(columns)
    storage = storage_of(log)
    paths = log.iterdir() if storage.is_local else (each.path for each in storage.listed(log))
    for path in sorted(each for each in paths if each.suffix in (".json", ".parquet")):
        try:
            for stats in _stats_in(at_hand(path)):
                bounds = json.loads(stats)
                if any(wanted.intersection(bounds.get(name) or ()) for name in ("minValues", "maxValues")):
                    return True
        except FileNotFoundError:
            # The log was cleaned up in the meantime.
            continue
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            raise _unreadable(folder, f"{path.name} cannot be read", "which bounds it keeps") from None
    return False


def _stats_in(path: Path) -> Iterator[str]:
    """Yield the statistics of the files that an entry or a checkpoint adds."""
    if path.suffix == ".json":
        for line in path.read_bytes().splitlines():
            if stats := json.loads(line).get("add", {}).get("stats"):
                yield stats
    else:
        with pq.ParquetFile(path, pre_buffer=False) as parquet:
            for batch in parquet.iter_batches(4096, columns=["add.stats"]):
                yield from (each["stats"] for each in batch.column(0).to_pylist() if each and each["stats"])


def _apply(found: LogFiles, action: Mapping[str, Any]) -> None:
    """Apply the actions of one line. Those of one entry may stand in any order."""
    if (fields := action.get("remove")) is not None:
        path, vector = unquote(fields["path"]), vector_of(fields)
        held = found.held.get(path)
        if held is not None and held.vector == vector:
            del found.held[path]
        found.left[path, vector] = fields.get("deletionTimestamp") or 0
    if (fields := action.get("add")) is not None:
        path, vector = unquote(fields["path"]), vector_of(fields)
        found.held[path] = LoggedFile(vector, fields.get("stats"))
        found.left.pop((path, vector), None)


def vector_of(fields: Mapping[str, Any]) -> DeletionVector | None:
    """Return the deletion vector that an action names; None without one."""
    described = fields.get("deletionVector")
    return None if described is None else DeletionVector.of_log(described)


def _apply_checkpoint(found: LogFiles, checkpoint: Path) -> None:
    try:
        with pq.ParquetFile(at_hand(checkpoint), pre_buffer=False) as parquet:
            there = set(parquet.schema_arrow.names)
            if not {"add", "remove"} <= there:
                raise ValueError("no checkpoint")
            for batch in parquet.iter_batches(4096, columns=_READ):
                for action in batch.to_pylist():
                    _apply(found, action)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        folder = checkpoint.parent.parent
        raise _unreadable(folder, f"its checkpoint {checkpoint.name} cannot be read") from None


def _checkpoints(log: Path) -> dict[int, list[Path]]:
    """Return the files of each whole checkpoint in ``log``, by version."""
    storage = storage_of(log)
    paths = log.iterdir() if storage.is_local else (each.path for each in storage.listed(log))
    found: dict[tuple[int, int], list[Path]] = {}
    for path in paths:
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None:
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(path)
    return {version: sorted(those) for (version, parts), those in found.items() if len(those) == parts}


def _unreadable(folder: Path, problem: str, what: str = "which rows are dead") -> LogUnreadable:
    return LogUnreadable(
        f"The log of {folder} does not say {what}: {problem}.",
        fix=put_back(folder, "Restore the table's folder from a backup.")
        + f" Or {take_away(folder, 'remove it')}, and `omnisupport-ingest materialize` makes the table anew.",
    )
