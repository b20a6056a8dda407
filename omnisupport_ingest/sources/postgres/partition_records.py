"""What a home remembers of the partitions of each table that it has read: a note for each, replaced whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.partitions import Partition, Partitions


@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """``certain``: an LSN; whatever was done to partitions and committed below it is in ``partitions``."""

    partitions: Partitions
    certain: Lsn


class PartitionRecords:
    """The notes of one epoch of one source, in its landing folder."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._folder, self._epoch = folder, epoch

    def read(self, table: str) -> KnownPartitions | None:
        """Those of ``table`` (a contract's name) that the lake knows the rows of; null if there is no note of
        this epoch, or none that can be read."""
        try:
            content = json.loads(self._file(table).read_text())
            if content["epoch"] != self._epoch:
                return None
            found = {oid: Partition(**each) for oid, each in content["partitions"].items()}
            return KnownPartitions(found, Lsn.parse(content.get("certain", "0/0")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, table: str, known: KnownPartitions) -> None:
        """Durable when this returns. Only once what tells them from the older note is in landing, or asked
        for."""
        found = {oid: asdict(each) for oid, each in known.partitions.items()}
        content = {
            "table": table,
            "epoch": self._epoch,
            "partitions": found,
            "certain": str(known.certain),
        }
        with gate("source.partitions", table):
            replace(self._file(table), json.dumps(content, indent=1).encode() + b"\n")

    def _file(self, table: str) -> Path:
        return self._folder / f"partitions-{table}.json"
