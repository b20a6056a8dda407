"""``manifest``: deliveries of files, described by seed manifests."""

from __future__ import annotations

from pathlib import Path

import click

from omnisupport_ingest.cli.opening import open_home, open_settings


@click.group()
def manifest() -> None:
    """Check and load deliveries of files (seed manifests)."""


@manifest.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
def validate(path: Path | None) -> None:
    """Check the manifest at PATH, or all in data/seed_manifests, against schema and contracts.

    \b
    Example:
      omnisupport-ingest manifest validate data/seed_manifests/legacy_tickets_2025.json

    Exit code: 0 valid, 2 usage, settings, or a manifest that cannot be used.
    """
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.sources.manifests.seed_manifest import default_manifests_dir, load_manifest

    contracts = contracts_in_force(open_settings())
    paths = [path] if path else sorted(default_manifests_dir().glob("*.json"))
    for each in paths:
        seed = load_manifest(each, contracts)
        click.echo(f"{each}: {seed.load_mode} of {seed.contract.full_name}, {seed.rows} rows")
    click.echo(f"{len(paths)} manifests are valid.")


@manifest.command()
@click.argument("path", type=click.Path(path_type=Path))
def load(path: Path) -> None:
    """Land the files that the manifest at PATH describes as one batch; a second time does nothing.

    \b
    Example:
      omnisupport-ingest manifest load data/seed_manifests/legacy_tickets_2025.json

    Exit code: 0 landed, 1 a file is not as described, 2 usage, settings or manifest.
    """
    from omnisupport_ingest.sources.manifests.land import land
    from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    open_home(settings)
    workspace = Workspace.open(settings)
    seed = load_manifest(path, workspace.contracts)
    store = workspace.landing(seed.contract.source)
    epoch = store.current_epoch() or store.begin_epoch("first delivery", None)
    landed = land(seed, store, workspace.grid, epoch.number)
    done = "had landed before" if landed.already_landed else "landed"
    click.echo(f"{seed.rows} rows of {seed.contract.full_name} {done} as {landed.manifest.batch_id}.")
