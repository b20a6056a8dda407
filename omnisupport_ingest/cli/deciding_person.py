"""Who decides, where a command records that a person decided something."""

from __future__ import annotations

import click


def deciding_person(by: str | None) -> str:
    """``by``, or this user's name where it is not given; a usage error if the user has none."""
    import getpass

    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise click.UsageError("This user has no name: say who decides, with --by.") from None
