"""An S3 server of this machine's own (moto), in a process of its own, and what a client needs to use it.

It honours put-if-absent (``If-None-Match: *``) and updates by etag, holds checksums against what it received,
and has multipart uploads. It shows nothing of latency, of limits of requests, of rights, or of a real store's
listings while others write; and its parts are checked only as it implements them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from omnisupport_ingest_tests.waiting import until

BUCKET = "omnisupport-test"


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
        """A place that nothing was ever put to."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}/home"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 20)},
    )
    try:
        until(lambda: _answers(port))
        make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make, timeout=10).close()
        yield S3Server(port)
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
