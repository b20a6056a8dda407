"""``landing``: the batches that have landed, one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from omnisupport_ingest.landing.damage import Finding
    from omnisupport_ingest.landing.debezium_shape import Origin
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.landing.rows import LandedEvent
    from omnisupport_ingest.landing.store import LandingStore

DAMAGED = 1
"""Exit code when something is not as it landed."""

_LOOK_SECONDS = 0.5
"""How often ``tail --follow`` looks for new batches."""

_of_source = click.option(
    "--source", metavar="NAME", help="Landing of this source.  [default: OMNISUPPORT_SOURCE]"
)


@click.group()
def landing() -> None:
    """Look at the landed batches: list, show, verify, tail."""


@landing.command(name="list")
@_of_source
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="The newest so many; 0: all."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_batches(source: str | None, limit: int, as_json: bool) -> None:
    """List the landed batches of a source, the newest last. Times are UTC.

    \b
    Example:
      omnisupport-ingest landing list --limit 5

    Exit code: 0 done, 1 a manifest cannot be read, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.cli.landing_words import batch_table, summary

    store = _store(source)
    manifests = store.manifests()
    shown = manifests[-limit:] if limit else manifests
    if as_json:
        document = {"source": store.source, "batches": len(manifests), "listed": [summary(m) for m in shown]}
        click.echo(json.dumps(document, indent=2))
        return
    if not manifests:
        click.echo(f"Nothing has landed from {store.source} yet.")
        return
    batch_table(shown)
    rows = sum(manifest.rows for manifest in manifests)
    earlier = len(manifests) - len(shown)
    more = f"; {earlier} earlier ones are not listed (--limit 0 lists all)" if earlier else ""
    click.echo(f"{len(manifests)} batches of {store.source} with {rows:,} events{more}.")


@landing.command()
@_of_source
@click.argument("batch_id")
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as one JSON document.")
def show(source: str | None, batch_id: str, as_json: bool) -> None:
    """Say what the manifest of the batch BATCH_ID says: what it continues, holds and left behind.

    \b
    Example:
      omnisupport-ingest landing show e000001-s-0000000002b9a300

    Exit code: 0 done, 1 no such batch or its manifest cannot be read, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.cli.landing_words import in_words
    from omnisupport_ingest.json_values import to_plain

    store = _store(source)
    if not store.exists(batch_id):
        raise IngestError(
            f"No batch {batch_id} has landed from {store.source}.",
            fix=f"`omnisupport-ingest landing list --source {store.source} --limit 0` lists all of them; "
            "another source is named by --source.",
        )
    manifest = store.read(batch_id)
    if as_json:
        click.echo(json.dumps(to_plain(manifest), indent=2, ensure_ascii=False))
        return
    for line in in_words(manifest):
        click.echo(line)


@landing.command()
@_of_source
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(source: str | None, as_json: bool) -> int:
    """Check every landed file against its manifest, and the chain of manifests for holes.

    Reads all of landing: size, SHA-256 and number of rows of every data file, every manifest, every
    epoch. It goes on after a damage, and names them all. Without --source all sources are checked.

    \b
    Example:
      omnisupport-ingest landing verify

    Exit code: 0 all is as it landed, 1 something is not, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.landing.damage import look_through

    findings = [look_through(store) for store in ([_store(source)] if source else _stores())]
    damaged = any(finding.damage for finding in findings)
    if as_json:
        document = {"whole": not damaged, "sources": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(document, indent=2))
    else:
        for finding in findings:
            _tell(finding)
        if not findings:
            click.echo("Nothing has landed yet.")
    return DAMAGED if damaged else 0


