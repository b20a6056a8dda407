"""``docs/cli.md``: the help of every command, as one page.

``python -m omnisupport_ingest.cli.reference > docs/cli.md`` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from omnisupport_ingest.cli.main import cli

REGENERATE = "python -m omnisupport_ingest.cli.reference > docs/cli.md"

_WIDTH = 96

_HEAD = f"""\
# Command line

What `omnisupport-ingest COMMAND --help` says, for every command. This page is made by
`{REGENERATE}`.

`omnisupport-ingest --debug COMMAND …` shows the traceback of an error as well. Every setting is a
variable `OMNISUPPORT_<NAME>` or a line of `.env`; see [settings](settings.md). With `--json`, one JSON
document is all that stands on standard output; progress and warnings go to standard error.

## Exit codes

Each command's help says which of them it uses.

| code | meaning |
|---|---|
| 0 | done, nothing found |
| 1 | a problem that is named with its fix, or findings |
| 2 | wrong usage, setting, contract, seed manifest or connection string |
| 3 | the home is not there or does not fit |
| 4 | something needed is missing or does not answer: Java, PostgreSQL, Spark |
| 5 | the source is not set up for capture; a port is taken |
| 6 | in use: home, slot, capture |
| 7 | a hole in the source; a service of `up` or `demo` failed |
| 70 | not foreseen; `--debug` shows more |
| 130 | Ctrl-C |

The messages behind them are in [recovery](recovery.md#bad-input).
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that a person is shown, groups included: its full name, and itself."""
    yield from _below("omnisupport-ingest", cli)


def help_of(name: str, command: click.Command) -> str:
    """What ``--help`` prints, wrapped the same wherever it is made."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )
    return command.get_help(context)


def page() -> str:
    """The whole page."""
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


def main() -> None:
    click.echo(page(), nl=False)


if __name__ == "__main__":
    main()
