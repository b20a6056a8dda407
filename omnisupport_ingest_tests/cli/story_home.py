"""The home of a told story as the one that commands of this process find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from omnisupport_ingest_tests.layers.story import SOURCE


def enter_copy(whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a copy of the folder ``whole``, made in ``place`` and returned."""
    folder = place / "told"
    shutil.copytree(whole, folder)
    enter(folder, monkeypatch)
    return folder


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder above ``folder``, with the settings of the story that was told in it."""
    monkeypatch.chdir(folder.parent)
    for name, value in (
        ("HOME", folder / "home"),
        ("CONTRACTS_DIR", folder / "contracts"),
        ("SOURCE", SOURCE),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", str(value))
