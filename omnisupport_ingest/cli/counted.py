"""Numbers of things, as people say them."""

from __future__ import annotations


def counted(number: int, name: str) -> str:
    """``1 run``, ``2 runs``, ``3 batches``."""
    plural = f"{name}es" if name.endswith("ch") else f"{name}s"
    return f"{number:,} {name if number == 1 else plural}"
