"""The state of a window, kept inside the table in a Parquet file without rows.

One commit adds and removes the file together with the window's data, so the two cannot disagree; every reader
of the table reads it as zero rows. The state is JSON in the key-value metadata of the file's footer (Parquet
format, ``FileMetaData.key_value_metadata``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import require_file
from omnisupport_ingest.json_values import to_plain
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.records import Format, NewerFormat
from omnisupport_ingest.storage import at_hand, create_exclusively

FOOTER_KEY = b"omnisupport_ingest.window_state"

FORMAT_VERSION = 1
"""Version of the JSON; increased when older code could not read what newer code writes."""


_KEPT_BYTES = 32 * 1024 * 1024
"""Bytes of the states' text that a process keeps. A run asks for the states of its windows several times, for
two layers in turn. 10,000 states of windows with few batches take about 20 MB."""


class StateUnreadable(IngestError):
    """The state of a window is damaged or gone, so what the window was made from is unknown.

    Fix: Run the window again, as ``up`` does by itself: it is made from the layer above.
    """


class StateFromNewerVersion(IngestError):
    """The state of a window was written by a newer version of the program.

    Fix: Use that version.
    """


@dataclass(frozen=True, slots=True)
class WindowState:
    """What a window's content was made from, and how far.

    ``generation``: counts replacements of the window from 1. ``inputs``: every unit that was consumed (batch
    ids, or paths of files of the upstream table). ``upstream_table_id``: Delta id of the table those paths
    belong to; None where the inputs are batches. ``checkpoint``: how far the window is complete. ``batches``:
    the landed batches whose events the content holds, in every layer. ``companions``: paths of the quarantine
    files that belong to this content (of a window of deduped events). ``versions``: versions of the logic and
    contracts that made it; with other versions the window is stale. ``compacted_units``: for each file made
    by compaction, the names of the files it replaced; a downstream layer that consumed those has consumed it.
    ``carried``: text of the layer's own that its next update needs and no row holds; may be empty.
    ``made_from``: digest of the part of its input that ``versions`` and ``batches`` do not describe, in the
    window of the layer above; empty in states of program versions without it.
    """

    generation: int
    inputs: tuple[str, ...]
    upstream_table_id: str | None
    checkpoint: Checkpoint
    batches: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    compacted_units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    carried: str = ""
    made_from: str = ""

    @property
    def closed(self) -> bool:
        """Whether the window is compacted, and no event arrived since the watermark closed it."""
        return self.checkpoint.closed

    def same_work(self, other: WindowState) -> bool:
        """Return whether both record the same inputs, whichever run consumed them and when."""
        mine = (self.generation, frozenset(self.inputs), self.upstream_table_id)
        return mine == (other.generation, frozenset(other.inputs), other.upstream_table_id)

    def same_rows(self, other: WindowState) -> bool:
        """Return whether both were made from the same events by the same rules, and so have the same rows.
        False if they were made from different tables."""
        mine, its = (
            (
                *(each.versions, frozenset(each.batches), each.upstream_table_id, each.carried),
                *(each.made_from, each.checkpoint.content_hash),
            )
            for each in (self, other)
        )
        return mine == its

    def to_text(self) -> str:
        """Return one line of JSON; equal states give equal text."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "generation": self.generation,
                "inputs": self.inputs,
                "upstream_table_id": self.upstream_table_id,
                "checkpoint": to_plain(self.checkpoint),
                "batches": self.batches,
                "companions": self.companions,
                "versions": self.versions,
                "compacted_units": self.compacted_units,
                **({"carried": self.carried} if self.carried else {}),
                **({"made_from": self.made_from} if self.made_from else {}),
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> WindowState:
        """Read what ``to_text`` wrote; ``ValueError`` for any other text.

        States of versions that did not close windows have no ``compacted_units``.
        """
        state = _FORMAT.decode(text)
        # Intern the texts: states of all layers name the same batches, and those of a layer the same
        # versions.
        batches, versions = (tuple(map(sys.intern, each)) for each in (state.batches, state.versions))
        return replace(state, batches=batches, versions=versions)


_FORMAT = Format(WindowState, FORMAT_VERSION, strict=False)


def write_state(path: Path, state: WindowState, schema: pa.Schema) -> int:
    """Write ``state`` to ``path``, durable; return the size of the file in bytes.

    ``schema``: of the table's data files. The name of the file depends on its content, so a file that exists
    has the same content; its time is renewed, which protects it from ``sweep``.
    """
    metadata: dict[bytes | str, bytes | str] = {FOOTER_KEY: state.to_text().encode()}
    buffer = pa.BufferOutputStream()
    # No failpoint: a buffer in memory.
    pq.write_table(schema.with_metadata(metadata).empty_table(), buffer)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = buffer.getvalue().to_pybytes()
    with failpoint("lake.state", path):
        while not create_exclusively(path, content):
            try:
                os.utime(path)
                break
            except FileNotFoundError:
                continue
    return path.stat().st_size


def read_state(path: Path) -> WindowState:
    """Read the state in the footer of ``path``, once per process while the file's time and size stay the
    same.

    Raises ``StateUnreadable`` or ``StateFromNewerVersion`` naming the file, and ``PermissionError`` for a
    file that this user may not read.
    """
    try:
        written = at_hand(path).stat()
    except OSError:
        return _read(path)[0]
    version = written.st_mtime_ns, written.st_size
    state = _kept.get(path, version)
    if state is None:
        state, size = _read(path)
        _kept.put(path, version, state, size)
    return state


class _KeptStates:
    """The states that this process read last, up to ``_KEPT_BYTES`` of their text. Thread-safe."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Keep none. Called in a forked process, because another thread of its parent may hold the lock."""
        self._lock, self._bytes = threading.Lock(), 0
        self._states: dict[Path, tuple[tuple[int, int], WindowState, int]] = {}

    def get(self, path: Path, version: tuple[int, int]) -> WindowState | None:
        """Return the state in the file at ``path`` if it was read while the file had this ``version``."""
        with self._lock:
            kept = self._states.pop(path, None)
            if kept is None:
                return None
            # The last entry is the last used.
            self._states[path] = kept
            return kept[1] if kept[0] == version else None

    def put(self, path: Path, version: tuple[int, int], state: WindowState, size: int) -> None:
        """Keep ``state``, whose text has ``size`` bytes."""
        with self._lock:
            self._forget(path)
            self._states[path] = version, state, size
            self._bytes += size
            while self._bytes > _KEPT_BYTES:
                self._forget(next(iter(self._states)))

    def _forget(self, path: Path) -> None:
        gone = self._states.pop(path, None)
        if gone is not None:
            self._bytes -= gone[2]


_kept = _KeptStates()
os.register_at_fork(after_in_child=_kept.clear)


def _read(path: Path) -> tuple[WindowState, int]:
    """Return the state in the file at ``path``, and the bytes of its text."""
    try:
        require_file(path)
        text = (pq.read_metadata(path).metadata or {})[FOOTER_KEY]
        return WindowState.from_text(text.decode()), len(text)
    except NewerFormat as newer:
        raise StateFromNewerVersion(
            f"The state of a window in {path} {newer}.",
            fix="Use the newer omnisupport_ingest that wrote it.",
        ) from None
    except PermissionError:
        raise
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise StateUnreadable(
            f"The state of a window in {path} cannot be read: {type(error).__name__}: {error}.",
            fix="Restore the file from a backup, or run the window again: it is rebuilt from the layer "
            "upstream, and the damaged file leaves the table.",
        ) from error
