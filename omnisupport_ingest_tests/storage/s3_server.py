"""An S3 server of this machine's own (moto), in a process of its own, and what a client needs to use it.

It honours put-if-absent (``If-None-Match: *``) and updates by etag, holds checksums against what it received,
and has multipart uploads. It shows nothing of latency, of limits of requests, of rights, or of a real store's
listings while others write; and its parts are checked only as it implements them.

``python -m omnisupport_ingest_tests.storage.s3_server COMMAND …`` runs a command of the program in a new home
whose landing and lake are in a bucket of such a server. Both end with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.waiting import until


@dataclass(frozen=True)
class S3Server:
    """Where it listens on loopback."""

    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The provider's own variables, as a person sets them."""
        return {
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "SECRET-that-no-file-may-hold",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def place(self) -> str:
        """A place that nothing was ever put to, in a bucket of its own."""
        bucket = f"omnisupport-{uuid.uuid4().hex}"
        self._put(bucket)
        return f"s3://{bucket}/some/home"

    def keep_versions(self, place: str) -> None:
        """Have the bucket of ``place`` keep versions of its objects from now on."""
        state = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        self._put(place.split("/")[2] + "?versioning", state.encode())

    def _put(self, of: str, body: bytes = b"") -> None:
        url, form = f"http://127.0.0.1:{self.port}/{of}", {"Content-Type": "application/xml"}
        request = urllib.request.Request(url, data=body, headers=form, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()


def reserved_port() -> socket.socket:
    """A socket bound to a free port of loopback, given to nobody else while it is open.

    A server that binds the port by its number still can: both reuse the address, and this one never listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@contextmanager
def s3_server(port: int) -> Iterator[S3Server]:
    """A server on ``port``, until the end of the block; ``RuntimeError`` if it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 20)},
    )
    try:
        until(lambda: process.poll() is not None or _answers(port))
        if process.poll() is not None:
            raise RuntimeError(f"The S3 server did not start on port {port}: exit code {process.poll()}.")
        yield S3Server(port)
    finally:
        process.kill()
        process.wait()


@contextmanager
def in_a_bucket() -> Iterator[None]:
    """Have new homes of this process and of those that it starts keep landing and lake in a bucket."""
    with reserved_port() as reserved, s3_server(reserved.getsockname()[1]) as server:
        os.environ.update(server.variables | {f"{PREFIX}STORAGE": server.place()})
        yield


def main(command: Sequence[str]) -> int:
    """Return the exit code of ``command``; where it is not 0, the home stays, with its logs."""
    folder = Path(tempfile.mkdtemp(prefix="omnisupport-bucket-"))
    with in_a_bucket():
        os.environ[f"{PREFIX}HOME"] = str(folder / "home")
        code = subprocess.run(command).returncode
    if code:
        print(f"The home stays in {folder}.", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return code


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
