"""The state of a window, kept inside the table in a Parquet file without rows.

The file is added and removed by the commit that adds and removes the window's data, so the two
cannot disagree; every reader of the table reads it as zero rows. The state is JSON in the key-value
metadata of the file's footer (Parquet format, ``FileMetaData.key_value_metadata``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import parse_json, require_file
from omnisupport_ingest.json_values import from_note
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.storage import at_hand, create_exclusively

FOOTER_KEY = b"omnisupport_ingest.window_state"

FORMAT_VERSION = 1
"""Version of the JSON; raised when older code could not read a newer one."""


_STATES_KEPT = 1024
"""States that a process remembers. A tick of a sensor asks for those of every window."""


class StateUnreadable(IngestError):
    """A window's state is damaged or gone: what the window was made from is not known."""


class StateFromNewerVersion(IngestError):
    """A window's state has a format version that this program does not know."""


class _Newer(ValueError):
    """The format version of a state that is too new to be read."""


@dataclass(frozen=True, slots=True)
class _Version:
    format_version: int


@dataclass(frozen=True, slots=True)
class WindowState:
    """What a window's content was made from, and how far.

    ``generation`` counts replacements of the window from 1. ``inputs`` names every unit consumed
    (batch ids, or paths of files of the table above). ``upstream_table_id`` is the Delta id of the
    table those paths belong to, ``None`` where the inputs are batches. ``batches`` names the landed
    batches whose events the content holds, in every layer. ``companions`` are paths of files of a
    second table that belong to this content (the quarantine of a window of deduped events).
    ``versions`` are those of the logic and contracts that made it: with others it is stale.
    ``compacted_units``: for each of its files that was made by folding others, the names of the files
    that were folded into it; a layer below that took those has taken this one. ``carried``: what the
    layer must know for its next update and no row says (text of its own); empty where there is nothing.
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

    @property
    def closed(self) -> bool:
        """Whether nothing is left to fold, and nothing has come since the watermark closed the window."""
        return self.checkpoint.closed

    def same_work(self, other: WindowState) -> bool:
        """Whether both say that the same inputs were taken, whoever took them and when."""
        mine = (self.generation, frozenset(self.inputs), self.upstream_table_id)
        return mine == (other.generation, frozenset(other.inputs), other.upstream_table_id)

    def to_text(self) -> str:
        """One line of JSON, the same for equal states."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "generation": self.generation,
                "inputs": self.inputs,
                "upstream_table_id": self.upstream_table_id,
                "checkpoint": self.checkpoint.to_json(),
                "batches": self.batches,
                "companions": self.companions,
                "versions": self.versions,
                "compacted_units": self.compacted_units,
                **({"carried": self.carried} if self.carried else {}),
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> WindowState:
        """Read what ``to_text`` wrote; ``ValueError`` for something else.

        States written before windows were closed have no compacted units.
        """
        record = parse_json(text)
        version = from_note(_Version, record).format_version
        if version > FORMAT_VERSION:
            raise _Newer(version)
        state = from_note(cls, record)
        # The states of every layer name the same batches.
        return replace(state, batches=tuple(map(sys.intern, state.batches)))


def write_state(path: Path, state: WindowState, schema: pa.Schema) -> int:
    """Write ``state`` to ``path``, durable; returns the size of the file in bytes.

    ``schema`` is that of the table's data files. The name of the file follows from the content, so
    a file that is there already is the same one; its age starts again, which keeps ``sweep`` off.
    """
    metadata: dict[bytes | str, bytes | str] = {FOOTER_KEY: state.to_text().encode()}
    buffer = pa.BufferOutputStream()
    # No failpoint: a database in memory, or a buffer: nothing of it outlives the process.
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
    """Read the state in the footer of ``path``; once per process, unless the file has become another one.

    ``StateUnreadable`` or ``StateFromNewerVersion`` name the file; a file that this user may not
    read is a ``PermissionError``.
    """
    try:
        written = at_hand(path).stat()
    except OSError:
        return _read(path, 0, 0)
    return _read(path, written.st_mtime_ns, written.st_size)


@lru_cache(maxsize=_STATES_KEPT)
def _read(path: Path, _changed: int, _size: int) -> WindowState:
    try:
        require_file(path)
        metadata = pq.read_metadata(path).metadata or {}
        return WindowState.from_text(metadata[FOOTER_KEY].decode())
    except _Newer as newer:
        raise StateFromNewerVersion(
            f"The state of a window in {path} has format version {newer}; this program reads up to "
            f"{FORMAT_VERSION}.",
            fix="Use the newer omnisupport_ingest that wrote it.",
        ) from None
    except PermissionError:
        raise
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise StateUnreadable(
            f"The state of a window in {path} cannot be read: {type(error).__name__}: {error}.",
            fix="Restore the file from a backup, or run the window again: it is made again from the layer "
            "above, and the damaged file leaves the table.",
        ) from error
