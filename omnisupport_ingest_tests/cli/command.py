"""A command of ours, run in this process, with what a person would see of it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from omnisupport_ingest.cli import errors
from omnisupport_ingest.cli.main import cli


@dataclass(frozen=True)
class Done:
    """The exit code, and both outputs."""

    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        return self.out + self.err


def command(*arguments: str) -> Done:
    """Run ``omnisupport-ingest <arguments>`` as its entry point does, without leaving the process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            outcome = cli(list(arguments), standalone_mode=False)
            code = outcome if isinstance(outcome, int) else 0
        except BaseException as error:
            code = errors.report(error, debug=False)
    return Done(code, out.getvalue(), err.getvalue())


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Settings as the variables of ``OMNISUPPORT_``, for as long as the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"OMNISUPPORT_{name.upper()}", value)
        yield
