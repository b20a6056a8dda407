"""The follow loop of ``capture``: what it waits for, and what ends it."""

from __future__ import annotations

import threading

import pytest

from omnisupport_ingest.cli.capture import follow
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.supervisor import Backoff

QUICK = Backoff(first=0.01, longest=0.02)


class Away(IngestError):
    pass


def test_a_source_that_is_away_is_tried_again_until_it_is_back() -> None:
    outcomes = iter([Away("away", fix="wait"), Away("away", fix="wait"), None])

    def run() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    follow(run, threading.Event(), retry=Away, backoff=QUICK)
    assert next(outcomes, "all used") == "all used"


def test_what_needs_a_person_ends_it() -> None:
    def run() -> None:
        raise IngestError("no right", fix="grant it")

    with pytest.raises(IngestError, match="no right"):
        follow(run, threading.Event(), retry=Away, backoff=QUICK)


def test_told_to_stop_while_it_waits_it_stops() -> None:
    stop = threading.Event()
    runs = []

    def run() -> None:
        runs.append(1)
        stop.set()
        raise Away("away", fix="wait")

    follow(run, stop, retry=Away, backoff=Backoff(first=3600, longest=3600))
    assert len(runs) == 1
