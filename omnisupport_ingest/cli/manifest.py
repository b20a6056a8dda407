"""``manifest``: check and load deliveries of files, described by seed manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.land import inlet_of
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.render import Commands, counted, echo_json, say_err
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.sources import SourceKind, sources_in_force
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.sources.manifests.events import examine_events, land_events
from omnisupport_ingest.sources.manifests.examine import Examined, SeedRefused, windows_of_batches
from omnisupport_ingest.sources.manifests.land import Delivery, Inlet, land, look_through
from omnisupport_ingest.sources.manifests.policies import CDC
from omnisupport_ingest.sources.manifests.seed_manifest import (
    ReplayOf,
    SeedManifest,
    SeedManifestError,
    default_manifests_dir,
    load_manifest,
)

_MOST_SHOWN = 20


@click.group(cls=Commands)
def manifest() -> None:
    """Check and load deliveries of files (seed manifests)."""


@manifest.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def validate(path: Path | None, as_json: bool) -> None:
    """Check the manifest at PATH, or all in data/seed_manifests, against the schema and the contracts.

    \b
    Example:
      omnisupport-ingest manifest validate data/seed_manifests/legacy_tickets_2025.json

    Exit code: 0 valid, 2 usage, settings, or a manifest that cannot be used.
    """
    contracts = contracts_in_force(open_settings())
    paths = [path] if path else sorted(default_manifests_dir().glob("*.json"))
    seeds, wrong = dict[Path, SeedManifest](), list[SeedManifestError]()
    for each in paths:
        try:
            seeds[each] = load_manifest(each, contracts)
        except SeedManifestError as problem:
            wrong.append(problem)
    if wrong and as_json:
        raise wrong[0]
    if as_json:
        rows = {
            str(each): {"load_mode": seed.load_mode, "table": seed.contract.full_name, "rows": seed.rows}
            for each, seed in seeds.items()
        }
        echo_json({"manifests": rows})
        return
    for each, seed in seeds.items():
        click.echo(f"{each}: {seed.load_mode} of {seed.contract.full_name}, {seed.rows:,} rows")
    if not wrong:
        click.echo(f"{len(paths)} manifests are valid.")
        return
    for each_wrong in wrong[:-1]:
        say_err(f"Error: {each_wrong.problem}\nFix: {each_wrong.fix}\n")
    raise wrong[-1]


@manifest.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Show what would land and what would not, and land nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def load(path: Path, dry_run: bool, as_json: bool) -> int | None:
    """Land the files that the manifest at PATH describes. Loading them twice changes nothing.

    \b
    load mode           what the files are
    full_snapshot       the whole table
    incremental_cursor  new versions of rows
    backfill            rows of past windows
    cdc                 Debezium's events
    replay              no files: windows are replayed, as by `replay`

    The gates of the manifest decide about each kind of fault. If a gate rejects the delivery, nothing of it
    lands, nor while its source is paused. --dry-run reads the whole delivery and prints the faults with file
    and line.

    \b
    Example:
      omnisupport-ingest manifest load data/seed_manifests/omnisupport_tickets_full.json --dry-run
      omnisupport-ingest manifest load data/seed_manifests/omnisupport_tickets_full.json

    Exit code: 0 landed, 1 a gate rejects it or the source is paused, 2 usage, settings or manifest.
    """
    settings = open_settings()
    open_home(settings)
    workspace = Workspace.open(settings)
    seed = load_manifest(path, workspace.contracts)
    if seed.replay is not None:
        _replay(workspace, seed, seed.replay, dry_run=dry_run, as_json=as_json)
        return None
    examine, land = (_events if seed.load_mode == CDC else _rows)(workspace, seed)
    if not dry_run:
        delivery = land()
        _show(seed, delivery.examined, delivery, as_json=as_json)
        return None
    examined = examine()
    _show(seed, examined, None, as_json=as_json)
    return FINDINGS if examined.first_rejected is not None else None


_Steps = tuple["Callable[[], Examined]", "Callable[[], Delivery]"]


def _rows(workspace: Workspace, seed: SeedManifest) -> _Steps:
    source = seed.contract.source
    definition = sources_in_force(workspace.settings, workspace.contracts).find(source)
    if definition.kind is not SourceKind.FILES:
        raise SeedRefused(
            f"{source} is a source of the kind {definition.kind}; deliveries are not mixed into it.",
            fix="Land them as a source of their own: contracts with another x-cdc.source.",
        )
    contracts = workspace.contracts.of_source(source)
    alone = len(contracts) == 1
    inlet = Inlet(
        encrypting_store(workspace.home, source, contracts),
        workspace.grid,
        definition.licenses,
        alone,
        learned=LearnedColumns(workspace.home.path, source),
        tables=frozenset(each.full_name for each in contracts),
    )
    return lambda: look_through(seed, inlet), lambda: land(seed, inlet)


def _events(workspace: Workspace, seed: SeedManifest) -> _Steps:
    source = seed.contract.source
    inlet = inlet_of(workspace, source, {})
    taken = sources_in_force(workspace.settings, workspace.contracts).find(source).licenses
    return lambda: examine_events(seed, inlet, taken), lambda: land_events(seed, inlet, taken)


def _replay(
    workspace: Workspace, seed: SeedManifest, replay: ReplayOf, *, dry_run: bool, as_json: bool
) -> None:
    from omnisupport_ingest.cli.replay import ReplayRequest, replay_windows, windows_between

    source = seed.contract.source
    if replay.first is not None:
        windows = windows_between(workspace, source, replay.first, replay.last or replay.first)
    else:
        windows, faults = windows_of_batches(seed, workspace.landing(source))
        for fault in faults:
            say_err(f"{fault.action}: {fault.problem}. {fault.fix}")
    reason = None if dry_run else replay.reason
    request = ReplayRequest.of(workspace, source, seed.contract.full_name, windows)
    replay_windows(request, reason, as_json=as_json)


def _show(seed: SeedManifest, examined: Examined, delivery: Delivery | None, *, as_json: bool) -> None:
    if as_json:
        echo_json(_document(seed, examined, delivery))
        return
    of_all = delivery is None
    for fault in [each for each in examined.faults if of_all or each.action != "accept"][:_MOST_SHOWN]:
        where = f"{fault.where}: " if fault.file else ""
        said = f"{fault.action}: {where}{fault.problem} (gate {fault.kind}). {fault.fix}"
        click.echo(said, err=not of_all)
    total = sum(examined.counts.values())
    if of_all and total > _MOST_SHOWN:
        click.echo(f"… {total:,} faults in all; --json lists the first thousand.")
    if examined.kept_out:
        click.echo(f"{counted(examined.kept_out, 'row')} for quarantine, by a gate.")
    table, rows = seed.contract.full_name, counted(examined.rows, "row")
    if delivery is None:
        rejected = examined.first_rejected
        would = "would land" if rejected is None else f"would not land: gate {rejected.kind} rejects it"
        would = "had landed before" if _all_before(examined) and rejected is None else would
        click.echo(f"{rows} of {table} {would}.")
        return
    names = ", ".join(each.batch_id for each in delivery.batches)
    done = "had landed before" if delivery.already_landed else "landed"
    click.echo(f"{rows} of {table} {done} as {names}.")


def _all_before(examined: Examined) -> bool:
    duplicates = sum(count for (kind, _), count in examined.counts.items() if kind == "duplicate_delivery")
    return duplicates > 0 and duplicates >= examined.batches


def _document(seed: SeedManifest, examined: Examined, delivery: Delivery | None) -> dict[str, Any]:
    return {
        "manifest": str(seed.path),
        "load_mode": seed.load_mode,
        "table": seed.contract.full_name,
        "rows": examined.rows,
        "for_quarantine": examined.kept_out,
        "faults": [
            {"gate": each.kind, "action": each.action, "file": each.file, "line": each.line}
            | {"problem": each.problem, "fix": each.fix}
            for each in examined.faults
        ],
        "counts": {f"{kind} {action}": count for (kind, action), count in sorted(examined.counts.items())},
        "rejected": examined.first_rejected is not None,
        "batches": None if delivery is None else [each.batch_id for each in delivery.batches],
        "already_landed": None if delivery is None else delivery.already_landed,
    }
