"""The compiled functions that read changes, rows, lines, row images and values, if they are installed.

They are compiled when the package is installed on a machine with a C compiler; a built wheel has them.
Without them rows are converted one by one in Python, and columns of values by Arrow, with the same result, at
several times the processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from zipimport import zipimporter

import numpy.typing as npt
import pyarrow as pa

Bytes = bytes | bytearray | memoryview | npt.NDArray[Any]
"""What the functions read. An array must be contiguous, of the type that the function names."""

Texts = tuple[Bytes, Bytes]
"""Texts that stand one after the other, and where each begins (int32), the end of the last one behind."""

Memory = tuple[object, int, int]
"""A block of memory that a compiled function made: who owns it, its address, its size in bytes."""

Column = tuple[Memory, Memory, Memory | None]
"""A column of texts: offsets (int32), content, and the bits of those that are not null (None: all)."""


class CompiledFrames(Protocol):
    """The functions of ``compiled_frames.c``, which says what each does. They check all arguments."""

    def find_frames(self, data: Bytes, at: int, filled: int, longest: int, letter: int, /) -> bytes: ...

    def join(self, data: Bytes, starts: Bytes, ends: Bytes, /) -> bytes: ...


class CompiledReceiver(Protocol):
    """The functions of ``compiled_receiver.c``, which says what each does. They check all arguments."""

    def start(self, descriptor: int, room: int, /) -> object: ...

    def take(
        self, receiver: object, into: memoryview, enough: int, idle_micros: int, most_micros: int, /
    ) -> int | None: ...

    def wait(self, receiver: object, micros: int, /) -> bool: ...

    def stop(self, receiver: object, /) -> None: ...


class CompiledRows(Protocol):
    """The functions of ``compiled_rows.c``, which says what each does. They check all arguments."""

    def convert_changes(
        self, pieces: Sequence[tuple[Bytes, Bytes, Bytes]], *arguments: Bytes | bool
    ) -> tuple[bytes, tuple[Column, ...], bytes, bytes]: ...

    def convert_lines(self, *arguments: Bytes) -> tuple[Column, Column, Memory, Memory] | None: ...


class CompiledImages(Protocol):
    """The functions of ``compiled_images.c``, which says what each does. They check all arguments."""

    def contains(self, data: Bytes | pa.Buffer, start: int, stop: int, wanted: bytes, /) -> bool: ...

    def read(
        self,
        data: Bytes | pa.Buffer,
        offsets: Bytes,
        valid: pa.Buffer | None,
        first: int,
        names: Texts,
        texts: int,
        /,
    ) -> tuple[Memory, tuple[Column, ...], Memory, Memory]: ...


class CompiledLines(Protocol):
    """The functions of ``compiled_lines.c``, which says what each does. They check all arguments."""

    def walk(
        self, content: Bytes, starts: Bytes, stops: Bytes, lines: Bytes, steps: Bytes, texts: Texts, /
    ) -> tuple[Memory, Memory, Memory, Memory, int]: ...

    def cut(self, content: Bytes, begins: Bytes, ends: Bytes, is_null: Bytes, inside: int, /) -> Column: ...

    def numbers(self, content: Bytes, begins: Bytes, ends: Bytes, is_null: Bytes, /) -> Memory: ...


class CompiledValues(Protocol):
    """The functions of ``compiled_values.c``, which says what each does. They check all arguments."""

    def wholes(
        self, data: Bytes | pa.Buffer, offsets: Bytes, valid: pa.Buffer | None, first: int, digits: int, /
    ) -> tuple[Memory, Memory | None, Memory]: ...

    def keys(
        self, data: Bytes | pa.Buffer, offsets: Bytes, valid: pa.Buffer | None, first: int, /
    ) -> tuple[Memory, Memory | None, Memory]: ...

    def moments(
        self, data: Bytes | pa.Buffer, offsets: Bytes, valid: pa.Buffer | None, first: int, has_time: bool, /
    ) -> tuple[Memory, Memory | None, Memory]: ...

    def decimals(
        self, data: Bytes | pa.Buffer, offsets: Bytes, valid: pa.Buffer | None, *numbers: int
    ) -> tuple[Memory, Memory | None]: ...


HashedColumn = tuple[str, int, pa.Buffer | None, pa.Buffer | bytes | None, pa.Buffer | None]
"""A column to hash: its kind, its first row in the buffers, and these (``compiled_hashes.c``)."""


class CompiledHashes(Protocol):
    """The functions of ``compiled_hashes.c``, which says what each does. They check all arguments."""

    def hash_rows(self, rows: int, columns: tuple[HashedColumn, ...], /) -> Memory: ...

    def hash_events(
        self, rows: int, columns: tuple[HashedColumn, ...], absent: tuple[bytes | None, ...], /
    ) -> Memory: ...


def _installed(module: str) -> Any:
    """Return a compiled module; None if the package was installed without a C compiler."""
    name = f"omnisupport_ingest.{module}"
    try:
        return import_module(name)
    except ImportError:
        return _of_archive(name)


def _of_archive(name: str) -> Any:
    """Return the compiled module ``name`` of the archive that this package was imported from, as by a worker
    of a cluster; None if there is none, or it is of another platform.

    Python imports no compiled module from an archive, so it is copied to a file while it is loaded.
    """
    archive: Any = __spec__.loader if __spec__ is not None else None
    if not isinstance(archive, zipimporter):
        return None
    inside = Path(f"{name.replace('.', '/')}.abi3.so")
    try:
        content = archive.get_data(str(Path(archive.archive) / inside))
        with TemporaryDirectory(prefix="omnisupport-compiled-") as folder:
            file = Path(folder) / inside.name
            # No failpoint: nobody reads it after this process has loaded it.
            file.write_bytes(content)
            spec = spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            found = module_from_spec(spec)
            spec.loader.exec_module(found)
            return found
    except (OSError, ImportError):
        return None


compiled_frames: CompiledFrames | None = _installed("sources.postgres.protocol.compiled_frames")
compiled_receiver: CompiledReceiver | None = _installed("sources.postgres.protocol.compiled_receiver")
compiled_rows: CompiledRows | None = _installed("sources.postgres.protocol.compiled_rows")
compiled_lines: CompiledLines | None = _installed("sources.debezium.compiled_lines")
compiled_hashes: CompiledHashes | None = _installed("cdc.compiled_hashes")
compiled_images: CompiledImages | None = _installed("contracts.compiled_images")
compiled_values: CompiledValues | None = _installed("contracts.compiled_values")

NOT_COMPILED = tuple(
    name
    for name, module in (
        ("compiled_frames", compiled_frames),
        ("compiled_receiver", compiled_receiver),
        ("compiled_rows", compiled_rows),
        ("compiled_lines", compiled_lines),
        ("compiled_hashes", compiled_hashes),
        ("compiled_images", compiled_images),
        ("compiled_values", compiled_values),
    )
    if module is None
)
"""The compiled modules that are not installed. Each may be missing by itself."""


def texts_of(column: Column, count: int, *, is_utf8: bool = False) -> pa.StringArray:
    """Return ``column``, of ``count`` texts, as an array.

    ``is_utf8``: all texts are known to be UTF-8. Otherwise raises ``pa.ArrowInvalid`` if one is not.
    """
    offsets, content, valid = column
    validity = None if valid is None else buffer_of(valid)
    texts = pa.StringArray.from_buffers(count, buffer_of(offsets), buffer_of(content), validity)
    if not is_utf8:
        texts.validate(full=True)
    return texts


def hashed_texts(texts: pa.StringArray) -> HashedColumn:
    """Return a column of texts as the functions that hash take it."""
    valid, offsets, held = texts.buffers()
    return "t", texts.offset, offsets, held, valid if texts.null_count else None


def hashed_numbers(numbers: pa.Array) -> HashedColumn:
    """Return a column of whole numbers of 64 or 32 bits as the functions that hash take it.

    Raises ``KeyError`` for another type.
    """
    valid, held = numbers.buffers()
    kind = {pa.int64(): "n", pa.int32(): "i"}[numbers.type]
    return kind, numbers.offset, held, None, valid if numbers.null_count else None


def buffer_of(memory: Memory) -> pa.Buffer:
    """Return ``memory`` as a buffer, which keeps its owner."""
    owner, address, size = memory
    return pa.foreign_buffer(address, size, owner)
