"""Logical messages by which a run marks where it is; both captures see them."""

from __future__ import annotations

BEGIN = "parity.begin"
"""Prefix of the message that names the script or seed that follows."""

END = "parity.end"
"""Prefix of the last message: the engine's process ends when it has come by."""
