"""What of a delivery has landed before: the batches it becomes, their names, and which of them exist.

A batch is named by its content, so a delivery that is repeated, or was interrupted, is recognised. Content
that has landed with another delivery is a duplicate; a gate of the manifest decides about it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from omnisupport_ingest.json_values import compact
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.examine import Examined, ExaminedFile, Fault
from omnisupport_ingest.sources.manifests.policies import CDC, FULL_SNAPSHOT, INCREMENTAL
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest

_REFERENCE = re.compile(r"(?P<name>.*) \(SHA-256 [0-9a-f]{64}(?:, (?P<files>[0-9]+) files)?\)", re.DOTALL)
"""Matches ``SeedManifest.reference``; one of an earlier version has no number of files."""


def note_landed(
    seed: SeedManifest, before: Collection[Manifest], store: LandingStore, examined: Examined
) -> None:
    """Note which content of a delivery another delivery had landed ``before``. Needs ``examined.batches``.

    If this delivery was interrupted, what it landed itself is no duplicate: the rest is still to land.
    """
    whole = len(before) == examined.batches
    for each in before:
        if whole or each.file is None or not _began_here(seed, each.file.manifest, store):
            note_duplicate(seed, each.batch_id, examined)


def _began_here(seed: SeedManifest, reference: str, store: LandingStore) -> bool:
    """Whether the delivery that a batch records as ``reference`` may be ``seed`` before an interruption.

    A file that had to be corrected since gave the manifest another hash. But a manifest of the same name of
    which every file has landed was another delivery.
    """
    # Earlier versions recorded the name of the manifest alone, and nothing for events.
    if reference in (seed.reference, seed.path.name) or (not reference and seed.load_mode == CDC):
        return True
    of = _REFERENCE.fullmatch(reference)
    if of is None or of["name"] != seed.path.name:
        return False
    landed = sum(each.file is not None and each.file.manifest == reference for each in store.manifests())
    return of["files"] is None or landed < int(of["files"])


def note_duplicate(seed: SeedManifest, batch_id: str, examined: Examined) -> None:
    """Note that content of ``seed`` has landed before, as the batch ``batch_id``."""
    examined.note(
        Fault(
            "duplicate_delivery",
            seed.gates.duplicate_delivery,
            str(seed.path),
            None,
            f"its content has landed before, as {batch_id}, and does not land twice",
            "Nothing is to be done. To have a snapshot count again, give it the as_of that it is of.",
        )
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The files that become one batch; none if the batch only says up to when the source is complete.

    ``identity``: the content name of the batch. ``others``: its alternative names: one with the table, for
    content that has landed for another table (all empty files are the same), and the names of earlier
    versions.
    """

    files: tuple[ExaminedFile, ...]
    identity: str
    others: tuple[str, ...] = ()

    def landed(self, seed: SeedManifest, store: LandingStore) -> Manifest | None:
        """Return the landed batch, or None."""
        table = (seed.contract.schema, seed.contract.table)
        for name in (self.identity, *self.others):
            if store.exists(file_batch_id(name)):
                manifest = store.read(file_batch_id(name))
                if all((each.schema, each.table) == table for each in manifest.relations):
                    return manifest
        return None

    def free_name(self, store: LandingStore) -> str:
        """Return the first name of the batch that no landed batch has."""
        names = (self.identity, *self.others)
        return next(each for each in names if not store.exists(file_batch_id(each)))


@dataclass(frozen=True)
class LandedBefore:
    """A delivery compared with what has landed. ``before``: the batches that exist, by content name.
    ``complete``: up to when a source of rows with a cursor is complete with the delivery; None if unknown."""

    seed: SeedManifest
    parts: tuple[Part, ...]
    before: dict[str, Manifest]
    complete: datetime | None

    @classmethod
    def of(cls, seed: SeedManifest, store: LandingStore, examined: Examined, *, alone: bool) -> Self:
        """Compare ``seed`` with ``store``. ``alone``: the source has one table, so a delivery says up to when
        all of it is complete."""
        parts = _parts(seed, examined)
        complete = None
        changes = seed.load_mode == INCREMENTAL and len(examined.files) == len(seed.files)
        whole = seed.load_mode == FULL_SNAPSHOT and examined.whole
        if alone and seed.contract.cursor is not None and (changes or whole):
            complete = seed.as_of
        landed = {each.identity: each.landed(seed, store) for each in parts}
        if changes and complete is not None and all(landed.values()) and not _reaches(store, complete):
            # The same content with a later ``as_of`` says that no row is new until then.
            completion = Part((), sha256_of(compact(["complete", complete.isoformat(), *landed])))
            parts, landed = (
                (*parts, completion),
                landed | {completion.identity: completion.landed(seed, store)},
            )
        before = {identity: each for identity, each in landed.items() if each is not None}
        return cls(seed, parts, before, complete)

    def note_duplicates(self, store: LandingStore, examined: Examined) -> None:
        """Note in ``examined`` what of the delivery has landed before."""
        examined.batches = len(self.parts)
        says_more = any(not each.files and each.identity not in self.before for each in self.parts)
        if not says_more:
            note_landed(self.seed, self.before.values(), store, examined)


def _reaches(store: LandingStore, moment: datetime) -> bool:
    """Whether the watermark is at or above ``moment``."""
    watermark = store.landed().watermark
    return watermark is not None and watermark >= moment


def _parts(seed: SeedManifest, examined: Examined) -> tuple[Part, ...]:
    files = examined.files
    snapshot = seed.load_mode == FULL_SNAPSHOT
    parts: dict[str, Part] = {}
    for unit in [tuple(files)] if snapshot and files else [(file,) for file in files]:
        marks = [each.waiting for each in unit if each.waiting]
        content = [each.content for each in unit]
        if not snapshot:
            identity = sha256_of(compact([*content, *marks, f"rows of {seed.contract.full_name}"]))
            # Files with the same content are one batch.
            parts.setdefault(identity, Part(unit, identity))
            continue
        # Rows that a gate keeps in quarantine now make another batch once they may land.
        marks += [f"as of {seed.as_of.isoformat()}"] if seed.as_of is not None else []
        marks += [] if examined.whole else ["not whole"]
        # The name does not depend on the order of the files.
        identity = _snapshot_name(sorted(content), sorted(marks))
        of_table = sha256_of(compact([identity, f"snapshot of {seed.contract.full_name}"]))
        parts[identity] = Part(unit, identity, (of_table, _snapshot_name(content, marks)))
    return tuple(parts.values())


def _snapshot_name(content: Sequence[str], marks: Sequence[str]) -> str:
    """Return the content name of a snapshot; without marks, the hash of its content alone."""
    of_all = content[0] if len(content) == 1 else sha256_of("".join(content))
    return sha256_of(compact([of_all, *marks])) if marks else of_all


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
