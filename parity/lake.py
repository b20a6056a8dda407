"""All ways into the lake: our capture, and Debezium's records as files and from Kafka. Each must end at the
source's state.

Every row and column is compared, by the code of ``verify``. What Debezium's records have lost cannot come
back, so for them the source's rows are first told as ``docs/debezium.md`` says that the losses land. The
dimensions of files and topics must have the same content hash, deleted rows and positions included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.compare import Comparison, compare
from omnisupport_ingest.runtime.spark_connect import start_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import write_rows_at
from parity.captured import Captured
from parity.losses import as_it_lands
from parity.modes import Modes
from parity.ours import Ours
from parity.server import Server
from parity.shapes import Shape
from parity.topics import write_definition

_PARTS = 3
_PASS_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came of one way. ``lost``: cells of the source's rows that are compared as they are lost.

    ``unlike``: tables whose dimension has another content hash than the one it must be equal to.
    ``notes``: what else was seen.
    """

    way: str
    tables: dict[str, Comparison]
    lost: int = 0
    unlike: tuple[str, ...] = ()
    notes: str = ""

    @property
    def holds(self) -> bool:
        return all(each.holds for each in self.tables.values()) and not self.unlike


@contextmanager
def spark(server: Server) -> Iterator[str]:
    """The address of a Spark server for the commands of all homes, of which each would start its own."""
    settings = Settings(_env_file=None, home=server.folder / "spark", spark_driver_memory="1g")
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home) as supervisor:
        yield start_spark_connect(supervisor, settings, home).url


def by_capture(server: Server, home: Ours) -> Arrived:
    """Take what our capture has landed through every layer, and compare it with the source."""
    home.run("sync", "--verify", "none", seconds=_PASS_SECONDS)
    return _compared(server, home, "our capture", None)


def by_files(server: Server, captured: Captured, shapes: dict[str, Shape], modes: Modes) -> Arrived:
    """Land Debezium's records as files, take them through every layer, and compare them with the source."""
    home, parts = captured.files, _parts(captured.events, server.folder / "parts")
    home.run("land", *map(str, parts), "--source", home.source, *modes.land, seconds=_PASS_SECONDS)
    home.run("materialize", seconds=_PASS_SECONDS)
    return _compared(server, home, "Debezium's files", shapes)


def by_topics(
    server: Server, captured: Captured, shapes: dict[str, Shape], modes: Modes, broker: str
) -> Arrived:
    """Read Debezium's records from the topics of ``broker``, take them through every layer, and compare them
    with the source and with the lake of the files, which is made before."""
    home = captured.topics
    write_definition(home.contracts.parent / "sources" / f"{home.source}.json", home.source, broker, modes)
    home.run("sync", home.source, seconds=_PASS_SECONDS)
    home.run("materialize", seconds=_PASS_SECONDS)
    arrived = _compared(server, home, "Debezium's topics", shapes)
    of_files, of_topics = _hashes(captured.files), _hashes(home)
    unlike = tuple(name for name in of_topics if of_topics[name] != of_files[name])
    store = LandingStore(home.home / "landing", home.source)
    files = [each.file for each in store.manifests() if each.file is not None]
    spans = [span for file in files for span in file.offsets or () if span.records]
    read = {(each.topic, each.partition) for each in spans}
    notes = (
        f"{sum(each.records for each in spans)} records of {len({topic for topic, _ in read})} topics, "
        f"{len(read)} partitions, in {len(files)} batches"
    )
    return replace(arrived, unlike=unlike, notes=notes)


def _hashes(home: Ours) -> dict[str, str]:
    """The content hash of every dimension of ``home``, by the name of its contract."""
    workspace = Workspace.open(home.settings)
    found = {}
    for contract in workspace.contracts.of_source(home.source):
        files = [file.stored for file in workspace.dimension(contract).open().all_files()]
        found[contract.name] = str(hash_of_files(files, "_cdc_row_hash"))
    return found


def _parts(events: Path, folder: Path) -> list[Path]:
    """The records as several files, the last one first: they may come in any order."""
    lines = events.read_text(encoding="utf-8").splitlines(keepends=True)
    folder.mkdir()
    size = len(lines) // _PARTS + 1
    found = []
    for number in range(_PARTS):
        path = folder / f"part-{number}.jsonl"
        path.write_text("".join(lines[number * size : (number + 1) * size]), encoding="utf-8")
        found.append(path)
    return found[::-1]


def _compared(server: Server, home: Ours, way: str, shapes: dict[str, Shape] | None) -> Arrived:
    workspace = Workspace.open(home.settings)
    tables, lost = {}, 0
    with consistent_snapshot(server.dsn) as (_, snapshot):
        for contract in workspace.contracts.of_source(home.source):
            path = server.folder / f"{home.source}.{contract.name}.parquet"
            write_rows_at(server.dsn, home.settings.publication, snapshot, contract, path)
            if shapes is not None:
                lost += _lose(path, contract, shapes[contract.table])
            files = workspace.dimension(contract).open().all_files()
            tables[contract.full_name] = compare(contract, path, files)
    return Arrived(way, tables, lost)


def _lose(path: Path, contract: TableContract, shape: Shape) -> int:
    """Write the source's rows in ``path`` as Debezium's losses leave them; how many cells that changed."""
    table = pq.read_table(path)
    lost = 0
    for column in contract.columns:
        texts = table.column(column.name).to_pylist()
        left = [as_it_lands(text, column.name, shape) for text in texts]
        lost += sum(before != after for before, after in zip(texts, left, strict=True))
        place = table.column_names.index(column.name)
        table = table.set_column(place, column.name, pa.array(left, pa.string()))
    pq.write_table(table, path)
    return lost


def told(arrived: Arrived) -> str:
    """The outcome in words."""
    rows = sum(each.source_rows for each in arrived.tables.values())
    lines = [
        f"By {arrived.way}: {len(arrived.tables)} tables, {rows} rows of the source, {arrived.lost} lost "
        f"cells, {'nothing else differs' if arrived.holds else 'DIFFERENT'}"
        f"{f' ({arrived.notes})' if arrived.notes else ''}"
    ]
    lines += [f"  {name}: another content hash than by files" for name in arrived.unlike]
    for name, each in arrived.tables.items():
        if not each.holds:
            lines.append(f"  {name}: {each.differences} keys differ, {each.unresolved} unresolved")
            lines += [f"    {key.key}: {', '.join(key.columns)}" for key in each.examples]
    return "\n".join(lines)
