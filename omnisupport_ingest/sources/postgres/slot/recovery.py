"""Going on after a crash between a durable batch and its confirmation: as the decision table says."""

from __future__ import annotations

import logging

from omnisupport_ingest.contracts.decision_table import (
    CRASH_AFTER_EMIT,
    RECOVERY_LSN,
    STOP,
)
from omnisupport_ingest.contracts.in_force import decisions_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings

_log = logging.getLogger(__name__)


FOUND = RECOVERY_LSN.found(CRASH_AFTER_EMIT)
"""The slot is confirmed below what has landed. It is counted by the batches that say so
(``stream.recovered_from``)."""


class RecoveryStopped(IngestError):
    """The decision table wants a person to look before capture goes on after a crash."""


def require_recovery(settings: Settings, confirmed: Lsn, landed: Lsn) -> None:
    """Say that the source sends ``confirmed`` to ``landed`` again, and that the copies are dropped.

    ``RecoveryStopped`` where the decision table says stop for this scenario.
    """
    decisions = decisions_in_force(settings)
    if decisions.action(FOUND.scenario) == STOP:
        raise RecoveryStopped(
            f"The slot is confirmed up to {confirmed}, and batches have landed up to {landed}: capture or "
            f"the source ended before that was confirmed. {decisions.path} says stop for "
            f"{FOUND.scenario}. Nothing is lost.",
            fix="See why it ended. Then write replay_and_dedupe in that row and start capture again: what "
            "the source sends a second time is dropped.",
        )
    _log.info("the source sends %s to %s again; what has landed of it is dropped", confirmed, landed)
