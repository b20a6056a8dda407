"""What Dagster gets to know of an error in a step.

Dagster keeps errors whole, with their causes, in its storage and logs. The text of an error that is not the
program's own may quote a row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.known_errors import known_error, what_and_where

P = ParamSpec("P")
R = TypeVar("R")


class UnexpectedInStep(IngestError):
    """A step of a run failed by an error that the program did not expect. What was committed stays.

    Fix: Run it again; if it fails again, report class and place. The text of the error is kept nowhere, as it
    may quote a row.
    """


def unquoted(body: Callable[P, R]) -> Callable[P, R]:
    """Return the ``body`` of an op, asset or check, which raises errors without what may quote a row.

    The program's own errors come without their causes. Errors of Dagster pass as they are: it acts on them.
    """
    if inspect.isgeneratorfunction(body):

        @functools.wraps(body)
        def generator(*args: P.args, **named: P.kwargs) -> Iterator[Any]:
            with _unquoted():
                yield from body(*args, **named)

        return cast(Callable[P, R], generator)

    @functools.wraps(body)
    def function(*args: P.args, **named: P.kwargs) -> R:
        with _unquoted():
            return body(*args, **named)

    return function


@contextmanager
def _unquoted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0].startswith("dagster"):
            raise
        raise _named(error) from None


def _named(error: Exception) -> IngestError:
    return known_error(error) or UnexpectedInStep(
        f"The step failed: {what_and_where(error)}.",
        fix="Run it again; if it fails again, report this line. What was committed stays.",
    )
