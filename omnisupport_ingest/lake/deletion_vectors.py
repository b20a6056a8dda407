"""Deletion vectors: which rows of a file are dead, so that a table loses rows without a new file.

The format is Delta's (Delta protocol, "Deletion Vectors" and "Deletion Vector Format"): a Roaring bitmap of
row numbers, in the log entry itself (Z85 text) if it is small, else in a ``.bin`` file with a CRC-32.

A file with a vector must never be read as bare Parquet: that shows the dead rows. ``lake.live_rows`` and
``lake.read`` leave them out.
"""

from __future__ import annotations

import array
import base64
import hashlib
import struct
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.storage import at_hand, path_at_hand, replace

if TYPE_CHECKING:
    # Commands that only look import no NumPy.
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.int64]
    """Numbers of rows of a file, from 0, ascending."""

FEATURE = "deletionVectors"
"""The table feature (Delta protocol, table features)."""

PROPERTY = "delta.enableDeletionVectors"
"""The table property that lets other writers make vectors too."""

_INLINE_BYTES = 256
"""Largest vector, in bytes, that is stored in the log entry. Readers of the log get it without opening
another file."""

_MAGIC = 1681511377
_FILE_FORMAT = b"\x01"
_UUID_TEXT = 20
"""Characters of Z85 that a UUID takes."""

_OURS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _FROM_Z85 = str.maketrans(_OURS, _Z85), str.maketrans(_Z85, _OURS)


class VectorDamaged(IngestError):
    """A deletion vector is missing, damaged, or of a form that this program does not read.

    Fix: Restore the folder of the table from a backup; or remove it, and ``omnisupport-ingest materialize``
    makes the table anew.
    """

    exit_code = 4


