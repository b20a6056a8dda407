"""Deliveries in the mode ``cdc``: their files hold Debezium events, and land as ``debezium.land`` lands them.

The manifest adds what a file of events does not say: its hash, its number of lines, its licence, and what to
do if these are wrong. Each file is a batch. The gate ``schema`` decides about lines that cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from omnisupport_ingest.foreign import printable
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.sources.debezium.faults import FileChanged, FileRefused
from omnisupport_ingest.sources.debezium.handling import QUARANTINE as ODD_WAIT
from omnisupport_ingest.sources.debezium.handling import REFUSE as ODD_REFUSED
from omnisupport_ingest.sources.debezium.land import Inlet, LookThrough
from omnisupport_ingest.sources.debezium.land import land as land_file
from omnisupport_ingest.sources.debezium.lines import Lines
from omnisupport_ingest.sources.manifests.examine import (
    Examined,
    ExaminedFile,
    Fault,
    SeedRefused,
    check_file,
    check_license,
    note_missing,
)
from omnisupport_ingest.sources.manifests.formats import FileUnreadable, digests
from omnisupport_ingest.sources.manifests.land import Delivery
from omnisupport_ingest.sources.manifests.landed_before import note_landed
from omnisupport_ingest.sources.manifests.policies import QUARANTINE, REJECT
from omnisupport_ingest.sources.manifests.seed_manifest import SeedFile, SeedManifest


def examine_events(seed: SeedManifest, inlet: Inlet, licenses: Collection[str] = ()) -> Examined:
    """Examine the events of ``seed``. ``licenses``: those that its source accepts; empty: any licence."""
    examined, looking = Examined(), LookThrough(_gated(seed, inlet))
    check_license(seed, licenses, examined)
    for file in seed.files:
        _examine_file(seed, file, looking, examined)
    names = dict.fromkeys(file_batch_id(each.content) for each in examined.files)
    examined.batches = len(names)
    store = inlet.store
    note_landed(seed, [store.read(each) for each in names if store.exists(each)], store, examined)
    return examined


def land_events(seed: SeedManifest, inlet: Inlet, licenses: Collection[str] = ()) -> Delivery:
    """Land the files of ``seed``.

    Raises ``SeedRefused`` for a fault that a gate rejects; then nothing has landed. Also raises it for a file
    that has changed since it was examined; then the files before it have landed.
    """
    examined = examine_events(seed, inlet, licenses)
    examined.refuse_rejected()
    if not examined.files:
        raise SeedRefused(f"No file of {seed.path} is there.", fix="Deliver at least one, or none of it.")
    inlet, batches, before = _gated(seed, inlet), {}, set()
    for each in examined.files:
        try:
            landing = land_file(each.file.path, inlet, examined=each.content)
        except FileChanged as changed:
            raise SeedRefused(changed.problem, fix="Deliver it when its writer has finished.") from None
        name = landing.manifest.batch_id
        if landing.already_landed and name not in batches:
            before.add(name)
        batches[name] = landing.manifest
    return Delivery(tuple(batches.values()), frozenset(before), examined)


def _gated(seed: SeedManifest, inlet: Inlet) -> Inlet:
    """Return ``inlet`` for the files of ``seed``, with the policy for odd lines that its gates have."""
    odd = ODD_WAIT if seed.gates.schema == QUARANTINE else ODD_REFUSED
    return replace(inlet, handling=replace(inlet.handling, odd_lines=odd), delivery=seed.reference)


def _examine_file(seed: SeedManifest, file: SeedFile, looking: LookThrough, examined: Examined) -> None:
    path = printable(file.path)
    try:
        known = digests(file.path)
    except FileUnreadable as why:
        note_missing(seed, file, why, examined)
        return
    try:
        rows = sum(1 for _ in Lines(file.path))
        check_file(seed, file, known.file, rows, examined)
        examined.files.append(ExaminedFile(file, known.content, rows))
        tally = looking.read(file.path, known.content)
    except FileRefused as refused:
        examined.note(Fault("schema", REJECT, path, None, refused.problem.rstrip("."), refused.fix))
        return
    if tally is not None and tally.odd:
        number, fault = tally.first_odd
        examined.kept_out += tally.odd
        problem = f"{tally.odd} lines cannot be read, of which this is the first: {fault.problem}"
        examined.note(Fault("schema", seed.gates.schema, path, number, problem, fault.fix))
