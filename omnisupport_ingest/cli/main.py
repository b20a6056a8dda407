"""The command ``omnisupport-ingest``: its subcommands, and how it ends.

Nothing heavy is imported here or at the top of a command's module, so ``--help`` answers at once; only the
commands that use PySpark and Dagster import them.
"""

from __future__ import annotations

import sys
import warnings
from typing import ClassVar

import click

from omnisupport_ingest import __version__
from omnisupport_ingest.cli import errors
from omnisupport_ingest.cli.alarms import alarms
from omnisupport_ingest.cli.capture import capture
from omnisupport_ingest.cli.checkpoint import checkpoint
from omnisupport_ingest.cli.contracts import contracts
from omnisupport_ingest.cli.demo import demo
from omnisupport_ingest.cli.doctor import doctor
from omnisupport_ingest.cli.erase import erase
from omnisupport_ingest.cli.explain import explain
from omnisupport_ingest.cli.export import as_of, export
from omnisupport_ingest.cli.home import clean, settings, sweep
from omnisupport_ingest.cli.home_copy import home
from omnisupport_ingest.cli.init import init
from omnisupport_ingest.cli.land import land
from omnisupport_ingest.cli.landing import landing
from omnisupport_ingest.cli.ledger import ledger
from omnisupport_ingest.cli.logs import logs
from omnisupport_ingest.cli.manifest import manifest
from omnisupport_ingest.cli.materialize import ingest_run, materialize, rebuild
from omnisupport_ingest.cli.metrics import metrics
from omnisupport_ingest.cli.pii import pii
from omnisupport_ingest.cli.preflight import preflight
from omnisupport_ingest.cli.quarantine import quarantine
from omnisupport_ingest.cli.render import Commands
from omnisupport_ingest.cli.replay import replay
from omnisupport_ingest.cli.report import report
from omnisupport_ingest.cli.retention import retention
from omnisupport_ingest.cli.serve import serve
from omnisupport_ingest.cli.source import source
from omnisupport_ingest.cli.sources import sources
from omnisupport_ingest.cli.status import status
from omnisupport_ingest.cli.sync import sync
from omnisupport_ingest.cli.tail import tail
from omnisupport_ingest.cli.target import target
from omnisupport_ingest.cli.tune import tune
from omnisupport_ingest.cli.up import postgres, up, workload
from omnisupport_ingest.cli.verify import verify
from omnisupport_ingest.cli.windows import windows
from omnisupport_ingest.cli.withdraw import retire, withdraw

contracts.add_command(withdraw)
sources.add_command(retire)


class _Cli(Commands):
    """The commands of a person, in the order in which they are needed."""

    sections: ClassVar = {
        "Run": (
            "init",
            "up",
            "demo",
            "sync",
            "capture",
            "materialize",
            "serve",
            "land",
            "manifest",
            "workload",
        ),
        "Look": (
            "status",
            "alarms",
            "ledger",
            "doctor",
            "report",
            "tune",
            "logs",
            "windows",
            "landing",
            "checkpoint",
            "settings",
        ),
        "Read the lake": ("explain", "tail", "export", "as-of", "target", "verify"),
        "Sources and contracts": ("sources", "source", "preflight", "contracts", "pii"),
        "Decide and repair": (
            "quarantine",
            "replay",
            "erase",
            "rebuild",
            "retention",
            "home",
            "sweep",
            "clean",
        ),
    }


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="omnisupport-ingest")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """PostgreSQL to a lakehouse by change data capture, on Dagster and Spark.

    Every setting is a variable OMNISUPPORT_<NAME> or a line of .env; `settings` lists them. The exit codes of
    all commands are in docs/cli.md.
    """


_COMMANDS = (
    init,
    up,
    demo,
    sync,
    capture,
    materialize,
    serve,
    land,
    manifest,
    workload,
    status,
    alarms,
    ledger,
    doctor,
    report,
    tune,
    logs,
    windows,
    landing,
    checkpoint,
    settings,
    explain,
    tail,
    export,
    as_of,
    target,
    verify,
    sources,
    source,
    preflight,
    contracts,
    pii,
    quarantine,
    replay,
    erase,
    rebuild,
    retention,
    home,
    sweep,
    clean,
    postgres,
    metrics,
    ingest_run,
)
for command in _COMMANDS:
    cli.add_command(command)


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
