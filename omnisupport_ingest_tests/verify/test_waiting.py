"""What a proof waits for, of layers that were committed without events."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.verify.proof import _Wait
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables

pytestmark = pytest.mark.quick


def test_a_delayed_merge_that_may_not_wait_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the dimension was never made, so nothing that waits is merged before it is compared."""
    desk = ThreeTables(tmp_path, delayed_merge={"max_age": "PT1H", "max_share": 0.1})
    desk.land_of(1, *TABLES)
    with monkeypatch.context() as patch:
        patch.setattr(desk, "show", lambda _: None)
        desk.take_in(FIRST)
    contracts = desk.workspace.contracts.of_source(SOURCE)
    wait = _Wait(desk.workspace, contracts, Lsn(1))
    assert not any(map(wait._is_shown, contracts))
    for contract in contracts:
        desk.show(contract)
    assert all(map(wait._is_shown, contracts))
