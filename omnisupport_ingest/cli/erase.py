"""``erase``: remove the values of a deleted row from everything that people query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import (
    contracted_source,
    deciding_person,
    key_named,
    open_workspace,
    options_as,
)
from omnisupport_ingest.cli.render import clock, counted, echo_json, some
from omnisupport_ingest.cli.views import platform_runs, stale, who_judges_again
from omnisupport_ingest.contracts.model import TableContract, UnknownTable, table_named, tables_named
from omnisupport_ingest.contracts.withdrawn import readable_withdrawn
from omnisupport_ingest.review.certificate import PENDING, WITHDRAWN
from omnisupport_ingest.review.erasing import Erased, ErasureRefused, key_text, look_up
from omnisupport_ingest.review.row_certificate import RowCertificate, erase_row
from omnisupport_ingest.review.subject_erasure import SubjectErased, look_up_subject

if TYPE_CHECKING:
    from omnisupport_ingest.layers.erasures import Erasure
    from omnisupport_ingest.layers.workspace import Workspace

_NOT_TOUCHED = ("landing", "raw_cdc_staging")
"""The layers from which everything else is made; they keep the values."""


@dataclass(frozen=True, slots=True)
class EraseOptions:
    """Who decides, and why; whether to show only what would happen; and how to print it."""

    by: str | None
    why: str | None
    dry_run: bool
    as_json: bool


@click.command()
@click.argument("table")
@click.argument("key", nargs=-1, required=True)
@click.option("--source", metavar="NAME", help="The source of the table.  [default: OMNISUPPORT_SOURCE]")
@click.option(
    "--reason", "why", metavar="TEXT", help="Why; the ledger records it. Required unless --dry-run."
)
@click.option("--by", metavar="NAME", help="Who decides.  [default: this user's name]")
@click.option("--subject", is_flag=True, help="Erase whom the row is of, in all tables of the source.")
@click.option("--dry-run", is_flag=True, help="Show what would be erased, and record nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options_as("options", EraseOptions)
def erase(
    table: str, key: tuple[str, ...], source: str | None, *, subject: bool, options: EraseOptions
) -> None:
    """Erase the values of one row of TABLE that was deleted at its source, for example a person's.

    KEY is the row's key as PostgreSQL prints it: its value, or COLUMN=VALUE for each column of the key. The
    former keys of the row are erased with it. A row that still exists is refused: delete it at the source
    first. A later row with the same key keeps its values.

    A ledger records who, when and why, and the SHA-256 of the key. Then the windows with events of the row
    are judged again, which removes its values from accepted and quarantined events, net changes, dimension
    and history. The key stays. Give the same command again when that is done and the history has run: it
    deletes former versions of the tables at once, and completes the certificate, a JSON file that lists what
    is gone and what remains.

    Landing and raw_cdc_staging keep the values: everything else is made from them.

    With --subject, where the contract names a subject (x-cdc.at_rest): whom the row is of loses its personal
    values in every table of the source that shares the subject; the row may live. What the source sends of
    it later loses them too. Where values land encrypted, the subject's key is destroyed, so nobody can read
    them any more in landing, raw, or a backup of them; where they land plain, landing and raw keep them until
    retention removes them. It cannot be taken back, and is completed by the same command too.

    \b
    Examples:
      omnisupport-ingest erase customers 42 --dry-run
      omnisupport-ingest erase customers 42 --reason "request of May 3"
      omnisupport-ingest erase order_lines order_id=7 line=1 --reason "ticket 4711" --by ana --json
      omnisupport-ingest erase customers 42 --subject --reason "request of May 3"

    Exit code: 0 recorded, or erased before; 1 refused, 2 usage or settings, 3 no home or its
    erasure ledger is damaged.
    """
    if options.why is None and not options.dry_run:
        raise click.UsageError("Give the reason with --reason, or add --dry-run.")
    workspace = open_workspace()
    of_source = contracted_source(workspace, source or workspace.settings.source)
    try:
        contract = table_named(table, workspace.contracts.of_source(of_source))
    except UnknownTable:
        _refuse_withdrawn(workspace, of_source, table)
        raise
    text = key_text(key_named(contract, key))
    if subject:
        erase_subject(workspace, contract, text, options)
        return
    certificate: RowCertificate | None = None
    if options.dry_run:
        erased = look_up(workspace, contract, text)
    else:
        person, why = deciding_person(options.by), options.why or ""
        erased, certificate = erase_row(workspace, contract, text, erased_by=person, why=why)
    runs = platform_runs(workspace.home)
    if options.as_json:
        echo_json(_document(contract, erased, runs=runs, certificate=certificate))
    elif certificate is None:
        click.echo(
            _before(erased) + f"To be erased: {_row(contract, erased)}. Nothing was recorded (--dry-run)."
        )
    else:
        for line in _recorded_lines(contract, erased, runs=runs, history=workspace.history(contract).exists):
            click.echo(line)
        for line in _certificate_lines(contract, certificate):
            click.echo(line)


def _refuse_withdrawn(workspace: Workspace, source: str, table: str) -> None:
    """Raise ``ErasureRefused`` if ``table`` is the name of a table whose contract was withdrawn."""
    withdrawn = readable_withdrawn(workspace.settings, workspace.contracts)
    for each in tables_named(table, [each for each in withdrawn if each.source == source]):
        raise ErasureRefused(
            f"The contract of {each.full_name} of {source} is withdrawn, so no run would erase from its "
            "tables.",
            fix=f"Delete them: omnisupport-ingest contracts withdraw {each.name} --source {source} "
            f"--drop-data. Or put {each.path} back among the contracts, erase, and withdraw it again.",
        )


def _document(
    contract: TableContract, erased: Erased, *, runs: bool, certificate: RowCertificate | None
) -> dict[str, Any]:
    return {
        "source": contract.source,
        "table": contract.full_name,
        "dry_run": certificate is None,
        "keys": erased.keys,
        "events": erased.events,
        "windows": list(erased.windows),
        "recorded": [_entry(each) for each in erased.recorded],
        "recorded_before": [_entry(each) for each in erased.before],
        "stale_windows": erased.stale_windows,
        "platform_runs": runs,
        "not_touched": list(_NOT_TOUCHED),
        "certificate": None if certificate is None else _certificate_document(certificate),
    }


def _certificate_document(certificate: RowCertificate) -> dict[str, Any]:
    return {
        "file": str(certificate.path),
        "state": certificate.state,
        "cells_readable": certificate.cells,
        "files_swept": certificate.swept,
        "remains": list(certificate.remains),
    }


def _entry(each: Erasure) -> dict[str, Any]:
    return {
        "key_sha256": each.key_hash,
        "by": each.erased_by,
        "why": each.why,
        "at": each.erased_at.isoformat(),
        "windows": list(each.windows),
    }


def _recorded_lines(contract: TableContract, erased: Erased, *, runs: bool, history: bool) -> list[str]:
    if not erased.recorded:
        return [f"{_before(erased)}Nothing new was recorded for {_row(contract, erased)}."]
    lines = [
        f"{_before(erased)}Erasure recorded by {erased.recorded[0].erased_by}: {_row(contract, erased)}."
    ]
    if erased.stale_windows:
        lines.append(f"{stale(erased.stale_windows)} {who_judges_again(runs=runs)}")
    if history:
        lines.append(f"The history follows with the next run of the job history_{contract.source}.")
    return lines


def _certificate_lines(contract: TableContract, certificate: RowCertificate) -> Iterator[str]:
    if certificate.pending:
        cells = f"{counted(certificate.cells, 'cell')} above raw can be read until then"
        yield f"{cells}. Then give this command again: it deletes former versions of the tables."
    else:
        swept = counted(certificate.swept, "file")
        yield f"No cell above raw can be read; {swept} of former versions deleted."
    yield f"Landing and {contract.source}/raw_cdc_staging keep the values: they are the record."
    for each in certificate.remains:
        if not certificate.pending:
            yield f"Remains: {each['what']} ({len(each['where'])}): {each['why']}."
    yield f"Certificate ({certificate.state}): {certificate.path}"


def _before(erased: Erased) -> str:
    if not erased.before:
        return ""
    first = erased.before[0]
    return f"Recorded before by {first.erased_by}, {clock(first.erased_at)}: {first.why}\n"


def _row(contract: TableContract, erased: Erased) -> str:
    keys = f", with {counted(erased.keys - 1, 'former key')}" if erased.keys > 1 else ""
    windows = f" in window{'s' * (len(erased.windows) > 1)} {some(erased.windows)}" if erased.windows else ""
    return f"one row of {contract.full_name}{keys}, {counted(erased.events, 'event')}{windows}"


def erase_subject(workspace: Workspace, contract: TableContract, key: str, options: EraseOptions) -> None:
    """Erase the subject of the row with ``key``, and print the result."""
    from omnisupport_ingest.review.subject_erasure import erase_subject as erase

    if options.dry_run:
        erased = look_up_subject(workspace, contract, key)
    else:
        erased = erase(workspace, contract, key, erased_by=deciding_person(options.by), why=options.why or "")
    runs = platform_runs(workspace.home)
    if options.as_json:
        echo_json(
            {
                "source": contract.source,
                "table": contract.full_name,
                "dry_run": options.dry_run,
                "certificate": str(erased.certificate) if erased.certificate else None,
                "complete": erased.complete,
                "state": erased.state,
                "images_encrypted": erased.images,
                "images_plain": erased.plain_images,
                "cells_readable": erased.cells,
                "windows": list(erased.windows),
                "windows_waiting": list(erased.waiting),
                "sealed_windows": list(erased.sealed),
                "files_swept": erased.swept,
                "remains": list(erased.remains),
                "platform_runs": runs,
            }
        )
        return
    for line in _lines(contract, erased, runs=runs):
        click.echo(line)


def _lines(contract: TableContract, erased: SubjectErased, *, runs: bool) -> Iterator[str]:
    plain = f"{counted(erased.plain_images, 'image')} that landed plain"
    encrypted = f"{counted(erased.images, 'image')} that landed encrypted"
    by_key = contract.encrypted_subject is not None or erased.images
    if erased.certificate is None:
        yield (
            f"To be erased: whom that row of {contract.full_name} is of. It has {encrypted}, {plain}, and "
            f"{counted(erased.cells, 'cell')} above raw can be read."
        )
        yield f"Nothing was {'destroyed' if by_key else 'recorded'} (--dry-run)."
        return
    if by_key:
        yield f"The key is destroyed: nobody can read {encrypted}."
    else:
        yield "The subject is recorded as erased: what lands of it loses its values above raw."
    if erased.plain_images:
        yield f"Landing and {contract.source}/raw_cdc_staging keep {plain}, until retention removes them."
    again = f"the job history_{contract.source}; then give this command again."
    if erased.waiting:
        cells = (
            f"{counted(erased.cells, 'cell')} above raw can be read"
            if erased.cells
            else ("No cell above raw can be read now, but a run may write what it has read")
        )
        yield f"{cells}, until windows are judged again."
        yield f"{stale(list(erased.waiting))} {who_judges_again(runs=runs)}"
        yield f"Then {again}"
    elif erased.cells:
        yield f"{counted(erased.cells, 'cell')} above raw can be read. Let run {again}"
    if erased.sealed:
        yield (
            f"What {some(erased.sealed)} show of it stays readable: retention has sealed "
            f"{counted(len(erased.sealed), 'window')}, and nobody can say there whose a row is."
        )
    if not (erased.waiting or erased.cells):
        others = any(each["what"] == WITHDRAWN for each in erased.remains)
        but = " but in tables of withdrawn contracts, which were not looked at" if others else ""
        yield f"No cell above raw can be read{but}; {counted(erased.swept, 'file')} of former versions swept."
    for each in erased.remains:
        yield f"Remains: {each['what']} ({len(each['where'])}): {each['why']}."
    state = "not complete yet" if erased.state == PENDING else erased.state
    yield f"Certificate ({state}): {erased.certificate}"
