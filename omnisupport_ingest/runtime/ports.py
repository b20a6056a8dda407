"""TCP ports of loopback: chooses a free port, and refuses a taken one before anything starts."""

from __future__ import annotations

import socket

from omnisupport_ingest.errors import IngestError

LOOPBACK = "127.0.0.1"
"""The only address that anything of this platform listens on."""


class PortTaken(IngestError):
    """Another program listens on a port that the settings ask for.

    Fix: Stop that program, or set another port.
    """

    exit_code = 5


def free_port() -> int:
    """Return a port that was free a moment ago; the kernel does not give it to another process at once."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def require_port(port: int, variable: str) -> int:
    """Return ``port`` if it is free, or a free port if it is 0. Raises ``PortTaken``, which names the setting
    ``variable``."""
    if port == 0:
        return free_port()
    with socket.socket() as probe:
        # As the servers do, so that connections in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise PortTaken(
                f"Port {port} on {LOOPBACK} cannot be used: {error.strerror}.",
                fix=f"Stop the program that uses it, or set {variable} to another port "
                f"(a free one now: {free_port()}; 0 chooses by itself).",
            ) from error
    return port


def answers(port: int, *, seconds: float = 0.5) -> bool:
    """Whether something on loopback accepts connections on ``port`` within ``seconds``."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=seconds):
            return True
    except OSError:
        return False
