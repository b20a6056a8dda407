"""What `make test` and `make crash-test` choose, and a sample of the crash tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest_tests import conftest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
QUICK = "not full and not slow and not crash and not huge"
SAME_BY_IMPORT = "not (full or slow or crash or huge)"
"""As ``QUICK``, said otherwise: every file is imported, and its marks alone decide."""

MANY = "sources/postgres/test_encrypting_killed.py"
STORIES = ("layers/test_layers.py", "layers/test_history.py")
STORIES_ELSEWHERE = ("sources/postgres/capture/test_capture.py", "defs/test_ingest_job.py")
UNREAD = tuple(
    str(file.relative_to(TESTS))
    for file in sorted(TESTS.rglob("test_*.py"))
    if conftest.is_full_by_its_text(file)
)
"""Files that `make test` imports not at all."""

WITHOUT_SERVER = "test_key_range.py"

pytestmark = pytest.mark.full


_COLLECTS = """
import json, sys, pytest

class Chosen:
    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid.partition("/")[2] for item in session.items]

def chosen(options):
    plugin = Chosen()
    pytest.main([*options, "--collect-only", "-q", "-p", "no:xdist"], plugins=[plugin])
    return plugin.tests

print(json.dumps({name: chosen(options) for name, options in json.loads(sys.argv[1]).items()}))
"""

_FEW, _MANY = (*STORIES, WITHOUT_SERVER), (MANY,)
_TURNS = 3
CHOICES = {
    "every": ("-m", "not huge", *_FEW),
    "quick": ("-m", QUICK, *_FEW),
    "quick by import": ("-m", SAME_BY_IMPORT, *STORIES_ELSEWHERE, *UNREAD),
    "sample": ("--sample", "5:1", *_FEW),
    "sample again": ("--sample", "5:1", *_FEW),
    "all draws": ("--draw", "all", *_MANY),
    "draws": _MANY,
    **{
        f"turn {number}": (
            "-m",
            "not crash and not huge",
            "--turns",
            str(_TURNS),
            "--draw",
            str(number),
            *_FEW,
        )
        for number in range(_TURNS)
    },
    **{f"draws {number}": ("--draw", str(number), *_MANY) for number in range(4)},
}


@pytest.fixture(scope="module")
def chosen() -> dict[str, list[str]]:
    """The tests that pytest collects by each of ``CHOICES``; one process imports them once for all."""
    folder = TESTS.name
    options = {
        name: [f"{folder}/{each}" if each.endswith(".py") else each for each in choice]
        for name, choice in CHOICES.items()
    }
    command = [sys.executable, "-c", _COLLECTS, json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def of(file: str, tests: list[str]) -> list[str]:
    return [test for test in tests if test.startswith(f"{file}::")]


def test_every_test_without_a_server_and_stories_of_each_layer_are_quick(
    chosen: dict[str, list[str]],
) -> None:
    assert f'-m "{QUICK}"' in (ROOT / "Makefile").read_text()
    every, quick = chosen["every"], chosen["quick"]
    assert of(WITHOUT_SERVER, quick) == of(WITHOUT_SERVER, every) != []
    for file in STORIES:
        assert 0 < len(of(file, quick)) < len(of(file, every))


def test_no_file_with_a_quick_test_is_left_out_unread(chosen: dict[str, list[str]]) -> None:
    assert len(UNREAD) > 50
    by_import = {test.partition("::")[0] for test in chosen["quick by import"]}
    assert by_import == {*STORIES_ELSEWHERE}


def test_stories_have_one_process_in_make_test_and_every_other_file_is_by_itself() -> None:
    stories = (*STORIES, *STORIES_ELSEWHERE)
    assert {conftest.scope_of(f"{TESTS.name}/{file}::test") for file in stories} == {"stories"}
    alone = f"{TESTS.name}/{WITHOUT_SERVER}"
    assert conftest.scope_of(f"{alone}::test") == alone


def test_every_property_that_names_a_number_draws_a_seventh_of_it_in_make_test() -> None:
    named = re.compile(r"max_examples[=](?!examples\()")
    files = TESTS.rglob("test_*.py")
    assert [str(file.relative_to(TESTS)) for file in files if named.search(file.read_text())] == []


def test_a_sample_is_drawn_by_its_seed(chosen: dict[str, list[str]]) -> None:
    assert chosen["sample"] == chosen["sample again"] and len(chosen["sample"]) == 5


def test_of_many_draws_a_few_are_run_others_by_another_number_and_all_where_all_are_wanted(
    chosen: dict[str, list[str]],
) -> None:
    every, draws = chosen["all draws"], [set(chosen[f"draws {number}"]) for number in range(4)]
    assert len(every) == 10 and all(len(each) == 3 and each < set(every) for each in draws)
    assert len(set.union(*draws)) > 5
    assert set(chosen["draws"]) == draws[0]


def test_stories_on_real_servers_take_turns_and_what_is_quick_is_always_run(
    chosen: dict[str, list[str]],
) -> None:
    every, turns = chosen["every"], [chosen[f"turn {number}"] for number in range(_TURNS)]
    assert set.union(*map(set, turns)) == set(every)
    for file in STORIES:
        quick, whole = of(file, chosen["quick"]), of(file, every)
        assert sorted((of(file, turn) for turn in turns), key=len) == [quick, quick, whole]
    assert all(of(WITHOUT_SERVER, turn) == of(WITHOUT_SERVER, every) for turn in turns)


def test_every_crash_test_is_one_of_those_that_make_runs() -> None:
    """`make test-all` leaves them out, so a file that is not named here would be run by nobody."""
    (named,) = re.findall(r"^CRASHED := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run = {file for each in named.split() for file in TESTS.glob(each.removeprefix("$(TESTS)/"))}
    marked = {file for file in TESTS.rglob("test_*.py") if "pytest.mark." + "crash" in file.read_text()}
    assert run == marked


def test_every_file_that_is_said_to_take_long_is_there() -> None:
    missing = [name for name in conftest._LONG if not (TESTS / name).is_file()]
    assert missing == []
