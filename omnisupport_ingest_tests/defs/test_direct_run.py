"""What a command says of a step that failed in its run."""

from __future__ import annotations

import dagster as dg
from pyspark.errors.exceptions.connect import UnknownException

from omnisupport_ingest.defs.direct_run import StepFailure, step_failure
from omnisupport_ingest.runtime.spark_errors import named_spark_errors
from omnisupport_ingest.settings import Settings


def failure_of(error: Exception) -> StepFailure:
    """The failure of a run whose only step meets ``error`` on Spark."""

    @dg.op
    def fold() -> None:
        with named_spark_errors(Settings(spark_driver_memory="3g")):
            raise error

    @dg.job
    def folds() -> None:
        fold()

    done = folds.execute_in_process(raise_on_error=False)
    (event,) = [each for each in done.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE]
    return step_failure(event)


def test_a_step_that_had_no_memory_on_spark_names_memory_and_the_setting() -> None:
    told = failure_of(UnknownException("java.lang.OutOfMemoryError: Java heap space"))
    assert told.step == "fold"
    assert told.problem == (
        "Spark had no memory left (java.lang.OutOfMemoryError): OMNISUPPORT_SPARK_DRIVER_MEMORY is 3g."
    )
    assert told.fix.startswith("Set OMNISUPPORT_SPARK_DRIVER_MEMORY to more")


def test_of_any_other_error_of_a_library_the_kind_alone_is_told() -> None:
    assert failure_of(UnknownException("row ('secret')")) == StepFailure(
        "fold", "unexpected UnknownException.", ""
    )
