"""Who encrypts or destroys keys is killed at failpoints: no value lands without a key that is durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.waiting import PATIENCE

ADA = ("desk", "customer", "1")

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
keys, landed = SubjectKeys(Path(sys.argv[1])), Path(sys.argv[2])
(key,) = keys.keys_of([("desk", "customer", "1")])
landed.write_bytes(key.encrypted(b"ada@x.org", b"public.people"))
keys.destroy([key.id])
keys.name_windows("desk", {key.id: ["2026-01-01T1200"]})
"""


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("failpoint", "made", "landed", "destroyed", "named"),
    [
        ("before@store", False, False, False, False),
        ("after@store", True, False, False, False),
        ("before@note", True, False, False, False),
        ("after@note", True, False, False, False),
        ("before@keys", True, False, False, False),
        ("after@keys", True, False, False, False),
        ("before@destroy", True, True, False, False),
        ("after@destroy", True, True, True, False),
        ("before@windows", True, True, True, False),
        ("after@windows", True, True, True, True),
    ],
)
def test_whoever_is_killed_a_value_that_landed_has_its_key_until_that_is_destroyed(
    tmp_path: Path, failpoint: str, made: bool, landed: bool, destroyed: bool, named: bool
) -> None:
    keys, value = SubjectKeys(tmp_path / "keys" / "subjects.sqlite"), tmp_path / "landed"
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(keys.path), str(value)],
        env={**inherited, VARIABLE: f"pii.subject_keys.{failpoint}"},
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert (keys.made, value.exists()) == (made, landed)
    assert bool(keys.destroyed_by_window("desk")) == named
    # The next one goes on: with the same key, or with none for good.
    (key,) = keys.keys_of([ADA])
    assert (key.secret is None) == destroyed
    if landed:
        body = value.read_bytes()
        assert body.startswith(key.id)
        assert destroyed or key.decrypted(body[len(key.id) :], b"public.people") == b"ada@x.org"
    assert keys.destroy([key.id]) == (not destroyed)
