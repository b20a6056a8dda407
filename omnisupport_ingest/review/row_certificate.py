"""Erases a row that has ended, and certifies what is gone and what remains.

The erasure is recorded (``erasing``), and sealed windows are rewritten (``sealed_windows``). The platform
judges the other windows of the row again, and the job of the history runs. Then the same command is given
again: it deletes the former versions of the tables at once and says so in its certificate. Landing and raw
keep the values until retention removes them, because they are the record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.cdc.erasing import key_hash
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.former_rows import FormerKeys
from omnisupport_ingest.read.holdings import Holding
from omnisupport_ingest.read.row_cells import (
    ErasedRow,
    cells_of_row,
    cells_of_row_left_over,
    images_of_row,
    withheld_of_no_row,
)
from omnisupport_ingest.review.certificate import (
    COMPLETE,
    FORMAT_VERSION,
    INCOMPLETE,
    PENDING,
    Earlier,
    ErasureRequest,
    Remains,
    certificate_path,
    read_earlier,
    sweep_former,
    what_became,
    windows_waiting,
    withdrawn_personal,
    write_certificate,
)
from omnisupport_ingest.review.erasing import Erased, erase, look_up
from omnisupport_ingest.review.sealed_windows import erase_in_sealed_windows


@dataclass(frozen=True, slots=True)
class RowCertificate:
    """The content of the certificate ``path``.

    ``cells``: cells above raw that can still be read, including those in files of no version. ``swept``: how
    many files were swept now. ``remains``: what is left, where and why.
    """

    path: Path
    state: str
    cells: int
    swept: int
    remains: tuple[dict[str, Any], ...]

    @property
    def pending(self) -> bool:
        """Whether the same command has to be given again."""
        return self.state == PENDING


def erase_row(
    workspace: Workspace, contract: TableContract, key: str, *, erased_by: str, why: str
) -> tuple[Erased, RowCertificate]:
    """Erase the row that ended under ``key`` and write its certificate; errors and parameters as in
    ``erase``."""
    row = ErasedRow.of(contract, look_up(workspace, contract, key).spans)
    path = certificate_path(workspace, contract, _identity(row))
    # Read the contracts before anything is erased, because a file that is no contract raises an error.
    withdrawn = withdrawn_personal(workspace, contract.source)
    earlier = read_earlier(path)
    before = tuple(cells_of_row(workspace, row)) if earlier is None else earlier.before
    erased = erase(workspace, contract, key, erased_by=erased_by, why=why)
    erase_in_sealed_windows(workspace, contract.source)
    asked = ErasureRequest(erased_by.strip(), why.strip(), datetime.now(UTC))
    # An erasure of the row's subject may have recorded its former keys before.
    if own := [each for each in erased.before if contract.has_key_at(each.span.through)]:
        # The command was killed between the ledger and the certificate: the first who asked counts.
        first = min(own, key=lambda each: each.sequence)
        asked = ErasureRequest(first.erased_by, first.why, first.erased_at)
    earlier = earlier or Earlier(asked, before, ())
    return erased, _certify(workspace, row, erased, withdrawn, path, earlier)


def _unlinked(workspace: Workspace, contract: TableContract) -> list[Holding]:
    files = EventFiles.newest(workspace, contract.source) if contract.key_eras else None
    return FormerKeys(workspace, files, contract).unlinked() if files is not None else []


def _identity(row: ErasedRow) -> bytes:
    """Return what distinguishes the row from all others: its keys, and where each of them ended.

    Keys from before the table got another key do not count: what links them to the row may be gone by the
    next command.
    """
    ends = {
        key: [span.through for span in spans if row.contract.has_key_at(span.through)]
        for key, spans in sorted(row.spans.items())
    }
    spans = [[key_hash(key), of_key] for key, of_key in ends.items() if of_key]
    return json.dumps([row.contract.full_name, spans]).encode()


def _certify(
    workspace: Workspace,
    row: ErasedRow,
    erased: Erased,
    withdrawn: list[TableContract],
    path: Path,
    earlier: Earlier,
) -> RowCertificate:
    contract = row.contract
    recorded = {window for each in (*erased.before, *erased.recorded) for window in each.windows}
    waiting = windows_waiting(workspace, contract.source, {*erased.windows, *recorded})
    cells = cells_of_row(workspace, row)
    swept, left_over = list[str](), list[Holding]()
    if not (cells or waiting):
        swept = sweep_former(workspace, contract.source, [contract])
        left_over = cells_of_row_left_over(workspace, row)
    images = images_of_row(workspace, row, erased.windows)
    remains = Remains()
    remains.add(
        "images in landing and raw",
        [each.path for each in images],
        "they are the record that all else is made from: files, checksums and the chain stay as they are, "
        "until retention of landing and raw deletes them",
    )
    remains.add(
        "cells that can be read",
        [each.path for each in cells],
        "their windows are not judged again yet, or the job of the history has not run: give the command "
        "again afterwards",
    )
    remains.add(
        "files that no table names",
        [each.path for each in left_over],
        "a run is writing them, or wrote them and died: give the command again when no run is under way; "
        "what a dead one left goes when it is a day old",
    )
    remains.add(
        "windows that wait to be judged",
        waiting,
        "what a run under way has read may be written still; give the command again when nothing is pending",
    )
    remains.add(
        "events in quarantine whose key could not be read",
        [each.path for each in withheld_of_no_row(workspace, contract)],
        "nobody can say which row they are of, so they may have its values, as landing and raw have them; "
        "retention of landing, raw and quarantine deletes them",
    )
    remains.add(
        "events with a former key that no event links to a present one",
        [each.path for each in _unlinked(workspace, contract)],
        "the table had another key then, and no event with both keys says whose they are, so they may have "
        "its values; nothing of them is in net changes, dimension and history. Retention deletes them",
    )
    others = [column for column in contract.source_columns if column.name not in contract.key]
    remains.add_outside(workspace, contract.source, [(contract, others)])
    remains.add_withdrawn(workspace, withdrawn)
    remains.add("backups", ["wherever they are"], "they have what the home had when they were made")
    in_versions = remains.add_of_storage(workspace, contract.source)
    state = COMPLETE
    if cells or waiting or left_over:
        state = PENDING
    elif images or in_versions:
        state = INCOMPLETE
    document = {
        "format_version": FORMAT_VERSION,
        "state": state,
        "source": contract.source,
        "table": contract.full_name,
        "keys_sha256": sorted(map(key_hash, row.spans)),
        "asked": earlier.asked,
        "before": earlier.before,
        "looked_at": datetime.now(UTC),
        "events": erased.events,
        "windows": erased.windows,
        "record": tuple(images),
        "after": what_became(workspace, earlier.before, [*cells, *left_over]),
        "swept": tuple(sorted({*earlier.swept, *swept})),
        "remains": tuple(remains.entries),
    }
    write_certificate(path, document)
    readable = sum(each.count for each in (*cells, *left_over))
    return RowCertificate(path, state, readable, len(swept), tuple(remains.entries))
