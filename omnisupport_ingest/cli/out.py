"""Where ``--out`` writes: one rule for every command that writes files for people.

A path is a folder if it is one, ends with a slash, or has no suffix. In a folder each file has its usual
name, and a missing folder is made. Any other path is the file itself, so it takes exactly one. A link stands
for what it names. Files are replaced as a whole, so a pipe or a device is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

_RULE = "A path without a suffix, or of a folder, is a folder; any other is the file."


@dataclass(frozen=True, slots=True)
class Out:
    """What a person gave for ``--out``: the absolute ``path``, and whether it is a folder."""

    path: Path
    is_folder: bool

    @classmethod
    def of(cls, text: str) -> Out:
        """Read ``text`` by the rule of this module."""
        path = Path(text).absolute()
        named_so = text.endswith("/") or not (path.suffix or path.is_file() or path.is_symlink())
        return cls(path, named_so or path.is_dir())

    @property
    def suffix(self) -> str:
        """The suffix of the file, in lower case and without its dot; empty for a folder."""
        return "" if self.is_folder else self.path.suffix.lstrip(".").lower()

    def file(self, name: str) -> Path:
        """Return the path of the only file that is written, called ``name`` in a folder."""
        return self.files([name])[0]

    def files(self, names: Sequence[str]) -> list[Path]:
        """Return the path of each file, called by ``names`` in a folder, which is made if it is missing.

        Raises a usage error if several files would become one, if the parent folder does not exist, or if
        something else than a file has the name of one.
        """
        if not self.is_folder and len(names) != 1:
            raise click.UsageError(
                f"{len(names)} files are to be written, and {self.path} is one: name a folder, "
                f"like {self.path.with_suffix('')}/."
            )
        if not self.is_folder:
            return [_file_behind(self.path)]
        if self.path.exists() and not self.path.is_dir():
            raise click.UsageError(f"{self.path} is {_kind(self.path)}, not a folder.")
        _require_folder(self.path.parent)
        # No failpoint: a folder: one that is there already is as good.
        self.path.mkdir(mode=0o700, exist_ok=True)
        return [_file_behind(self.path / name) for name in names]


def _file_behind(path: Path) -> Path:
    """Return ``path``, or the file that it names as a link."""
    if path.exists() and not path.is_file():
        raise click.UsageError(f"{path} is {_kind(path)}, not a file.")
    # The file is made beside the one that it replaces, and renamed: that would replace the link.
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    _require_folder(file.parent)
    return file


def _kind(path: Path) -> str:
    return "a file" if path.is_file() else "a folder" if path.is_dir() else "a pipe or a device"


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise click.UsageError(f"{path} is not a folder.")


class _OutPath(click.Path):
    """The type of the option; the shell completes it as any path."""

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # click's own signature
        return value if isinstance(value, Out) else Out.of(str(super().convert(value, param, ctx)))


def out_option(
    help_text: str, *, option: str = "--out", required: bool = False, default: str | None = None
) -> Callable[[Any], Any]:
    """Return the option ``--out`` of a command, or another one like it, as ``Out``. ``help_text``: says what
    is written there."""
    # Click treats an explicit default of None as a value, so the option would not be required.
    given: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(
        option, type=_OutPath(), metavar="PATH", required=required, help=f"{help_text} {_RULE}", **given
    )
