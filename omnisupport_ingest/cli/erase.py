"""``erase``: take the values of a row that has ended out of everything that people query."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.deciding_person import deciding_person
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stale_windows import listed, platform_runs, stale, who_judges_again

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.stages.erasing import Erased
    from omnisupport_ingest.stages.erasures import Erasure
    from omnisupport_ingest.stages.workspace import Workspace

_NOT_TOUCHED = ("landing", "raw_cdc_staging")
"""What keeps the values: the record that everything else is made from."""


@click.command()
@click.argument("table")
@click.argument("key", nargs=-1, required=True)
@click.option("--source", metavar="NAME", help="Table of this source.  [default: OMNISUPPORT_SOURCE]")
@click.option("--reason", "why", metavar="TEXT", help="Why; the ledger keeps it. Required unless --dry-run.")
@click.option("--by", metavar="NAME", help="Who decides.  [default: this user's name]")
@click.option("--dry-run", is_flag=True, help="Say what would be erased, and record nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def erase(
    table: str,
    key: tuple[str, ...],
    source: str | None,
    why: str | None,
    by: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Erase the values of one row of TABLE that was deleted at its source: a person, say.

    KEY is the row's key, as PostgreSQL prints it: the value, or COLUMN=VALUE for each column of the key.
    Former keys of the row are erased with it. A row that still lives is refused: delete it at the source
    first. What a later row of the same key holds is not touched.

    A ledger records who, when and why, and the SHA-256 of the key. Then the windows with events of the row
    are judged again, and its values leave the accepted and the quarantined events, the net changes, the
    dimension and the history; the key stays. Landing and raw_cdc_staging are the record that all of
    it is made from: they keep the values. So do older versions of the tables, until `sweep` deletes their
    files.

    \b
    Examples:
      omnisupport-ingest erase customers 42 --dry-run
      omnisupport-ingest erase customers 42 --reason "request of May 3"
      omnisupport-ingest erase order_lines order_id=7 line=1 --reason "ticket 4711" --by ana --json

    Exit code: 0 recorded, or erased before; 1 refused, 2 usage or settings, 3 no home or its ledger is
    damaged.
    """
    from omnisupport_ingest.stages.erasing import erase as record
    from omnisupport_ingest.stages.erasing import key_text, look_up
    from omnisupport_ingest.stages.workspace import Workspace

    if why is None and not dry_run:
        raise click.UsageError("Say why with --reason, or add --dry-run.")
    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    contract = _contract(workspace, source or settings.source, table)
    text = key_text(_key(contract, key))
    if dry_run:
        erased = look_up(workspace, contract, text)
    else:
        erased = record(workspace, contract, text, erased_by=deciding_person(by), why=why or "")
    runs = platform_runs(workspace.home)
    if as_json:
        click.echo(json.dumps(_document(contract, erased, runs=runs, dry_run=dry_run), indent=2))
    elif dry_run:
        click.echo(
            _before(erased) + f"To be erased: {_row(contract, erased)}. Nothing was recorded (--dry-run)."
        )
    else:
        for line in _told(contract, erased, runs=runs, history=workspace.history(contract).exists):
            click.echo(line)


def _contract(workspace: Workspace, source: str, table: str) -> TableContract:
    from omnisupport_ingest.contracts.model import table_named

    known = workspace.contracts.of_source(source)
    if not known:
        names = ", ".join(workspace.contracts.sources())
        raise click.UsageError(f"No contract is of the source {source}. There are: {names}")
    return table_named(table, known)


def _key(contract: TableContract, given: Sequence[str]) -> list[str]:
    """The texts of the key's columns in the contract's order."""
    columns = contract.key
    pairs = dict(each.split("=", 1) for each in given if each.partition("=")[0] in columns and "=" in each)
    if len(pairs) == len(given) == len(columns):
        return [pairs[name] for name in columns]
    if len(given) == len(columns) == 1:
        return list(given)
    wanted = " ".join(f"{name}=VALUE" for name in columns)
    raise click.UsageError(f"The key of {contract.full_name} is {', '.join(columns)}. Write it as: {wanted}")


def _document(contract: TableContract, erased: Erased, *, runs: bool, dry_run: bool) -> dict[str, Any]:
    return {
        "source": contract.source,
        "table": contract.full_name,
        "dry_run": dry_run,
        "keys": erased.keys,
        "events": erased.events,
        "windows": list(erased.windows),
        "recorded": [_entry(each) for each in erased.recorded],
        "recorded_before": [_entry(each) for each in erased.before],
        "stale_windows": erased.stale_windows,
        "platform_runs": runs,
        "not_touched": list(_NOT_TOUCHED),
    }


def _entry(each: Erasure) -> dict[str, Any]:
    return {
        "key_sha256": each.key_hash,
        "by": each.erased_by,
        "why": each.why,
        "at": each.erased_at.isoformat(),
        "windows": list(each.windows),
    }


def _told(contract: TableContract, erased: Erased, *, runs: bool, history: bool) -> list[str]:
    if not erased.recorded:
        return [f"{_before(erased)}Nothing new was recorded for {_row(contract, erased)}."]
    lines = [
        f"{_before(erased)}Erasure recorded by {erased.recorded[0].erased_by}: {_row(contract, erased)}."
    ]
    if erased.stale_windows:
        lines.append(f"{stale(erased.stale_windows)} {who_judges_again(runs=runs)}")
    if history:
        lines.append(f"The history follows with the next run of the job history_{contract.source}.")
    lines += [
        "Older versions of the tables keep the values until their files are swept, a day after those runs "
        "or later: omnisupport-ingest sweep",
        f"Landing and {contract.source}/raw_cdc_staging are the record: they are not touched, and keep them.",
    ]
    return lines


def _before(erased: Erased) -> str:
    if not erased.before:
        return ""
    first = erased.before[0]
    return f"Recorded before by {first.erased_by}, {first.erased_at:%Y-%m-%d %H:%M} UTC: {first.why}\n"


def _row(contract: TableContract, erased: Erased) -> str:
    keys = f", with {counted(erased.keys - 1, 'former key')}" if erased.keys > 1 else ""
    place = f" in window{'s' * (len(erased.windows) > 1)} {listed(erased.windows)}" if erased.windows else ""
    return f"one row of {contract.full_name}{keys}, {counted(erased.events, 'event')}{place}"