@landing.command()
@_of_source
@click.option("--table", metavar="TABLE", help="Events of this table only, `orders` or `sales.orders`.")
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Begin with the last N events.",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what lands from now on, until Ctrl-C.")
def tail(source: str | None, table: str | None, count: int, follow: bool) -> None:
    """Print landed events as JSON, one per line, in Debezium's envelope.

    This prints rows of the source, protected by the policies for personal data that are in force in the
    contracts (x-cdc.pii). `before` and `after` have the other values as
    they landed, as PostgreSQL's text ("42", "t"), where Debezium types them; a column that was not
    sent (TOAST) is "__debezium_unavailable_value". `ts_ms` is when the event landed, `source.ts_ms`
    when it was committed; the first number of `source.sequence` is the LSN of its own commit. The
    boundaries that end a snapshot have no Debezium form and are left out.

    \b
    Examples:
      omnisupport-ingest landing tail --table tickets -n 3
      omnisupport-ingest landing tail -f | jq .op

    Exit code: 0 done or stopped, 1 a batch is damaged, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.landing.debezium_shape import OPERATIONS
    from omnisupport_ingest.landing.tail import events_of, last_events

    store = _store(source)
    news = store.news(None, 0)
    batches = store.manifests()
    seen = {batch.batch_id for batch in batches}
    printer = _Printer(store)
    for batch, event in last_events(store, batches, count, operations=OPERATIONS, table=table):
        printer.print(batch, event)
    if not follow:
        return
    with stop_on_signal() as stop:
        while not stop.wait(_LOOK_SECONDS):
            if (now := store.news(news.era, news.number)).anew:
                # The index was made again: what has come meanwhile is what was not there before.
                new = [each for each in store.batch_ids() if each not in seen]
            else:
                new = [batch_id for batch_id, _ in now.batches]
            news = now
            for batch_id in [each for each in new if each not in seen]:
                seen.add(batch_id)
                batch = store.read(batch_id)
                for event in events_of(store, batch, table):
                    if event.op in OPERATIONS:
                        printer.print(batch, event)


def _store(source: str | None) -> LandingStore:
    """The landing of ``source``, which must be there: looking makes no folders."""
    from omnisupport_ingest.landing.store import LandingStore

    settings = open_settings()
    root = existing_home(settings).landing
    name = source or settings.source
    if not (root / name / "manifests").is_dir():
        names = ", ".join(sorted(each.name for each in root.iterdir() if each.is_dir())) or "nothing"
        raise IngestError(
            f"Nothing has landed from {name} in {root}; there is: {names}.",
            fix="Name another source with --source, or start capture: `omnisupport-ingest up`.",
        )
    return LandingStore(root, name)


def _stores() -> Iterator[LandingStore]:
    from omnisupport_ingest.landing.store import LandingStore

    root = existing_home(open_settings()).landing
    for folder in sorted(root.iterdir()):
        if (folder / "manifests").is_dir():
            yield LandingStore(root, folder.name)


def _tell(finding: Finding) -> None:
    for each in finding.damage:
        click.echo(f"{each.kind}: {each.problem}\n  Fix: {each.fix}")
    if not finding.batches:
        click.echo(f"{finding.source}: nothing has landed.")
        return
    size = f"{finding.batches} batches, {finding.files} files, {finding.bytes:,} bytes"
    verdict = f"{len(finding.damage)} damaged" if finding.damage else "all as they landed"
    click.echo(f"{finding.source}: {size}; {verdict}.")


class _Printer:
    """Prints events of one source; what the envelope says of a batch is looked up once per batch."""

    def __init__(self, store: LandingStore) -> None:
        from omnisupport_ingest.stages.protected_rows import LandedProtection

        self._store = store
        self._protection = LandedProtection.open(open_settings(), store.source)
        self._origins: dict[str, Origin] = {}

    def print(self, batch: Manifest, event: LandedEvent) -> None:
        from omnisupport_ingest.landing.debezium_shape import envelope

        origin = self._origins.get(batch.batch_id)
        if origin is None:
            # Batches come one after the other: only the last one's is needed.
            self._origins = {batch.batch_id: (origin := self._origin_of(batch))}
        click.echo(
            json.dumps(
                envelope(self._protection.of(event), origin), ensure_ascii=False, separators=(",", ":")
            )
        )

    def _origin_of(self, batch: Manifest) -> Origin:
        from omnisupport_ingest import __version__
        from omnisupport_ingest.landing.debezium_shape import Origin

        facts = None
        if batch.file is None:
            facts = next((each.facts for each in self._store.epochs() if each.number == batch.epoch), None)
        return Origin(
            version=__version__,
            connector="postgresql" if batch.file is None else "file",
            source=batch.source,
            database=facts.database if facts else "",
            landed_at=batch.arrival.landed_at,
        )
