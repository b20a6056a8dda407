"""How commands write for people: counts, sizes, rates, times, labelled lines and tables, each in one way.

A terminal gets colours and lines of its own width; a pipe or a file gets plain text, 100 columns wide, so
that a script always sees the same. Names, positions and paths are never cut: they make a line longer.
``echo_json`` writes ``--json`` documents.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.wording import counted as counted

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of text on a pipe, and the most columns of prose in a terminal."""

_NARROWEST = 60
_LABEL = 13
_COLOURS = {
    "RUNNING": "bold green",
    "FAILED": "bold red",
    "PAUSED": "bold yellow",
    "STOPPED": "bold yellow",
    "blocks": "bold red",
    "warns": "bold yellow",
    "notes": "bold",
    "Warning:": "bold yellow",
}
"""First words that a terminal shows in colour."""


# --- numbers and times ------------------------------------------------------------------------------------


def without_links(text: str) -> str:
    """Return ``text`` of a page for a terminal: links in parentheses go, of others the words stay."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r" ?\(\[[^\]]*\]\([^)]*\)\)", "", text))


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` of ``names``, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def size(number: int) -> str:
    """Return a number of bytes: ``512 bytes``, ``5 MB``, ``3.0 GB``; a kB has 1024 bytes."""
    scaled = float(number)
    for unit in ("bytes", "kB", "MB"):
        if scaled < 1024:
            return f"{scaled:,.0f} {unit}"
        scaled /= 1024
    return f"{scaled:,.1f} GB"


def rate(rows_per_second: float) -> str:
    """``1,200 rows/s``."""
    return f"{rows_per_second:,.0f} rows/s"


def span(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two: ``4 s``, ``26 min``, ``3 h``, ``2
    days``."""
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(moment: datetime | str) -> str:
    """Return how long ago ``moment`` (or its ISO 8601 text) was: ``26 min ago``."""
    return f"{since(moment)} ago"


def since(moment: datetime | str) -> str:
    """Return the time since ``moment`` (or its ISO 8601 text), without a word after it; never negative."""
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return span(max(0.0, (datetime.now(UTC) - at).total_seconds()))


def clock(moment: datetime | str | None) -> str:
    """Return ``moment`` (or its ISO 8601 text) to the second, in UTC; ``none`` without one."""
    if moment is None:
        return "none"
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def iso(moment: datetime | None) -> str | None:
    """Return ``moment`` for ``--json``."""
    return None if moment is None else moment.isoformat()


# --- help --------------------------------------------------------------------------------------------------


class Commands(click.Group):
    """A click group whose help shows the whole first sentence of each command, in the order of their
    definition."""

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = [each for each in self.commands.values() if not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(str(each.name), each.get_short_help_str(limit=1000)) for each in shown])


# --- lines and tables -------------------------------------------------------------------------------------


def echo_json(document: Any) -> None:
    """Print the one document of a command with ``--json``."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # A file name may contain bytes that are no text.
        text = json.dumps(document, indent=2)
    click.echo(text)


def facts(
    lines: Iterable[tuple[str, str]], *, label: int = _LABEL, indent: int = 0, wrap: bool = True
) -> None:
    """Print a label and its text per line; a long text continues in its own column, unless ``wrap`` is False.

    ``label``: width of the labels. ``indent``: width before them, in characters. Line breaks in a text stay.
    A text that begins with a state shows it in colour.
    """
    console = _console()
    margin = " " * (indent + label)
    for title, text in lines:
        first = f"{'':{indent}}{title:<{label - 1}} "
        for line in text.split("\n"):
            for each in _wrapped(line, first, margin, min(console.width, WIDTH) if wrap else 0):
                _print(console, each, len(margin))
            first = margin


def _wrapped(text: str, first: str, margin: str, width: int) -> list[str]:
    """Return the lines of ``text`` after ``first``; ``width`` 0: one line."""
    if not width:
        return [first + text]
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=margin,
        # Paths, ids and positions are not split, so that they can be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def finding(problem: str, fix: str, *, kind: str = "Warning:", width: int = 0) -> None:
    """Print a problem after its ``kind`` (``Warning:``, ``blocks``), and its fix below, if there is one."""
    console = _console()
    _print(console, f"{kind:<{width}} {problem}", 0)
    if fix:
        click.echo(f"{'':{width + 1 if width else 0}}Fix: {fix}")


def heading(text: str) -> None:
    """Print a line in bold."""
    click.echo(click.style(text, bold=True))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print ``rows`` of texts under the titles ``columns``; ``right``: titles of columns of numbers.

    No cell is cut or wrapped: a table that is wider than the terminal has long lines.
    """
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in columns:
        shown.add_column(Text(title), justify="right" if title in right else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console = _console()
    needed = console.measure(shown, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, needed)
    with console.capture() as captured:
        console.print(shown, crop=False)
    # Rich pads the last column, which would only disturb scripts.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def progress_bar() -> Any:
    """Return a bar for a step with a countable amount of work: a ``rich.progress.Progress``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_console(),
    )


def say_err(line: str) -> None:
    """Print progress or a warning on standard error, which leaves standard output to the result."""
    click.echo(line, err=True)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, _NARROWEST) if console.is_terminal else WIDTH
    return console


def _print(console: Console, line: str, start: int) -> None:
    """Print ``line`` unchanged; the word at ``start`` is coloured if it is one of ``_COLOURS``."""
    from rich.text import Text

    text = Text(line)
    word = line[start:].split(" ", 1)[0].rstrip(";,")
    if word.rstrip(":") in _COLOURS or word in _COLOURS:
        text.stylize(_COLOURS.get(word) or _COLOURS[word.rstrip(":")], start, start + len(word))
    console.print(text, soft_wrap=True)
