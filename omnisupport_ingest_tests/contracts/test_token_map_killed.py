"""Who gives tokens is killed at the failpoints of the map; what was given stays, and the map is whole."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.token_map import NO_MAP, TokenMap
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.waiting import PATIENCE

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest.contracts.token_map import TokenMap
tokens = TokenMap(Path(sys.argv[1]))
tokens.make()
tokens.tokens_of(["ada", "eve"])
"""


def killed(path: Path, failpoint: str) -> None:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path)],
        env={**inherited, VARIABLE: failpoint},
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("failpoint", "made", "given"),
    [
        ("pii.tokens.before@map", False, False),
        ("pii.tokens.after@map", True, False),
        ("pii.tokens.before@tokens", True, False),
        ("pii.tokens.after@tokens", True, True),
    ],
)
def test_what_was_given_stays_whoever_is_killed(
    tmp_path: Path, failpoint: str, made: bool, given: bool
) -> None:
    tokens = TokenMap(tmp_path / "tokens.sqlite")
    killed(tokens.path, failpoint)
    before, name = tokens.token_of("ada") if made else None, tokens.version()
    assert (name != NO_MAP, before is not None) == (made, given)
    tokens.make()
    (after, _) = tokens.tokens_of(["ada", "eve"])
    assert after == (before or after) and (not made or tokens.version() == name)


def test_a_map_whose_making_was_cut_short_is_made_when_it_is_needed(tmp_path: Path) -> None:
    tokens = TokenMap(tmp_path / "tokens.sqlite")
    tokens.path.touch(mode=0o600)
    assert tokens.version() == NO_MAP
    tokens.make()
    assert tokens.version() != NO_MAP and tokens.tokens_of(["ada"])


@pytest.mark.full
def test_no_copy_of_a_forgotten_value_stays_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def without_overwriting(*given: Any, **named: Any) -> sqlite3.Connection:
        # As most builds of SQLite are; others overwrite unless they are told not to.
        base = connect(*given, **named)
        base.execute("PRAGMA secure_delete = OFF")
        return base

    monkeypatch.setattr(sqlite3, "connect", without_overwriting)
    tokens = TokenMap(tmp_path / "tokens.sqlite")
    tokens.make()
    # In the order of their hashes, so that pages are divided everywhere.
    values = sorted(
        (f"person-{each:05}@example.org" for each in range(3000)),
        key=lambda each: sha256(each.encode()).digest(),
    )
    for start in range(0, len(values), 50):
        tokens.tokens_of(values[start : start + 50])
    forgotten = values[:200]
    for value in forgotten:
        token = tokens.token_of(value)
        assert token is not None and tokens.forget(token)
    content = tokens.path.read_bytes()
    assert [each for each in forgotten if each.encode() in content] == []
