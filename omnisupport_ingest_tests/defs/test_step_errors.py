"""What Dagster keeps of a step that fails: no text that a library or a driver wrote, nor one of a cause."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from omnisupport_ingest.defs.assets import lake_asset
from omnisupport_ingest.defs.direct_run import step_failure
from omnisupport_ingest.defs.step_errors import UnexpectedInStep, unquoted
from omnisupport_ingest.errors import IngestError

VALUE = "ada@example.org"


class Known(IngestError):
    """Of this test."""


def unknown() -> None:
    raise ValueError(f"cannot cast {VALUE}")


def known() -> None:
    try:
        unknown()
    except ValueError as error:
        raise Known("It cannot be read.", fix="Look at it.") from error


def ran(fail: Callable[[], Any], *, generator: bool = False) -> dg.ExecuteInProcessResult:
    if generator:

        @dg.asset(name="table")
        @unquoted
        def made(_context: dg.AssetExecutionContext) -> Iterator[dg.Output[None]]:
            fail()
            yield dg.Output(None)

    else:

        @dg.asset(name="table")
        @unquoted
        def made(_context: dg.AssetExecutionContext) -> None:
            fail()

    return dg.materialize([made], raise_on_error=False)


def failure(result: dg.ExecuteInProcessResult) -> dg.DagsterEvent:
    (event,) = (each for each in result.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE)
    return event


@pytest.mark.parametrize("generator", [False, True])
def test_of_an_error_that_nobody_expected_class_and_place_are_kept(generator: bool) -> None:
    event = failure(ran(unknown, generator=generator))
    assert VALUE not in repr(event)
    found = step_failure(event)
    assert found.problem.startswith("The step failed: unexpected ValueError in unknown (test_step_errors.py:")


@pytest.mark.parametrize("generator", [False, True])
def test_an_error_of_the_program_comes_without_its_cause(generator: bool) -> None:
    event = failure(ran(known, generator=generator))
    assert VALUE not in repr(event)
    assert (step_failure(event).step, "It cannot be read." in repr(event)) == ("table", True)


def test_dagsters_own_errors_pass_as_they_are() -> None:
    retries = 0

    def retry() -> None:
        nonlocal retries
        retries += 1
        if retries == 1:
            raise dg.RetryRequested(max_retries=1)

    assert ran(retry).success and retries == 2

    def fails() -> None:
        raise dg.Failure("said for Dagster", metadata={"rows": 3})

    data = failure(ran(fails)).step_failure_data
    assert data.user_failure_data is not None
    assert data.user_failure_data.metadata == {"rows": dg.MetadataValue.int(3)}


def test_an_error_of_the_program_stays_the_same_object() -> None:
    error = Known("It cannot be read.", fix="Look at it.")

    @unquoted
    def body() -> None:
        raise error from ValueError(VALUE)

    with pytest.raises(Known) as raised:
        body()
    assert raised.value is error and error.__cause__ is None
    with pytest.raises(UnexpectedInStep):
        unquoted(unknown)()


def test_every_body_of_a_step_is_wrapped() -> None:
    folder = Path(lake_asset.__code__.co_filename).parent
    steps = re.compile(r"^ *@dg\.(?:op|asset|asset_check|multi_asset_check)\(", re.MULTILINE)
    for module in sorted(folder.glob("*.py")):
        text = module.read_text()
        assert len(steps.findall(text)) == len(re.findall(r"^ *@unquoted\n *def ", text, re.MULTILINE)), (
            module
        )
