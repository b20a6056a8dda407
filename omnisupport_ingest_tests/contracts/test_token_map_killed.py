"""Who gives tokens is killed at the failpoints of the map; what was given stays, and the map is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
