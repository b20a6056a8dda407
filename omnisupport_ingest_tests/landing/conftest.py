from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.landing.store import LandingStore


@pytest.fixture
def store(tmp_path: Path) -> LandingStore:
    return LandingStore(tmp_path, "support_desk")
