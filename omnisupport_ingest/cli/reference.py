"""The pages that are made from the code: ``docs/cli.md``, ``docs/settings.md``, ``.env.example`` and others.

``python -m omnisupport_ingest.cli.reference`` writes them below the working directory. In
``docs/settings.md`` only the table is generated; the text outside its two marks is written by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from annotated_types import Ge, Gt, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from omnisupport_ingest.cli.errors import EXIT_CODES
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.cli.metrics import metrics_page
from omnisupport_ingest.cli.reference_data import reference_page
from omnisupport_ingest.cli.reference_errors import errors_page
from omnisupport_ingest.cli.render import without_links
from omnisupport_ingest.settings import PREFIX, Settings

REGENERATE = "python -m omnisupport_ingest.cli.reference"

COMMANDS_PAGE, SETTINGS_PAGE, EXAMPLE = Path("docs/cli.md"), Path("docs/settings.md"), Path(".env.example")
METRICS_PAGE, DATA_PAGE = Path("docs/metrics.md"), Path("docs/reference.md")
ERRORS_PAGE = Path("docs/errors.md")

_HELP_WIDTH = 96

_CODES = "\n".join(f"| {code} | {each.meaning} |" for code, each in EXIT_CODES.items())

_HEAD = f"""\
# Command line

What `omnisupport-ingest COMMAND --help` says, for every command. This page is made by
`{REGENERATE}`.

`omnisupport-ingest --debug COMMAND …` shows the traceback of an error as well. Every setting is a
variable `OMNISUPPORT_<NAME>` or a line of `.env`; see [settings](settings.md). With `--json`, one JSON
document is all of standard output; progress and warnings go to standard error.

## Exit codes

Each command's help says which of them it uses.

| code | meaning |
|---|---|
{_CODES}

Each error, with its code, is in [errors](errors.md).

## Shell completion

Tab completes commands and options. Put the line for your shell into its start file, and open a new shell:

| shell | file | line |
|---|---|---|
| bash 4.4 | `~/.bashrc` | `eval "$(_OMNISUPPORT_INGEST_COMPLETE=bash_source omnisupport-ingest)"` |
| zsh | `~/.zshrc` | `eval "$(_OMNISUPPORT_INGEST_COMPLETE=zsh_source omnisupport-ingest)"` |
| fish | `config.fish` | `_OMNISUPPORT_INGEST_COMPLETE=fish_source omnisupport-ingest \\| source` |
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is not hidden, including groups: its full name, and the command."""
    yield "omnisupport-ingest", cli
    for name, command in cli.whole().items():
        if not command.hidden:
            yield from _below(f"omnisupport-ingest {name}", command)


def help_of(name: str, command: click.Command) -> str:
    """Return what ``--help`` prints, at a width that does not depend on the terminal."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=_HELP_WIDTH,
        max_content_width=_HELP_WIDTH,
        help_option_names=["-h", "--help"],
    )
    return command.get_help(context)


def commands_page() -> str:
    """Return the whole of ``docs/cli.md``."""
    parts = [_HEAD]
    for name, command in commands():
        title = name.removeprefix("omnisupport-ingest ")
        parts.append(f"## {title}\n\n```\n{help_of(name, command)}\n```\n")
    return "\n".join(parts)


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for each in command.commands.values():
            if not each.hidden:
                yield from _below(f"{name} {each.name}", each)


_BEGIN = "<!-- made from omnisupport_ingest/settings.py -->"
_END = "<!-- end of what is made -->"
_WIDTH = 100
_PLAIN = ("name", "path")
"""Types of values that ``.env.example`` does not explain."""


def settings_page(before: str) -> str:
    """Return the page ``before`` with a new table. Raises ``ValueError`` if a mark is missing."""
    head, _, rest = before.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not end:
        raise ValueError(f"{SETTINGS_PAGE} has lost the marks {_BEGIN} and {_END}")
    rows = ["| variable | default | values | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{PREFIX}{name.upper()}` | {default} | {values_of(field)} | {field.description} |")
    table = "\n".join(rows)
    return f"{head}{_BEGIN}\n\n{table}\n\n{_END}{tail}"


def example() -> str:
    """Return ``.env.example``: every setting, commented out, with its default or an example."""
    lines = [
        "# Copy to .env and uncomment what you change. `omnisupport-ingest settings` lists the values in",
        f"# force, docs/settings.md explains them. This file is made by: {REGENERATE}",
    ]
    for name, field in Settings.model_fields.items():
        sample = field.default if field.default is not None else next(iter(field.examples or ()), "")
        values = values_of(field).replace("`", "")
        text = f"{without_links(str(field.description))}{'' if values in _PLAIN else f' Values: {values}.'}"
        lines += ["", *textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{PREFIX}{name.upper()}={sample}")
    return "\n".join(lines) + "\n"


def values_of(field: FieldInfo) -> str:
    """Return what a setting accepts, in a few words: from the setting itself, else from its type."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "values" in extra:
        return str(extra["values"])
    kinds = getattr(field.annotation, "__args__", (field.annotation,))
    if Path in kinds:
        return "path"
    if SecretStr in kinds:
        return "text, secret"
    if bool in kinds:
        return "`true`, `false`"
    if int in kinds or float in kinds:
        return _bounds(field.metadata)
    return "name"


def _bounds(rules: list[Any]) -> str:
    lowest = next((rule.ge for rule in rules if isinstance(rule, Ge)), None)
    above = next((rule.gt for rule in rules if isinstance(rule, Gt)), None)
    highest = next((rule.le for rule in rules if isinstance(rule, Le)), None)
    if lowest is not None and highest is not None:
        return f"{lowest} to {highest}"
    if above is not None:
        return f"> {above}"
    return f"≥ {lowest}" if lowest is not None else "number"


def main() -> None:
    # No failpoint: a page of the documentation, for developers.
    COMMANDS_PAGE.write_text(commands_page())
    SETTINGS_PAGE.write_text(settings_page(SETTINGS_PAGE.read_text()))
    EXAMPLE.write_text(example())
    METRICS_PAGE.write_text(metrics_page())
    DATA_PAGE.write_text(reference_page())
    ERRORS_PAGE.write_text(errors_page(ERRORS_PAGE.parent))


if __name__ == "__main__":
    main()
