"""``landing``: the landed batches: list them, show one, verify them, print their events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest import __version__
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.long_look import speaking
from omnisupport_ingest.cli.opening import existing_home, open_settings, open_workspace
from omnisupport_ingest.cli.render import Commands, clock, counted, echo_json, facts, size
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.contracts.sources import load_sources, sources_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.json_values import compact, to_plain
from omnisupport_ingest.landing.damage import Finding, check_landing
from omnisupport_ingest.landing.debezium_envelope import OPERATIONS, Origin, envelope
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.tail import events_of, last_events
from omnisupport_ingest.layers.removed import Present, Removed
from omnisupport_ingest.read.protected_rows import LandedProtection
from omnisupport_ingest.storage import has_landed, landed_sources

if TYPE_CHECKING:
    from omnisupport_ingest.landing.rows import LandedEvent
    from omnisupport_ingest.settings import Settings

_LOOK_SECONDS = 0.5
"""How often ``tail --follow`` looks for new batches."""

_of_source = click.option(
    "--source", metavar="NAME", help="Landing of this source.  [default: OMNISUPPORT_SOURCE]"
)


@click.group(cls=Commands)
def landing() -> None:
    """Look at the landed batches: list, show, verify, tail."""


@landing.command(name="list")
@_of_source
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="List only the newest N; 0 lists all.",
    metavar="N",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_batches(source: str | None, limit: int, as_json: bool) -> None:
    """List the landed batches of a source, the newest last. Times are UTC.

    \b
    Example:
      omnisupport-ingest landing list --limit 5

    Exit code: 0 done, 1 a manifest cannot be read, 2 usage or settings, 3 no home.
    """
    store = _store(source)
    manifests = store.manifests()
    shown = manifests[-limit:] if limit else manifests
    if as_json:
        document = {"source": store.source, "batches": len(manifests), "listed": [_summary(m) for m in shown]}
        echo_json(document)
        return
    if not manifests:
        click.echo(f"Nothing has landed from {store.source} yet.")
        return
    rows = [
        [batch.batch_id, _kind(batch), f"{batch.rows:,}", clock(batch.arrival.landed_at)] for batch in shown
    ]
    show_table(["batch", "kind", "events", "landed"], rows, right=("events",))
    earlier = len(manifests) - len(shown)
    more = f"; {earlier:,} earlier ones are not listed (--limit 0 lists all)" if earlier else ""
    events = counted(sum(manifest.rows for manifest in manifests), "event")
    click.echo(f"{counted(len(manifests), 'batch')} of {store.source} with {events}{more}.")


@landing.command()
@_of_source
@click.argument("batch_id")
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as one JSON document.")
def show(source: str | None, batch_id: str, as_json: bool) -> None:
    """Show the manifest of the batch BATCH_ID: what it continues, and what it holds.

    \b
    Example:
      omnisupport-ingest landing show e000001-s-0000000002b9a300

    Exit code: 0 done, 1 no such batch or its manifest cannot be read, 2 usage or settings, 3 no home.
    """
    store = _store(source)
    if not store.exists(batch_id):
        raise IngestError(
            f"No batch {batch_id} has landed from {store.source}.",
            fix=f"`omnisupport-ingest landing list --source {store.source} --limit 0` lists all of them; "
            "another source is named by --source.",
        )
    manifest = store.read(batch_id)
    if as_json:
        echo_json(to_plain(manifest))
        return
    click.echo(f"{manifest.batch_id}: {_description(manifest)}")
    facts(_facts(manifest), indent=2, label=17)


@landing.command()
@_of_source
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify(source: str | None, as_json: bool) -> int:
    """Check every landed file against its manifest, and the chain of manifests for gaps.

    Reads all of landing: size, SHA-256 and number of rows of every data file, every manifest, every
    epoch. It lists every damage, and does not stop at the first one. Without --source it checks all sources.
    What retention has removed is counted, and is no damage.

    \b
    Example:
      omnisupport-ingest landing verify

    Exit code: 0 all is as it landed, 1 something is not, 2 usage or settings, 3 no home.
    """
    lake = existing_home(open_settings()).lake
    with speaking():
        findings = [
            check_landing(store, Present(store, Removed.in_lake(lake, store.source)).has)
            for store in ([_store(source)] if source else _stores())
        ]
    damaged = any(finding.damage for finding in findings)
    if as_json:
        document = {"whole": not damaged, "sources": [asdict(finding) for finding in findings]}
        echo_json(document)
    else:
        for finding in findings:
            _show_finding(finding)
        if not findings:
            click.echo("Nothing has landed yet.")
    return FINDINGS if damaged else 0


@landing.command()
@_of_source
@click.option("--table", metavar="TABLE", help="Only events of this table, `orders` or `sales.orders`.")
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Begin with the last N events.",
)
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with the events that land from now on, until Ctrl-C."
)
def tail(source: str | None, table: str | None, count: int, follow: bool) -> None:
    """Print landed events as JSON, one per line, in Debezium's envelope.

    This prints rows of the source, protected by the policies for personal data that are in force in the
    contracts (x-cdc.pii). `before` and `after` have the other values as they landed, PostgreSQL's text
    ("42", "t"), where Debezium has typed values. A column that was not sent (TOAST) is
    "__debezium_unavailable_value". `ts_ms` is when the event landed, `source.ts_ms` when it was committed;
    the first number of `source.sequence` is the LSN of its own commit. Snapshot ends have no form in Debezium
    and are left out, and so are batches of which retention has removed a data file.

    \b
    Examples:
      omnisupport-ingest landing tail --table tickets -n 3
      omnisupport-ingest landing tail -f | jq .op

    Exit code: 0 done or stopped, 1 a batch is damaged, 2 usage or settings, 3 no home.
    """
    store = _store(source)
    if table is not None:
        _require_table(store.source, table)
    news = store.news(None, 0)
    batches = store.manifests()
    seen = {batch.batch_id for batch in batches}
    printer = _Printer(store)
    removed = Removed.in_lake(existing_home(open_settings()).lake, store.source)
    present = list(filter(Present(store, removed).has_all, batches))
    for batch, event in last_events(store, present, count, operations=OPERATIONS, table=table):
        printer.print(batch, event)
    if not follow:
        return
    with stop_on_signal() as stop:
        while not stop.wait(_LOOK_SECONDS):
            if (now := store.news(news.era, news.number)).anew:
                # The index was made again: the new batches are those not seen before.
                new = [each for each in store.batch_ids() if each not in seen]
            else:
                new = [batch_id for batch_id, _ in now.batches]
            news = now
            if new := [each for each in new if each not in seen]:
                # Somebody may have been erased since.
                printer.protect_anew()
            for batch_id in new:
                seen.add(batch_id)
                batch = store.read(batch_id)
                for event in events_of(store, batch, table):
                    if event.op in OPERATIONS:
                        printer.print(batch, event)


def _store(source: str | None) -> LandingStore:
    """Return the landing of ``source``. Raises ``IngestError`` if nothing has landed from it. Makes no
    folders."""
    settings = open_settings()
    home = existing_home(settings)
    root, name = home.landing, source or settings.source
    if not has_landed(home.path, name):
        landed = landed_sources(home.path)
        raise IngestError(
            f"Nothing has landed from {name} in {root}; there is: {', '.join(landed) or 'nothing'}.",
            fix=_landed_or_defined(settings, landed),
        )
    return LandingStore(root, name)


def _landed_or_defined(settings: Settings, landed: Sequence[str]) -> str:
    """Return the fix for a source of which nothing has landed. ``landed``: those that have."""
    if landed:
        return f"Name one of them: --source {' or '.join(landed)}. Or start what reads: omnisupport-ingest up"
    defined = ", ".join(each.name for each in load_sources(sources_folder(settings)))
    return f"Start what reads: omnisupport-ingest up.{f' Defined are: {defined}.' if defined else ''}"


def _require_table(source: str, name: str) -> None:
    """Raise a usage error for a ``name`` (`orders` or `sales.orders`) that no contract of the source has."""
    contracts = open_workspace().contracts.of_source(source)
    known = {name for each in contracts for name in (each.table, each.full_name)}
    if name not in known:
        tables = ", ".join(sorted(each.full_name for each in contracts)) or "none"
        raise click.UsageError(f"No contract of {source} is of the table {name}. Tables: {tables}.")


def _stores() -> Iterator[LandingStore]:
    home = existing_home(open_settings())
    for name in landed_sources(home.path):
        yield LandingStore(home.landing, name)


def _show_finding(finding: Finding) -> None:
    for each in finding.damage:
        click.echo(f"{each.kind}: {each.problem}\n  Fix: {each.fix}")
    if not finding.batches:
        click.echo(f"{finding.source}: nothing has landed.")
        return
    parts = [counted(finding.batches, "batch"), counted(finding.files, "file"), size(finding.bytes)]
    if finding.removed:
        parts.append(f"{counted(finding.removed, 'file')} removed by retention")
    verdict = f"{len(finding.damage)} damaged" if finding.damage else "all as they landed"
    click.echo(f"{finding.source}: {', '.join(parts)}; {verdict}.")


class _Printer:
    """Prints events of one source. What all events of a batch share is looked up once per batch."""

    def __init__(self, store: LandingStore) -> None:
        self._store = store
        self._origins: dict[str, Origin] = {}
        self.protect_anew()

    def protect_anew(self) -> None:
        """Read again which values are not shown: the contracts, and who is erased."""
        self._protection = LandedProtection.open(open_settings(), self._store.source)

    def print(self, batch: Manifest, event: LandedEvent) -> None:
        origin = self._origins.get(batch.batch_id)
        if origin is None:
            # Batches come one after the other, so only that of the last one is kept.
            self._origins = {batch.batch_id: (origin := self._origin_of(batch))}
        click.echo(compact(envelope(self._protection.of(event), origin)))

    def _origin_of(self, batch: Manifest) -> Origin:
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


def _kind(batch: Manifest) -> str:
    """Return the kind of a batch, in one or two words; a stretch of the log without events is idle."""
    return "idle" if batch.kind == "stream" and not batch.rows else batch.kind


def _summary(batch: Manifest) -> dict[str, Any]:
    """Return an entry of the list for ``--json``."""
    return {
        "batch_id": batch.batch_id,
        # The JSON name of the kind is older than the present word.
        "kind": "boundary" if batch.chunk is not None and batch.chunk.boundary else _kind(batch),
        "epoch": batch.epoch,
        "events": batch.rows,
        "bytes": sum(file.bytes for file in batch.files),
        "windows": list(batch.windows),
        "landed_at": batch.arrival.landed_at.isoformat(),
        "end_lsn": str(batch.stream.end_lsn) if batch.stream else None,
    }


def _facts(batch: Manifest) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: everything that the manifest says."""
    yield "of source", f"{batch.source}, epoch {batch.epoch}"
    yield "landed", f"{clock(batch.arrival.landed_at)}, written by {batch.written_by or 'unknown'}"
    yield from _span(batch)
    before, after = batch.arrival.watermark_before, batch.arrival.watermark
    yield "watermark", f"{clock(before)} before, {clock(after)} after"
    per_table: Counter[str] = Counter()
    for file in batch.files:
        per_table.update(file.rows_per_table)
    for name, rows in sorted(per_table.items()):
        yield "events", f"{rows:,} of {name}"
    for file in batch.files:
        order = "positions rise" if file.ordered else "positions not in order"
        about = (
            file.path,
            f"window {file.window}: {counted(file.rows, 'event')}, {file.bytes:,} bytes, {order}",
            f"{file.first} to {file.last}",
            f"SHA-256 {file.sha256}",
        )
        yield "file", "\n".join(about)
    if not batch.files:
        yield "files", "none"
    for relation in batch.relations:
        key = ", ".join(relation.key_columns) or "none"
        columns = counted(len(relation.columns), "column")
        yield "table", f"{relation.schema}.{relation.table}: {columns}, key {key}"


