"""A quick look at the source: does it answer, and how is the slot? Never longer than asked."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from psycopg2.extensions import make_dsn

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.connection import connect, dsn_parts
from omnisupport_ingest.sources.postgres.session.server import SlotFacts, slot_facts


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether the source answered. ``problem`` says why not, without a password.

    ``server``: major and minor version. ``slot`` is null if there is none of that name.
    """

    reachable: bool
    problem: str | None = None
    server: str | None = None
    slot: SlotFacts | None = None


class SourceLook:
    """A look at the source in a thread of its own, begun when made; ``result`` waits for it."""

    def __init__(self, dsn: str, slot: str) -> None:
        self._dsn, self._slot = dsn, slot
        self._result: Reach | None = None
        # A name that does not resolve, or a host that swallows packets, must not hold up the caller.
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> Reach:
        """What was seen; not reachable if there was no answer within ``seconds`` from now."""
        self._thread.join(seconds)
        return self._result or Reach(False, f"No answer within {seconds:.1f} seconds.")

    def _look(self) -> None:
        try:
            parts = dsn_parts(self._dsn) | {"connect_timeout": "2"}
            connection = connect(make_dsn(**parts), application_name="omnisupport-ingest status")
            try:
                slot = slot_facts(connection, self._slot)
                major, minor = divmod(connection.server_version, 10000)
                self._result = Reach(True, None, f"{major}.{minor}", slot)
            finally:
                connection.close()
        except IngestError as error:
            self._result = Reach(False, error.problem)
