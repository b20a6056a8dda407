"""The command ``omnisupport-ingest``: its subcommands, and how it ends.

Each command is a module, imported when the command is used. So ``--help`` answers at once, and a command pays
for no other's imports.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import click

from omnisupport_ingest import __version__
from omnisupport_ingest.cli import errors
from omnisupport_ingest.cli.opening import leave_out_pandas
from omnisupport_ingest.cli.render import Commands


class _Listed(NamedTuple):
    """A command that is imported when it is used.

    ``where``: its module in ``omnisupport_ingest.cli``, and after a colon its name there, if that differs.
    ``help``: the first sentence of its help. ``looks``: it only looks at tables, so pandas is left out.
    """

    where: str
    help: str
    looks: bool = False

    def load(self) -> click.Command:
        if self.looks:
            leave_out_pandas()
        module, _, attribute = self.where.partition(":")
        command = getattr(import_module(f"omnisupport_ingest.cli.{module}"), attribute or module)
        assert isinstance(command, click.Command)
        return command


_SECTIONS: Mapping[str, Mapping[str, _Listed]] = {
    "Run": {
        "init": _Listed(
            "init",
            "Make a project in FOLDER: places for contracts, sources and manifests, and settings.",
        ),
        "up": _Listed("up", "Run everything: source, capture, Spark, the Dagster UI and its daemon."),
        "demo": _Listed(
            "demo",
            "Run the main job end to end on an embedded PostgreSQL, and compare source and lake at the end.",
        ),
        "sync": _Listed("sync", "Take everything from a source into the lake once, compare both, and exit."),
        "capture": _Listed(
            "capture",
            "Land the WAL of the source as batches, until Ctrl-C or, with --once, up to now.",
        ),
        "materialize": _Listed(
            "materialize",
            "Take everything that has landed through every layer, by runs of the ingest jobs, and exit.",
        ),
        "serve": _Listed(
            "serve",
            "Run one service of the platform in the foreground, for systemd, Compose or Kubernetes.",
        ),
        "land": _Listed(
            "land",
            "Land files of Debezium events (JSON lines, plain, .gz or .zst), each as one batch of its "
            "source.",
        ),
        "manifest": _Listed("manifest", "Check and load deliveries of files (seed manifests)."),
        "workload": _Listed(
            "up:workload",
            "Change rows of the demo's database, RATE changes per second, until Ctrl-C.",
        ),
    },
    "Look": {
        "status": _Listed(
            "status",
            "Show what runs, how far the source has landed, and how far every table is.",
            looks=True,
        ),
        "alarms": _Listed(
            "alarms",
            "Send an alarm when something is wrong, by OMNISUPPORT_ALARM_COMMAND and "
            "OMNISUPPORT_ALARM_WEBHOOK.",
            looks=True,
        ),
        "ledger": _Listed(
            "ledger",
            "Say whether anything was lost: the chain, gaps, accepted losses, missed changes, withheld "
            "events.",
            looks=True,
        ),
        "doctor": _Listed(
            "doctor",
            "Look for everything that may be wrong, and name the exact fix of each finding.",
            looks=True,
        ),
        "report": _Listed(
            "report",
            "Write one HTML page with plots: freshness, lag, latency, events, faults, growth, cost of runs.",
            looks=True,
        ),
        "tune": _Listed(
            "tune",
            "Measure latency against batch interval and size on this machine, and recommend a setting.",
        ),
        "logs": _Listed("logs", "Show what the services have logged: the last lines of each, or the errors."),
        "windows": _Listed(
            "windows",
            "Show the windows with events: open, closed or late, and what the last replay changed.",
            looks=True,
        ),
        "landing": _Listed("landing", "Look at the landed batches: list, show, verify, tail.", looks=True),
        "checkpoint": _Listed(
            "checkpoint",
            "Show the checkpoints of the lake, back them up, or report them to Dagster again.",
            looks=True,
        ),
        "settings": _Listed("home:settings", "List every setting with its value and meaning."),
    },
    "Read the lake": {
        "explain": _Listed(
            "explain",
            "Explain why a row of TABLE, or one cell of it, has the value that the dimension shows.",
            looks=True,
        ),
        "tail": _Listed(
            "tail",
            "Print the rows of TABLE's dimension as they change: inserts, updates, deletes.",
            looks=True,
        ),
        "export": _Listed(
            "export",
            "Write the current state of TABLE, its dimension, to a file that only you can read.",
            looks=True,
        ),
        "as-of": _Listed("export:as_of", "Read tables as they were AT a time, an LSN or a position."),
        "target": _Listed(
            "target",
            "Keep tables of another PostgreSQL up to date (x-cdc.target of contracts), and show how far "
            "they are.",
            looks=True,
        ),
        "verify": _Listed("verify", "Compare the source with the dimensions at one LSN."),
    },
    "Sources and contracts": {
        "sources": _Listed(
            "sources",
            "List, make and check the definitions of sources (contracts/sources/NAME.json).",
        ),
        "source": _Listed(
            "source",
            "Prepare, watch, connect to, pause, restart, repair and leave the source database.",
        ),
        "preflight": _Listed(
            "preflight",
            "Check everything that must be true at the source before capture can run; change nothing.",
            looks=True,
        ),
        "contracts": _Listed(
            "contracts",
            "Make table contracts, check them, and compare them with the source.",
            looks=True,
        ),
        "pii": _Listed(
            "pii",
            "Show and propose policies for personal data; look up hashes and tokens.",
            looks=True,
        ),
    },
    "Decide and repair": {
        "quarantine": _Listed(
            "quarantine",
            "Review events that were not accepted: list, show, release, discard.",
            looks=True,
        ),
        "replay": _Listed(
            "replay",
            "Replay windows through every layer, from everything that has landed for them.",
        ),
        "erase": _Listed(
            "erase",
            "Erase the values of one row of TABLE that was deleted at its source, for example a person's.",
        ),
        "retention": _Listed(
            "retention",
            "Show how long data is kept, what would go now and what is refused; remove it.",
            looks=True,
        ),
        "home": _Listed("home_copy:home", "Move landing and lake of the home to an object store."),
        "sweep": _Listed(
            "home:sweep",
            "Delete files of the lake that no table needs: leftovers of crashed runs, and replaced versions.",
        ),
        "clean": _Listed(
            "home:clean",
            "Remove the home: lake, landing, logs, Dagster's files, the embedded database.",
        ),
        "rebuild": _Listed(
            "materialize:rebuild",
            "Upgrade a home of an earlier version: make its dimensions again, from what has landed.",
        ),
    },
}
"""The commands of a person, in the order in which they are needed."""

_HIDDEN = {
    "postgres": _Listed("up:postgres", "Run the embedded PostgreSQL of the home until Ctrl-C."),
    "metrics": _Listed(
        "metrics",
        "Serve metrics for Prometheus, and health, at http://127.0.0.1:PORT until Ctrl-C, as a "
        "service of `up`.",
    ),
    "ingest-run": _Listed(
        "materialize:ingest_run",
        "Take the windows FIRST to LAST of SOURCE through every layer; print how the run ended as JSON.",
    ),
}
"""Commands of the platform itself."""


class _Cli(Commands):
    """The commands, each imported when it is used."""

    listed: Mapping[str, _Listed] = {
        **{name: each for named in _SECTIONS.values() for name, each in named.items()},
        **_HIDDEN,
    }

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.listed and cmd_name not in self.commands:
            self.add_command(self.listed[cmd_name].load(), cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return [*self.listed]

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, named in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, each.help) for name, each in named.items()])

    def whole(self) -> Mapping[str, click.Command]:
        """Return all commands, by name: for what describes or checks the command line."""
        with click.Context(self) as context:
            return {name: each for name in self.listed if (each := self.get_command(context, name))}


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="omnisupport-ingest")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """PostgreSQL to a lakehouse by change data capture, on Dagster and Spark.

    To try it: `demo`. For your database: `init FOLDER`, then the tutorial. Everything is kept in a home, the
    folder .omnisupport (OMNISUPPORT_HOME).

    Every setting is a variable OMNISUPPORT_<NAME> or a line of .env; `settings` lists them. The exit codes of
    all commands are in docs/cli.md.
    """


def main() -> None:
    """Run the command line and exit; the entry point of the console script."""
    # Read before parsing, so that an error in parsing is shown in full as well.
    debug = "--debug" in sys.argv[1:]
    if not debug:
        # Warnings of libraries are for developers; the commands print what a user must know.
        warnings.simplefilter("ignore")
    try:
        outcome = cli(standalone_mode=False)
    except SystemExit:
        # click ends in this way when the reader of our output has closed it.
        raise
    except BaseException as error:
        sys.exit(errors.report(error, debug=debug))
    sys.exit(outcome if isinstance(outcome, int) else 0)


if __name__ == "__main__":
    main()
