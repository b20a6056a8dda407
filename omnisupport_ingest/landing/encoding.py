"""The JSON records of landing (manifests, epochs and others): their errors, and what a manifest must say."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TypeVar

from omnisupport_ingest.foreign import Unreadable, read_file, shortened
from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.landing.errors import ManifestFromNewerVersion, ManifestUnreadable
from omnisupport_ingest.landing.manifest import FORMAT, Manifest, OffsetSpan, StreamSpan
from omnisupport_ingest.landing.names import batch_id_of
from omnisupport_ingest.records import Format, NewerFormat, encode
from omnisupport_ingest.storage import put_back

T = TypeVar("T")

_CHANGED = "It was complete when it was written, so something outside this program changed it."


def encode_manifest(manifest: Manifest) -> bytes:
    """Return ``manifest`` as its JSON document. Raises ``FieldProblem`` if its fields contradict one
    another."""
    check_manifest(manifest)
    return encode(manifest)


def content_of(file: Path) -> bytes:
    """Return the bytes of the record ``file``.

    Raises ``OSError`` if it is missing or this user may not read it, and ``ManifestUnreadable`` for any other
    problem.
    """
    try:
        return read_file(file)
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, Unreadable) as problem:
        raise unreadable(file, problem.strerror if isinstance(problem, OSError) else problem) from problem


def unreadable(file: Path, why: object) -> ManifestUnreadable:
    """Return the error for a record that was written completely and cannot be read now."""
    restore = put_back(file, "Restore this file from a backup.")
    return ManifestUnreadable(f"{file} cannot be read: {why}.", fix=f"{restore} {_CHANGED}")


def decode(form: Format[T], content: bytes, file: Path) -> T:
    """Return the record of ``form`` in ``content``, which was read from ``file``.

    Raises:
        ManifestFromNewerVersion: its version is newer than this program knows.
        ManifestUnreadable: the content is anything else that ``encode`` does not write; names file and field.
    """
    try:
        return form.decode(content)
    except NewerFormat as newer:
        raise ManifestFromNewerVersion(
            f"{file} {newer}.", fix="Use the newer omnisupport_ingest that wrote it."
        ) from None
    except ValueError as error:
        raise unreadable(file, error) from error


def decode_manifest(content: bytes, file: Path) -> Manifest:
    """Return the manifest in ``content``, which was read from ``file``; errors as in ``decode``."""
    manifest = decode(FORMAT, content, file)
    try:
        check_manifest(manifest)
        if file.stem != manifest.batch_id:
            raise FieldProblem("batch_id", f"is {shortened(manifest.batch_id)}, not the name of the file")
    except FieldProblem as problem:
        raise unreadable(file, problem) from problem
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Refuse (``FieldProblem``) a manifest whose fields contradict one another."""
    kinds = [kind for kind in ("stream", "chunk", "file") if getattr(manifest, kind) is not None]
    if len(kinds) != 1:
        raise FieldProblem("stream, chunk, file", f"must be set one at a time, not {kinds or 'none'}")
    expected = batch_id_of(manifest)
    if manifest.batch_id != expected:
        problem = f"is {shortened(manifest.batch_id)}, but its content says {shortened(expected)}"
        raise FieldProblem("batch_id", problem)
    if manifest.stream is not None:
        _check_span(manifest.stream)
    if manifest.file is not None and manifest.file.offsets is not None:
        _check_offsets(manifest.file.offsets)
    for number, file in enumerate(manifest.files):
        path = PurePosixPath(file.path)
        if "\0" in file.path or path.is_absolute() or ".." in path.parts or path.parts[:1] != ("data",):
            raise FieldProblem(f"files[{number}].path", f"is {shortened(file.path)}, outside the data folder")
        if file.rows < 1 or sum(file.rows_per_table.values()) != file.rows:
            raise FieldProblem(f"files[{number}].rows", "is not the sum of its rows per table")


def _check_span(span: StreamSpan) -> None:
    if span.end_lsn <= span.previous_end_lsn:
        raise FieldProblem(
            "stream.end_lsn", f"is {span.end_lsn}, not above previous_end_lsn {span.previous_end_lsn}"
        )
    of_transactions = (
        span.start_lsn,
        span.last_commit_lsn,
        span.last_xid,
        span.first_commit_ts,
        span.last_commit_ts,
    )
    if any(value is None for value in of_transactions) and any(
        value is not None for value in of_transactions
    ):
        raise FieldProblem("stream", "describes its transactions in part: set all of their fields or none")


def _check_offsets(spans: tuple[OffsetSpan, ...]) -> None:
    partitions = [(each.topic, each.partition) for each in spans]
    if not partitions or partitions != sorted(set(partitions)):
        raise FieldProblem("file.offsets", "are not in order" if partitions else "are of no partition")
    for each in spans:
        where = f"{shortened(each.topic)}[{each.partition}]"
        if not 0 <= each.start <= each.next:
            raise FieldProblem("file.offsets", f"of {where} ends below its start")
        if not 0 <= each.records + each.gone <= each.next - each.start:
            raise FieldProblem("file.offsets", f"of {where} has more records than offsets")
