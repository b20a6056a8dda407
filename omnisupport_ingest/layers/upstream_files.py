"""Which files of the layer above a window has still to read, where closing has compacted files into others.

A window remembers the files it took by name. Compaction changes no event, so a file that closing made stands
for the names of the files that it replaced: what was taken before counts as taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

StandsFor = Mapping[str, Sequence[str]]
"""Path of a file that closing made → the names it stands for; any other file stands for itself."""


def units_of(files: Iterable[str], stands_for: StandsFor) -> frozenset[str]:
    """The names that the ``files`` stand for."""
    return frozenset(name for file in files for name in _names(file, stands_for))


def files_to_read(
    files: Iterable[str], stands_for: StandsFor, wanted: Collection[str]
) -> frozenset[str] | None:
    """The ``files`` that hold exactly the ``wanted`` names.

    None if a file holds some that are wanted beside some that are not: they cannot be told apart any
    more, so whoever wants them has to begin again with all of them.
    """
    found = set()
    for file in files:
        names = _names(file, stands_for)
        held = sum(name in wanted for name in names)
        if held == len(names):
            found.add(file)
        elif held:
            return None
    return frozenset(found)


def compacted_names(files: Iterable[str], stands_for: StandsFor) -> tuple[str, ...]:
    """The names that a file stands for that replaces ``files``; some of these may be compacted already."""
    return tuple(sorted(units_of(files, stands_for)))


def _names(file: str, stands_for: StandsFor) -> Sequence[str]:
    return stands_for.get(file, (file,))
