"""Numbers of things in sentences for people: the noun and the verb agree with the number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: ``1 run``, ``2 runs``, ``1,300 batches``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def agreeing(number: int, one: str, several: str) -> str:
    """Return the form of a word that goes with the number: ``is`` or ``are``."""
    return one if number == 1 else several
