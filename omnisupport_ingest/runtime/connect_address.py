"""Where the warm Spark Connect server of a home listens, as other processes may read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import parse_json, read_file
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.ports import answers

_FILE = "spark-connect.json"


@dataclass(frozen=True)
class ConnectAddress:
    """The address of a server: a port of loopback, and the token that it asks its clients for."""

    port: int
    token: str
    supervisor: ProcessIdentity
    """The process that keeps the server running; the server does not outlive it."""

    def __repr__(self) -> str:
        return f"ConnectAddress(port={self.port}, supervisor={self.supervisor.text})"

    @property
    def url(self) -> str:
        # PySpark sends a token over plain loopback only if the host is spelled like this.
        return f"sc://localhost:{self.port}/;token={self.token}"

    def write(self, run_folder: Path) -> None:
        """Record the address in ``run_folder``, readable by the owner only."""
        with gate("runtime.file"):
            record = {"port": self.port, "token": self.token, "supervisor": self.supervisor.text}
            replace(run_folder / _FILE, json.dumps(record).encode())

    @classmethod
    def read(cls, run_folder: Path) -> ConnectAddress | None:
        """The recorded address if its server is there; nothing if the record is missing or stale."""
        try:
            record = parse_json(read_file(run_folder / _FILE))
            # An earlier version wrote the bare process id, as `supervisor_pid`.
            named = record["supervisor"] if "supervisor" in record else str(record["supervisor_pid"])
            supervisor = ProcessIdentity.parse(named)
            address = None if supervisor is None else cls(record["port"], record["token"], supervisor)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        if address is None or not address.supervisor.lives():
            return None
        return address if answers(address.port) else None

    @staticmethod
    def forget(run_folder: Path) -> None:
        (run_folder / _FILE).unlink(missing_ok=True)
