"""``erase --subject``: destroy the key of a subject, and say what went and what remains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import deciding_person
from omnisupport_ingest.cli.render import counted, echo_json
from omnisupport_ingest.cli.views import platform_runs, stale, who_judges_again
from omnisupport_ingest.storage import require_folders

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.review.subject_erasure import SubjectErased


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command."""

    by: str | None
    why: str | None
    dry_run: bool
    as_json: bool


def erase_subject(workspace: Workspace, contract: TableContract, key: str, asked: Asked) -> None:
    """Erase whom the row with ``key`` is of, and print what came of it."""
    from omnisupport_ingest.review.subject_erasure import erase_subject as erase
    from omnisupport_ingest.review.subject_erasure import look_up_subject

    if asked.dry_run:
        erased = look_up_subject(workspace, contract, key)
    else:
        require_folders(workspace.home.lake, "Erasing a person's keys with a certificate")
        erased = erase(workspace, contract, key, erased_by=deciding_person(asked.by), why=asked.why or "")
    runs = platform_runs(workspace.home)
    if asked.as_json:
        echo_json(
            {
                "source": contract.source,
                "table": contract.full_name,
                "dry_run": asked.dry_run,
                "certificate": str(erased.certificate) if erased.certificate else None,
                "complete": erased.complete,
                "images_encrypted": erased.images,
                "cells_readable": erased.cells,
                "windows": list(erased.windows),
                "files_swept": erased.swept,
                "remains": list(erased.remains),
                "platform_runs": runs,
            }
        )
        return
    for line in _lines(contract, erased, runs=runs):
        click.echo(line)


def _lines(contract: TableContract, erased: SubjectErased, *, runs: bool) -> Iterator[str]:
    reach = f"{counted(erased.images, 'image')} landed encrypted, {counted(erased.cells, 'cell')} above raw"
    if erased.certificate is None:
        yield f"To be destroyed: the key of whom that row of {contract.full_name} is of; {reach} can be read."
        yield "Nothing was destroyed (--dry-run)."
        return
    yield f"The key is destroyed: nobody can read {counted(erased.images, 'image')} that landed encrypted."
    if erased.cells:
        yield f"{counted(erased.cells, 'cell')} above raw can be read until their windows are judged again."
        yield f"{stale(list(erased.windows))} {who_judges_again(runs=runs)}"
        yield f"Then the job history_{contract.source}; then give this command again."
    else:
        yield f"No cell above raw can be read; {counted(erased.swept, 'file')} of former versions swept."
    for each in erased.remains:
        yield f"Remains: {each['what']} ({len(each['where'])}): {each['why']}."
    yield f"Certificate ({'complete' if erased.complete else 'not complete yet'}): {erased.certificate}"