class DeadRows(IngestError):
    """A file of the lake that is read as bare Parquet has rows that a deletion vector marks as deleted.

    Fix: If another program deleted rows of the table, restore the version before. If none did, report it.
    """


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Where the dead rows of one file are listed (Delta protocol, deletion vector descriptor).

    ``storage``: ``i`` for a vector in ``text`` itself, ``u`` for a file that ``text`` names by UUID, ``p``
    for an absolute path or URI. ``offset``: where it begins in the file. ``bytes``: its size.
    ``cardinality``: number of dead rows.
    """

    storage: str
    text: str
    offset: int | None
    bytes: int
    cardinality: int

    @classmethod
    def of_log(cls, fields: Mapping[str, Any]) -> DeletionVector:
        """Return the vector that an action of the log or a checkpoint describes.

        Raises ``KeyError`` or ``ValueError`` if ``fields`` describe no vector.
        """
        texts = fields["storageType"], fields["pathOrInlineDv"]
        numbers = fields.get("offset"), fields["sizeInBytes"], fields["cardinality"]
        whole = all(isinstance(each, int) and 0 <= each < 2**63 for each in numbers[1:])
        if not all(isinstance(each, str) for each in texts) or not whole:
            raise ValueError("no description of a deletion vector")
        if numbers[0] is not None and not (isinstance(numbers[0], int) and 0 <= numbers[0] < 2**63):
            raise ValueError("no offset of a deletion vector")
        return cls(*texts, fields.get("offset"), fields["sizeInBytes"], fields["cardinality"])

    def in_log(self) -> dict[str, Any]:
        """Return the descriptor as an action of the log has it."""
        found: dict[str, Any] = {"storageType": self.storage, "pathOrInlineDv": self.text}
        if self.offset is not None:
            found["offset"] = self.offset
        return found | {"sizeInBytes": self.bytes, "cardinality": self.cardinality}

    @property
    def path(self) -> str | None:
        """The path of its ``.bin`` file relative to the table; None for one in the log or outside the
        table."""
        if self.storage != "u" or len(self.text) < _UUID_TEXT:
            return None
        try:
            name = uuid.UUID(bytes=_decoded(self.text[-_UUID_TEXT:]))
        except ValueError:
            return None
        return str(PurePosixPath(self.text[:-_UUID_TEXT], f"deletion_vector_{name}.bin"))


class MayHaveDeadRows(Protocol):
    """A file of a table: ``layout.LakeFile``, ``key_files.KeyFile``."""

    @property
    def path(self) -> str: ...

    @property
    def full_path(self) -> str: ...

    @property
    def vector(self) -> DeletionVector | None: ...

    @property
    def stored_rows(self) -> int: ...


def path_without_dead_rows(file: MayHaveDeadRows) -> str:
    """Return a path of ``file`` that can be opened as bare Parquet; the file is downloaded first if an object
    store keeps it. Raises ``DeadRows`` for a file with a vector."""
    if file.vector is not None:
        raise DeadRows(
            f"{file.full_path} has rows that a deletion vector marks as dead, and this command reads files "
            "of the table as bare Parquet.",
            fix="If another program deleted rows of this table, restore the version before: rows of the lake "
            "are never deleted one by one. If nobody did, report it as a fault of the program.",
        )
    return path_at_hand(file.full_path)


def are_there(files: Iterable[MayHaveDeadRows]) -> bool:
    """Return whether all ``files`` can still be read, with their vectors.

    A sweep deletes the vector of an older version, and keeps the file if the table holds it with another one.
    """
    return all(map(_is_there, files))


def _is_there(file: MayHaveDeadRows) -> bool:
    if not Path(path_at_hand(file.full_path)).exists():
        return False
    if file.vector is None or file.vector.storage == "i":
        return True
    return _file_of(_table_of(file), file.vector).exists()


def read_vector(folder: Path, vector: DeletionVector) -> Rows:
    """Return the dead rows that ``vector``, of the table in ``folder``, lists.

    Raises ``VectorDamaged``.
    """
    if vector.storage == "i":
        where = f"The deletion vector in the log of {folder}"
        content = _inline(vector, where)
    else:
        file = _file_of(folder, vector)
        where = f"The deletion vector at byte {vector.offset or 0} of {file}"
        content = _in_file(file, vector, where)
    rows = _rows_in(content, where)
    if len(rows) != vector.cardinality:
        raise _damaged(where, f"lists {len(rows)} rows; the log says {vector.cardinality}")
    return rows


def dead_rows_of(file: MayHaveDeadRows) -> Rows:
    """Return the dead rows of ``file``; none if it has no vector. Raises ``VectorDamaged``."""
    import numpy as np

    if file.vector is None:
        return np.zeros(0, np.int64)
    rows = read_vector(_table_of(file), file.vector)
    if len(rows) and rows[-1] >= file.stored_rows:
        where = f"The deletion vector of {file.full_path}"
        raise _damaged(where, f"lists row {rows[-1]}; the file has {file.stored_rows}")
    return rows


def live_mask(dead: Rows, rows: int) -> npt.NDArray[np.bool_]:
    """Return a mask of ``rows`` rows: True for live ones, False for those numbered in ``dead``."""
    import numpy as np

    mask = np.ones(rows, np.bool_)
    mask[dead] = False
    return mask


def write_vectors(folder: Path, unit: str, dead: Mapping[str, Rows]) -> dict[str, DeletionVector]:
    """Write the vectors of one commit to the table in ``folder``; return them by the path of their file.

    ``unit``: folder in the table (``layout.unit_folder``) of the one ``.bin`` file, if any vector needs it.
    ``dead``: path of a file of the table → all of its dead rows, including those of its previous vector. The
    same rows always give the same file name, so work that is done twice leaves one file.
    """
    vectors: dict[str, DeletionVector] = {}
    large: dict[str, tuple[bytes, int]] = {}
    for path, rows in sorted(dead.items()):
        content = encoded(rows)
        if len(content) <= _INLINE_BYTES:
            vectors[path] = DeletionVector("i", _z85(content), None, len(content), len(rows))
        else:
            large[path] = content, len(rows)
    if not large:
        return vectors
    parts, size = [_FILE_FORMAT], len(_FILE_FORMAT)
    offsets = {}
    for path, (content, _) in large.items():
        offsets[path] = size
        parts += [struct.pack(">I", len(content)), content, struct.pack(">I", zlib.crc32(content))]
        size += len(content) + 8
    whole = b"".join(parts)
    name = uuid.UUID(bytes=hashlib.sha256(whole).digest()[:16])
    file = folder / unit / f"deletion_vector_{name}.bin"
    # No failpoint: making a folder that exists already does no harm.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with failpoint("lake.vectors", file):
        # Write an existing file again too: its new time tells ``sweep`` that a commit is about to name it.
        replace(file, whole)
    for path, (content, count) in large.items():
        text = f"{unit}{_z85(name.bytes)}"
        vectors[path] = DeletionVector("u", text, offsets[path], len(content), count)
    return vectors


def encoded(rows: Rows) -> bytes:
    """Return the serialized vector of ``rows``: magic number and portable 64-bit Roaring bitmap."""
    import numpy as np
    from pyroaring import BitMap64

    bitmap = BitMap64(array.array("Q", np.asarray(rows, np.uint64).tobytes()))
    bitmap.run_optimize()
    return struct.pack("<I", _MAGIC) + bytes(bitmap.serialize())


def _rows_in(content: bytes, where: str) -> Rows:
    # Most processes never meet a vector.
    import numpy as np
    from pyroaring import BitMap64

    if len(content) < 4 or struct.unpack("<I", content[:4])[0] != _MAGIC:
        raise _damaged(where, "is no Roaring bitmap of the portable form")
    try:
        bitmap = BitMap64.deserialize(content[4:])
    except (ValueError, TypeError, OverflowError):
        raise _damaged(where, "cannot be decoded") from None
    return np.array(bitmap.to_array(), np.int64)


def _inline(vector: DeletionVector, where: str) -> bytes:
    try:
        content = _decoded(vector.text)
    except ValueError:
        raise _damaged(where, "is no Z85 text") from None
    if not vector.bytes <= len(content) < vector.bytes + 4:
        raise _damaged(where, f"has {len(content)} bytes; the log says {vector.bytes}")
    return content[: vector.bytes]


def _in_file(file: Path, vector: DeletionVector, where: str) -> bytes:
    at = vector.offset or 0
    try:
        with file.open("rb") as opened:
            form = opened.read(1)
            opened.seek(at)
            size, end = opened.read(4), at + vector.bytes + 8
            whole = size == vector.bytes.to_bytes(8, "big")[4:] and end <= file.stat().st_size
            content, check = (opened.read(vector.bytes), opened.read(4)) if whole else (b"", b"")
    except FileNotFoundError:
        raise _damaged(where, "is missing") from None
    except OSError as problem:
        raise _damaged(where, f"cannot be read ({problem.strerror})") from None
    if form != _FILE_FORMAT:
        raise _damaged(where, "is in a file of another format")
    if not whole:
        raise _damaged(where, f"does not have the {vector.bytes} bytes that the log says")
    if check != struct.pack(">I", zlib.crc32(content)):
        raise _damaged(where, "does not have its checksum")
    return content


def _table_of(file: MayHaveDeadRows) -> Path:
    return Path(file.full_path.removesuffix(f"/{file.path}"))


def _file_of(folder: Path, vector: DeletionVector) -> Path:
    relative = vector.path
    if relative is not None:
        return at_hand(folder / relative)
    target = urlsplit(vector.text)
    if vector.storage == "p" and target.scheme in ("", "file"):
        return Path(path_at_hand(unquote(target.path) if target.scheme else vector.text))
    raise _damaged(f"A deletion vector in the log of {folder}", "is stored in a way that we do not read")


def _z85(content: bytes) -> str:
    padded = content + bytes(-len(content) % 4)
    return base64.b85encode(padded).decode().translate(_TO_Z85)


def _decoded(text: str) -> bytes:
    """Return the bytes of a Z85 text; ``ValueError``."""
    if len(text) % 5 or not set(text) <= set(_Z85):
        raise ValueError("no Z85 text")
    return base64.b85decode(text.translate(_FROM_Z85))


def _damaged(where: str, problem: str) -> VectorDamaged:
    return VectorDamaged(
        f"{where} {problem}.",
        fix="Restore the table's folder from a backup; or remove it, and `omnisupport-ingest materialize` "
        "makes the table anew. In a bucket these are its objects, and the copies of them in each home.",
    )
