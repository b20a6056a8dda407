"""What explores draws afresh, says how to run it again, and reaches every property test but slow kinds."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import hypothesis
import pytest

from omnisupport_ingest_tests import explore


def test_the_pinned_examples_are_the_same_and_those_explored_are_not() -> None:
    assert hypothesis.settings.get_profile("same").derandomize
    fresh = hypothesis.settings.get_profile("explore")
    assert not fresh.derandomize
    # Run again with its seed it must do the same, whatever this machine has seen.
    assert fresh.database is None


def test_one_seed_draws_everything_again() -> None:
    assert explore._properties(Random(7)) == explore._properties(Random(7)) != explore._properties(Random(8))
    assert explore._proof(Random(7), 6, 2, 30) == explore._proof(Random(7), 6, 2, 30)


def test_what_fails_is_printed_with_the_command_that_runs_it_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert explore._fails(["-c", "raise SystemExit(3)"], 60)
    assert "code 3. Again: python -c 'raise SystemExit(3)'" in capfd.readouterr().err
    assert not explore._fails(["-c", ""], 60)


def test_time_that_is_over_is_no_failure() -> None:
    assert not explore._fails(["-c", "import time; time.sleep(600)"], 0.1)


@pytest.mark.full
def test_only_property_tests_without_spark_and_servers_are_explored() -> None:
    files = [f"omnisupport_ingest_tests/{name}" for name in ("test_key_range.py", "contracts/test_rules.py")]
    assert set(files) <= set(explore.property_files())
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--explore", "--collect-only", "-q", "-p", "no:xdist", *files],
        cwd=explore.HERE.parent,
        capture_output=True,
        text=True,
    ).stdout
    assert "test_key_range.py::test_dates_lie_in_a_range_as_dates_do" in found
    assert "test_rules.py::test_pandera_says_of_each_row_what_the_row_rules_say" in found
    assert "test_gate_and_row_rules_agree" not in found, "it needs Spark"
