"""Protects rows and events of the source as the lake would, before they are compared or shown.

Only what the lake may show is compared: dropped columns are left out, and masked columns are equal if their
masks are. A hashed column may match by any key in force, because windows that are not rebuilt yet have the
hash of a former key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.protected_images import protect_image
from omnisupport_ingest.cdc.protecting import WITHOUT_VALUES, Protections
from omnisupport_ingest.cdc.subject_values import ErasedSubjects, emptied
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pii_policies import DROP, HASH
from omnisupport_ingest.contracts.protection import Protection, Secrets, hashing, needs_protection
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.layers.erasures import erased_subjects
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings

HASHES_PREFIX = "hashes:"
"""Prefix of the column with a hashed column's hashes by all keys in force, separated by spaces."""


def protect_rows(contract: TableContract, path: Path, secrets: Secrets) -> None:
    """Protect the file ``path`` of the source's rows (``write_text_rows``) in place, readable by its owner
    only."""
    if not needs_protection(contract):
        return
    protection, draft = Protection(contract, secrets), path.with_suffix(".protected")
    dropped = [column.name for column in contract.source_columns if column.pii == DROP]
    with pq.ParquetFile(path) as rows:
        names = [name for name in rows.schema_arrow.names if name.removeprefix("json:") not in dropped]
        hashed = [column.name for column in contract.columns if column.pii == HASH]
        every = [*names, *(HASHES_PREFIX + name for name in hashed)]
        # No failpoint: scratch files, which the next command removes if this process is killed.
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with pq.ParquetWriter(draft, pa.schema([(name, pa.string()) for name in every])) as writer:
            for batch in rows.iter_batches(columns=names):
                columns = {name: batch.column(name) for name in names}
                protected = {name: protect(columns[name]) for name, protect in protection.columns.items()}
                hashes = {HASHES_PREFIX + name: _by_all_keys(columns[name], secrets) for name in hashed}
                writer.write_table(pa.table(columns | protected | hashes).select(every))
    draft.replace(path)


def _by_all_keys(texts: pa.StringArray, secrets: Secrets) -> pa.StringArray:
    return pc.binary_join_element_wise(*(hashing(key)(texts) for key in secrets.keys.all), " ")


@dataclass(frozen=True)
class LandedProtection:
    """Protects landed events of one source, one by one, before a person sees them, as ``judging.to_store``
    protects them before they are in the lake: values of erased ``subjects`` are not shown."""

    protections: Protections
    subjects: ErasedSubjects = field(default_factory=ErasedSubjects)

    @classmethod
    def open(cls, settings: Settings, source: str) -> LandedProtection:
        """Open the protection of the contracts in force.

        Raises ``PiiKeyMissing`` if a key for their hashes is missing, and as ``erased_subjects`` does.
        """
        workspace = Workspace.open(settings)
        contracts = workspace.contracts.of_source(source)
        protections = Protections.of(contracts, workspace.secrets(contracts))
        return cls(protections, erased_subjects(workspace, source))

    def of(self, event: LandedEvent) -> LandedEvent:
        """Return the event with protected row images; without them where one table of the source has a policy
        and no contract describes what the event carries."""
        name = event.source_schema, event.source_table
        event = self._without_erased(event)
        if not self.protections or event.op in WITHOUT_VALUES:
            return event
        if name not in self.protections.contracted:
            return event._replace(before=None, after=None)
        protection = self.protections.by_table.get(name)
        if protection is None:
            return event
        return event._replace(
            before=protect_image(event.before, protection), after=protect_image(event.after, protection)
        )

    def _without_erased(self, event: LandedEvent) -> LandedEvent:
        table_name = event.source_schema, event.source_table
        table = self.subjects.tables.get(table_name) if self.subjects else None
        if event.op in WITHOUT_VALUES:
            return event
        if self.subjects and table_name in self.subjects.unnamed:
            return event._replace(before=None, after=None)
        if table is None:
            return event
        images = (event.before, event.after)
        whose = [table.whose((read_image(each) or {}).get(table.column), event.key) for each in images]
        erased = self.subjects.among(whose)
        before, after = (
            emptied(image, table) if gone else image for image, gone in zip(images, erased, strict=True)
        )
        return event._replace(before=before, after=after)
