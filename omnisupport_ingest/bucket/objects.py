"""Objects in a bucket, by ``obstore``: S3 first; GCS and Azure by the same calls, untested.

A put does here what a link and an fsync do on a disk. A put of a new object is one that the store refuses if
the object exists (S3: ``If-None-Match: *``); nothing is renamed. The answer may be lost after the store has
carried out a put, and the library then tries again. So each conditional put carries a token, and the object
shows whose put it was. A put of a file makes one whole object or none: the parts of an interrupted upload are
no object. Each request carries a checksum (SHA-256), which the store compares with what it received.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.storage import StorageRefused, StorageUnreachable

if TYPE_CHECKING:
    from obstore import GetResult, ListResult, ObjectMeta, PutMode
    from obstore.store import ObjectStore

TRIES = 20
"""How often to put again what others keep replacing."""

_TOKEN = "omnisupport-writer"  # noqa: S105 - the name of a piece of metadata

_PROBE = "probe"

_STATUS = re.compile(r"status code:? ([0-9]{3} [A-Za-z ]+)")

_BETWEEN_CAUSES = re.compile(r"(\x1b\[[0-9;]*m|↳|\s)+")
"""What delta-rs puts between an error and its cause: a line break, colors and an arrow."""

_process: int | None = None
"""The id of the process that has used the library; it must not be forked from then on."""


class Objects:
    """The objects under ``prefix`` in the bucket ``url``, by key. Thread-safe.

    The version of an object is its ETag; "" where the store gives none. Each method raises
    ``StorageUnreachable`` if the store does not do what it should.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self._opened: ObjectStore | None = None
        self._lock = threading.Lock()

    # --- put --------------------------------------------------------------------------------------

    def put(self, key: str, content: bytes) -> str:
        """Put an object, in place of an earlier one; return its version."""
        import obstore

        with self.answers():
            # No failpoint: its callers put one around the call.
            return obstore.put(self.store, key, content, use_multipart=False)["e_tag"] or ""

    def put_new(self, key: str, content: bytes) -> str | None:
        """Put an object that does not exist; return its version, or None if another has put it."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        token = uuid.uuid4().hex
        with self.answers():
            for attempt in range(1, TRIES + 1):
                try:
                    # No failpoint: its callers put one around the call.
                    put = obstore.put(
                        self.store,
                        key,
                        content,
                        mode="create",
                        attributes={_TOKEN: token},
                        use_multipart=False,
                    )
                    return put["e_tag"] or ""
                except AlreadyExistsError:
                    try:
                        got = obstore.get(self.store, key)
                    except FileNotFoundError:
                        # S3 refuses both of two puts at once with 409 (ConditionalRequestConflict): try
                        # again.
                        if attempt == TRIES:
                            raise
                        wait(attempt)
                        continue
                    return _version_if_ours(got, token)
        raise AssertionError("the last attempt returns or raises")

    def put_changed(self, key: str, content: bytes, version: str | None) -> str | None:
        """Put an object in place of the one of ``version`` (None: there is none); return its version, or None
        if there is another one by now."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        token = uuid.uuid4().hex
        mode: PutMode = "create" if version is None else {"e_tag": version}
        with self.answers():
            try:
                # No failpoint: its callers put one around the call.
                put = obstore.put(
                    self.store, key, content, mode=mode, attributes={_TOKEN: token}, use_multipart=False
                )
                return put["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                try:
                    return _version_if_ours(obstore.get(self.store, key), token)
                except FileNotFoundError:
                    return None

    def put_file(self, file: Path, key: str, same: Sequence[str] = ()) -> None:
        """Put a finished file. ``same``: keys of objects with the same bytes; the store copies the first
        itself."""
        import obstore

        size = file.stat().st_size
        with self.answers():
            if not any(self._copied(each, key) for each in same[:1] if each != key):
                # No failpoint: its callers put one around the call.
                obstore.put(self.store, key, file)
        kept = self.size(key)
        if kept != size:
            raise OSError(errno.EIO, f"the object store has {kept} bytes of {size}", str(file))

    def _copied(self, of: str, key: str) -> bool:
        import obstore

        try:
            # No failpoint: its callers put one around the call.
            obstore.copy(self.store, of, key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is no error."""
        import obstore

        with self.answers(), contextlib.suppress(FileNotFoundError):
            # No failpoint: its callers put one around the call.
            obstore.delete(self.store, key)

    # --- get --------------------------------------------------------------------------------------

    def get(self, key: str) -> tuple[bytes | None, str | None]:
        """Return the content and the version of an object; None for both if there is none."""
        with self.opened(key) as got:
            return (None, None) if got is None else (bytes(got.bytes()), got.meta["e_tag"] or "")

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[GetResult | None]:
        """Yield an object whose bytes are read within the block; None if there is none."""
        import obstore

        with self.answers():
            got = None
            with contextlib.suppress(FileNotFoundError):
                got = obstore.get(self.store, key)
            yield got

    def version(self, key: str) -> str | None:
        """Return the version of an object; None if there is none."""
        found = self._head(key)
        return None if found is None else found["e_tag"] or ""

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        found = self._head(key)
        return None if found is None else int(found["size"])

    def _head(self, key: str) -> ObjectMeta | None:
        import obstore

        with self.answers(), contextlib.suppress(FileNotFoundError):
            return obstore.head(self.store, key)
        return None

    def listed(self, folder: str, after: str | None = None) -> Iterator[ObjectMeta]:
        """Yield the objects below ``folder``, listed a thousand per request. ``after``: only those whose
        names in the folder are above this one."""
        import obstore

        offset = f"{folder}/{after}" if after else None
        with self.answers():
            for objects in obstore.list(self.store, folder, offset=offset, chunk_size=1000):
                yield from objects

    def listed_in(self, folder: str) -> tuple[Sequence[ObjectMeta], list[str]]:
        """Return the objects in ``folder`` itself, and the names of the folders in it."""
        import obstore

        with self.answers():
            found: ListResult[Any] = obstore.list_with_delimiter(self.store, folder)
        folders = [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]
        return found["objects"], folders

    # --- the store --------------------------------------------------------------------------------

    def require_conditions(self) -> None:
        """Raise ``StorageRefused`` if the store ignores the condition of a put: two writers would both
        win."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        key = f"{_PROBE}-{uuid.uuid4().hex}"
        ignored = []
        modes: list[tuple[str, PutMode]] = [
            ("If-None-Match", "create"),
            ("If-Match", {"e_tag": '"of-no-object"'}),
        ]
        with self.answers():
            # No failpoint: an object that nobody reads.
            obstore.put(self.store, key, b"", use_multipart=False)
            try:
                for header, mode in modes:
                    try:
                        obstore.put(self.store, key, b"again", mode=mode, use_multipart=False)
                    except (AlreadyExistsError, PreconditionError):
                        continue
                    ignored.append(header)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.store, key)
        if ignored:
            raise StorageRefused(
                f"The object store {self.url} ignores {' and '.join(ignored)}: it replaced an object that "
                "it should have refused to replace. Two writers of one batch or commit would both win there.",
                fix="Use a store that honours conditional puts (Amazon S3 does), or a newer version of its "
                "server; or folders: leave OMNISUPPORT_STORAGE out.",
            )

    def keeps_versions(self) -> bool:
        """Whether the store keeps what is deleted, as a bucket with versions does."""
        import obstore

        # A new object is put: an object from before the bucket kept versions has no version.
        with self.answers():
            # No failpoint: an object that nobody reads.
            put = obstore.put(self.store, _PROBE, b"", use_multipart=False)
            obstore.delete(self.store, _PROBE)
        return put["version"] is not None

    def uri(self, key: str) -> str:
        """Return the URI of an object or a folder."""
        return f"{self.url}/{self.prefix}/{key}" if self.prefix else f"{self.url}/{key}"

    @property
    def store(self) -> ObjectStore:
        """The bucket and prefix for the library."""
        self.require_process()
        with self._lock if self._opened is None else contextlib.nullcontext():
            if self._opened is None:
                from obstore.store import from_url

                config: Any = {"checksum_algorithm": "SHA256"} if self.url.startswith("s3:") else {}
                self._opened = from_url(f"{self.url}/{self.prefix}", config=config)
        return self._opened

    def require_process(self) -> None:
        """Refuse to work in a forked process: it lacks the library's threads, for which the library would
        wait without end."""
        global _process
        if _process is None:
            _process = os.getpid()
        elif _process != os.getpid():
            raise RuntimeError("a process that has used the object store was forked; start a new one instead")

    @contextlib.contextmanager
    def answers(self) -> Iterator[None]:
        """Turn the library's errors within the block into ``StorageUnreachable``."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as problem:
            # Callers that expect a missing object have handled it before: here the bucket is missing.
            raise self.unreachable(problem) from None

    def unreachable(self, problem: Exception) -> IngestError:
        """Return our error for ``problem``. It names only the kind of the problem: the library's message
        repeats the request, which may be signed."""
        status = _STATUS.search(_BETWEEN_CAUSES.sub(" ", str(problem)))
        kind = status[1].rstrip() if status is not None else type(problem).__name__
        return StorageUnreachable(
            f"The object store {self.url} did not do what was asked: {kind}.",
            fix="Look whether the bucket is there, whether the credentials in the environment may read, "
            "write, list and delete in it, and whether its server answers; then run the same again: "
            "nothing that was confirmed is lost.",
        )


def wait(attempt: int) -> None:
    """Wait a random time, up to 0.05 s more after each attempt, so that two writers do not collide over and
    over."""
    time.sleep(random.uniform(0, 0.05 * attempt))  # noqa: S311 - no secret depends on it


def _version_if_ours(got: GetResult, token: str) -> str | None:
    """Return the version of an object that this put has made after all: the answer to an earlier try of it
    was lost. None if another has put the object."""
    return (got.meta["e_tag"] or "") if got.attributes.get(_TOKEN) == token else None