def _description(batch: Manifest) -> str:
    if batch.chunk is not None:
        scope = "" if batch.chunk.scope is None else f", keys {batch.chunk.scope}"
        snapshot = f"the snapshot of {batch.chunk.table}{scope}"
        return f"the end of {snapshot}" if batch.chunk.boundary else f"{batch.rows:,} rows of {snapshot}"
    if batch.file is not None:
        kind = "a delivery of files" if batch.file.offsets is None else "records of Kafka topics"
        return f"{kind}, {counted(batch.rows, 'event')}"
    return (
        f"a span of the stream, {counted(batch.rows, 'event')}"
        if batch.rows
        else "an idle span of the stream"
    )


def _span(batch: Manifest) -> Iterator[tuple[str, str]]:
    if batch.stream is not None:
        span = batch.stream
        yield "continues", f"{span.previous_end_lsn}, ends at {span.end_lsn}"
        if span.last_commit_lsn is not None:
            yield "commits", f"{clock(span.first_commit_ts)} to {clock(span.last_commit_ts)}"
            yield "last commit", f"at {span.last_commit_lsn}, transaction {span.last_xid}"
    elif batch.chunk is not None:
        chunk = batch.chunk
        yield "snapshot", f"{chunk.snapshot_id}, chunk {chunk.chunk}, attempt {chunk.attempt}"
        yield "position", f"{chunk.low} to {chunk.high}, clock of the server {clock(chunk.clock)}"
    elif batch.file is not None and batch.file.offsets is not None:
        for each in batch.file.offsets:
            if each.next > each.start:
                where = f"{each.topic}[{each.partition}] {each.start} to {each.next - 1}"
                yield "offsets", f"{where}, {counted(each.records, 'record')}"
            if each.gone:
                yield "gap", f"{each.gone:,} of them were deleted before: {each.accepted}"
    elif batch.file is not None:
        yield "delivery", f"{batch.file.name}, described by {batch.file.manifest}"
        yield "content", f"SHA-256 {batch.file.sha256}"
