"""Give Spark tasks on machines without the home the keys of subjects and the tokens, from the driver's
process.

Both are kept in files of the home, never in a bucket. A task that decrypts requests the keys of the values
that it has read; a task that makes tokens requests those of its texts. New keys and tokens are durable in the
home before a file of the lake can contain them. The task keeps them in memory and writes nothing of them on
its machine.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.contracts.token_map import FILE as TOKENS
from omnisupport_ingest.contracts.token_map import TokenMap
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sealed_requests import Address, Answering
from omnisupport_ingest.settings import PREFIX, Settings

_URL_HOST = re.compile(r"//(?:https?://)?(?P<host>\[[^]]+\]|[^/:,;]+)(?::(?P<port>\d+))?")
"""Host and port in the URL of a master or of a Spark Connect server (Spark, "Master URLs")."""

_SOME_PORT = 7077


_log = logging.getLogger(__name__)


class KeyServiceRefused(IngestError):
    """Executors are to ask for keys and tokens at the address that ``OMNISUPPORT_KEY_SERVICE`` says, and this
    process cannot listen there.

    Fix: Set it to an address by which executors reach this machine, and a port that is free here.
    """

    exit_code = 2


def for_tasks(secrets: Secrets, settings: Settings) -> Secrets:
    """Return ``secrets`` with the address at which tasks on machines without the home request keys and
    tokens.

    Each process has one service per home. It starts when ``secrets`` first has tokens or keys of subjects,
    and ends with the process. If it cannot start, a task that needs it raises ``HomeFileNeeded``; if a
    setting gives the address, ``KeyServiceRefused`` is raised here.
    """
    if secrets.tokens is None and secrets.subjects is None:
        return secrets
    address = _service(settings.home.absolute(), os.getpid()).address(settings)
    return replace(
        secrets,
        tokens=None if secrets.tokens is None else replace(secrets.tokens, service=address),
        subjects=None if secrets.subjects is None else replace(secrets.subjects, service=address),
    )


@cache
def _service(home: Path, process: int) -> _Service:
    """Return the service of ``home`` in this ``process``; a forked process has its own."""
    del process
    return _Service(home)


class _Service:
    """Answers requests for the files of a home. Starts when its address is first needed."""

    def __init__(self, home: Path) -> None:
        self._tokens, self._subjects = TokenMap(home / TOKENS), SubjectKeys(home / SUBJECT_KEYS)
        self._started: dict[str | None, Address] = {}
        self._lock = threading.Lock()

    def address(self, settings: Settings) -> Address | None:
        """Return the address of the service; None if this machine has none that the cluster can reach."""
        with self._lock:
            if settings.key_service not in self._started:
                started = self._start(settings)
                if started is None:
                    return None
                self._started[settings.key_service] = started
            return self._started[settings.key_service]

    def _start(self, settings: Settings) -> Address | None:
        setting, remote = settings.key_service, settings.spark_remote
        url = settings.spark_master if remote is None else remote.get_secret_value()
        host, port = (_own_host(url), 0) if setting is None else _host_and_port(setting)
        try:
            if host is None:
                raise OSError("no address of this machine is known that leads to the cluster")
            return Answering(host, port, self._answer).address(host)
        except (OSError, UnicodeError) as error:
            problem = (
                f"Executors cannot ask for keys and tokens at {setting or host or 'this machine'}: "
                f"{getattr(error, 'strerror', None) or error}."
            )
            fix = f"Set {PREFIX}KEY_SERVICE to an address by which they reach this machine, and a free port."
            if setting is not None:
                raise KeyServiceRefused(problem, fix=fix) from None
            _log.warning("%s %s", problem, fix)
            return None

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of ``SubjectKeys`` or ``TokenMap`` from the files of the home."""
        try:
            match request:
                case {"tokens_of": texts}:
                    return {"found": self._tokens.tokens_of(texts)}
                case {"by_id": ids}:
                    known = self._subjects.by_id(map(bytes.fromhex, ids)).values()
                    return {"found": [None if each.secret is None else each.secret.hex() for each in known]}
                case _:
                    return {"found": self._subjects.digest_key().hex()}
        except IngestError as refused:
            return {"refused": [type(refused).__name__, refused.problem, refused.fix]}


def _own_host(url: str) -> str | None:
    """Return the address from which this machine reaches the host in ``url``; None if it is not known."""
    found = _URL_HOST.search(url)
    if found is None:
        return None
    host, port = found["host"].strip("[]"), int(found["port"] or _SOME_PORT)
    try:
        family, kind, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # This sends nothing: it only asks which route packets would take.
            probe.connect(at)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
