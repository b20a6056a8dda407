"""What `make test` and `make crash-test` choose, and a sample of the crash tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = "not full and not slow and not crash and not huge"
STORIES = ("layers/test_layers.py", "cdc/test_history.py")
WITHOUT_SERVER = "test_key_range.py"

pytestmark = pytest.mark.full


def chosen(*options: str) -> list[str]:
    """The tests of a few files, as pytest names them."""
    files = [f"{Path(__file__).parent.name}/{name}" for name in (*STORIES, WITHOUT_SERVER)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *options, *files]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return re.findall(r"^\S+/(\S+::.+)$", told, re.MULTILINE)


def of(file: str, tests: list[str]) -> list[str]:
    return [test for test in tests if test.startswith(Path(file).name)]


def test_every_test_without_a_server_and_stories_of_each_layer_are_quick() -> None:
    assert f'-m "{QUICK}"' in (ROOT / "Makefile").read_text()
    every, quick = chosen("-m", "not huge"), chosen("-m", QUICK)
    assert of(WITHOUT_SERVER, quick) == of(WITHOUT_SERVER, every) != []
    for file in STORIES:
        assert 0 < len(of(file, quick)) < len(of(file, every))


def test_a_sample_is_drawn_by_its_seed() -> None:
    once, again = chosen("--sample", "5:1"), chosen("--sample", "5:1")
    assert once == again and len(once) == 5


def test_every_crash_test_is_one_of_those_that_make_runs() -> None:
    """`make test-all` leaves them out, so a file that is not named here would be run by nobody."""
    tests = Path(__file__).parent
    (named,) = re.findall(r"^CRASHED := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run = {file for each in named.split() for file in tests.glob(each.removeprefix("$(TESTS)/"))}
    marked = {file for file in tests.rglob("test_*.py") if "pytest.mark." + "crash" in file.read_text()}
    assert run == marked
