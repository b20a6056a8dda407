"""Named points where a crash test ends the process, as a power cut or ``kill -9`` would.

Recovery is only proved by dying for real between two durable steps: an exception would still run
``finally`` blocks and flush buffers. A point costs one comparison when no test asks for it. This
module and ``settings`` are the only readers of the environment; a failpoint is no setting, so it
is not listed there.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "OMNISUPPORT_FAILPOINT"
"""``name`` ends the process at the first pass of that point, ``name:N`` at the Nth."""

_name, _, _pass_text = os.environ.get(VARIABLE, "").partition(":")
_passes_left = int(_pass_text or 1)


def reached(name: str) -> None:
    """Pass the point ``name``: nothing happens, unless ``OMNISUPPORT_FAILPOINT`` asks to die here."""
    global _passes_left
    if name != _name:
        return
    _passes_left -= 1
    if _passes_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
