"""A PATH on which some programs are not to be found, whatever this machine has installed."""

from __future__ import annotations

import os
from pathlib import Path


def path_without(folder: Path, *hidden: str) -> str:
    """Fill ``folder`` with links to every program on PATH but ``hidden``; returns it as a PATH."""
    folder.mkdir()
    for each in os.environ["PATH"].split(os.pathsep):
        for program in Path(each).glob("*"):
            link = folder / program.name
            if program.name not in hidden and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)
