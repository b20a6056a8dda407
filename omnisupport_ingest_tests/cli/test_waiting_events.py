"""A pass says how many events of its source wait, and says nothing if none does."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from omnisupport_ingest.cli import waiting_events
from omnisupport_ingest.cli.waiting_events import say_waiting
from omnisupport_ingest.errors import IngestError


@pytest.mark.parametrize(
    ("held", "discarded", "said"),
    [(3, 1, "2 events of shop wait"), (1, 0, "1 event of shop waits"), (2, 2, ""), (0, 0, "")],
)
def test_events_that_nobody_has_discarded_are_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held: int, discarded: int, said: str
) -> None:
    monkeypatch.setattr(waiting_events, "stock_of", lambda *_: Counter(collision=held))
    monkeypatch.setattr(waiting_events, "discarded_of", lambda *_: discarded)
    say_waiting(cast(Any, None), "shop")
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(said) and bool(err) is bool(said)
    assert not said or "omnisupport-ingest quarantine list --source shop" in err


def test_with_a_damaged_ledger_nothing_counts_as_discarded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(*_: object) -> int:
        raise IngestError("damaged", fix="repair")

    monkeypatch.setattr(waiting_events, "stock_of", lambda *_: Counter(collision=1))
    monkeypatch.setattr(waiting_events, "discarded_of", damaged)
    say_waiting(cast(Any, None), "shop")
    assert capsys.readouterr().err.startswith("1 event of shop waits")
