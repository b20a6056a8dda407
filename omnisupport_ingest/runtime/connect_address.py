"""Where the warm Spark Connect server of a home listens, as other processes may read it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.runtime.ports import answers

_FILE = "spark-connect.json"


@dataclass(frozen=True)
class ConnectAddress:
    """The address of a server: a port of loopback, and the token that it asks its clients for."""

    port: int
    token: str
    supervisor_pid: int
    """The process that keeps the server running; the server does not outlive it."""

    def __repr__(self) -> str:
        return f"ConnectAddress(port={self.port}, supervisor_pid={self.supervisor_pid})"

    @property
    def url(self) -> str:
        # PySpark sends a token over plain loopback only if the host is spelled like this.
        return f"sc://localhost:{self.port}/;token={self.token}"

    def write(self, run_folder: Path) -> None:
        """Record the address in ``run_folder``, readable by the owner only."""
        with gate("runtime.file"):
            replace(run_folder / _FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, run_folder: Path) -> ConnectAddress | None:
        """The recorded address if its server is there; nothing if the record is missing or stale."""
        try:
            address = cls(**json.loads((run_folder / _FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return address if _alive(address.supervisor_pid) and answers(address.port) else None

    @staticmethod
    def forget(run_folder: Path) -> None:
        (run_folder / _FILE).unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
