"""Failpoints: where a crash test ends the process as ``kill -9`` would.

Every effect that outlives the process (a file, a commit, a confirmation) happens inside ``with
failpoint(name):``. A failpoint has two points, one just before its effect and one just after;
``OMNISUPPORT_FAILPOINT`` names the point to die at. Only a real death proves recovery: an exception would
still run ``finally`` blocks and flush buffers. If no test uses it, a failpoint costs one comparison at each
point. This module and ``settings`` are the only readers of the environment; a failpoint is no setting, so it
is not listed there. Names are written out where they are used; docs/recovery.md says what is durable behind
each.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

VARIABLE = "OMNISUPPORT_FAILPOINT"
"""``NAME.before`` or ``NAME.after`` ends the process at the first pass of that point, ``…:N`` at the Nth.

``NAME.before@TEXT`` counts only passes whose object (a table's path, a batch's name) contains TEXT.
"""

_FORM = re.compile(r"(?P<point>[a-z_.]+\.(?:before|after))(?:@(?P<of>[^:]+))?(?::(?P<pass>\d+))?")


@dataclass(slots=True)
class _Armed:
    """A failpoint that is set in the environment."""

    point: str
    of: str
    passes_left: int

    def reached(self, point: str, of: object) -> None:
        if point != self.point or self.of not in str(of):
            return
        self.passes_left -= 1
        if self.passes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _armed_by(text: str) -> _Armed | None:
    if not text:
        return None
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{VARIABLE}={text} is not NAME.before or NAME.after, with @TEXT or :N behind it")
    return _Armed(match["point"], match["of"] or "", int(match["pass"] or 1))


_armed = _armed_by(os.environ.get(VARIABLE, ""))


_watcher: Callable[[str, object], AbstractContextManager[object]] | None = None


def watched_by(watcher: Callable[[str, object], AbstractContextManager[object]] | None) -> None:
    """From now on, enter the context that ``watcher`` makes of name and object around each effect; None: stop
    that."""
    global _watcher
    _watcher = watcher


class failpoint:
    """``with failpoint(name, of):`` around one durable effect on ``of``, which only filters and watchers use.

    The point ``name.after`` is passed only if the effect did not raise.
    """

    __slots__ = ("_name", "_of", "_watched")

    def __init__(self, name: str, of: object = "") -> None:
        self._name, self._of = name, of
        self._watched = _watcher(name, of) if _watcher is not None else None

    def __enter__(self) -> None:
        if self._watched is not None:
            self._watched.__enter__()
        if _armed is not None:
            _armed.reached(f"{self._name}.before", self._of)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _armed is not None and kind is None:
            _armed.reached(f"{self._name}.after", self._of)
        if self._watched is not None:
            self._watched.__exit__(kind, error, trace)
