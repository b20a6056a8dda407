"""``doctor``: every problem of machine, settings and home that it can find, each with its fix."""

from __future__ import annotations

from collections.abc import Iterator

import click

from omnisupport_ingest.cli import doctor_home, doctor_machine, render
from omnisupport_ingest.cli.doctor_archive import write_archive
from omnisupport_ingest.cli.doctor_machine import Diagnosis, Level
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import existing_home, has_home, open_settings
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import recorded_storage

_WIDEST = 8
"""Width of the words for levels, in characters."""


@click.command()
@out_option("Also write doctor.zip for a bug report, without secrets or personal data.", option="--archive")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(archive: Out | None, as_json: bool) -> int:
    """Look for everything that may be wrong, and name the exact fix of each finding.

    Looks at Python and the packages, Java, memory, the disk and how long it lasts, permissions, clocks, the
    source and its slot, the chain of landed batches, every table of the lake, Dagster's runs, checks and
    daemon, ports, and settings that contradict each other. Changes nothing, and starts no Spark.

    The archive of --archive holds these findings, the documents of `status` and `ledger`, versions, which
    settings are set (no secret), and how many lines and errors each log has (no line of it).

    \b
    Examples:
      omnisupport-ingest doctor
      omnisupport-ingest doctor --archive report.zip

    Exit code: 0 nothing to do, 1 a warning or a problem, 2 usage or settings.
    """
    path = archive.file("doctor.zip") if archive is not None else None
    diagnosed = list(diagnoses())
    bad = [each for each in diagnosed if each.level in (Level.WARNING, Level.PROBLEM)]
    if path is not None:
        write_archive(path, document(diagnosed))
    if as_json:
        render.echo_json(document(diagnosed))
    else:
        _show(diagnosed, bad)
        if path is not None:
            click.echo(f"Wrote {path}. Look through it before you send it.")
    return FINDINGS if bad else 0


def diagnoses() -> Iterator[Diagnosis]:
    """Yield every finding. If something cannot be opened, that is a finding too."""
    settings = open_settings()
    yield from doctor_machine.machine(settings)
    if not has_home(settings):
        yield Diagnosis(
            "home",
            Level.NOTE,
            f"There is no home in {settings.home.absolute()} yet.",
            "omnisupport-ingest up or omnisupport-ingest demo makes one.",
        )
        return
    try:
        existing_home(settings)
        workspace = Workspace.open(settings)
    except IngestError as error:
        yield Diagnosis("home", Level.PROBLEM, error.problem, error.fix)
        return
    bucket = recorded_storage(workspace.home.path)
    where = f", landing and lake in {bucket}" if bucket is not None else ""
    yield Diagnosis("home", Level.OK, f"{workspace.home.path}, windows {workspace.home.grid.size}{where}")
    yield from doctor_home.home(settings, workspace)


def document(diagnosed: list[Diagnosis]) -> dict[str, object]:
    """Return the findings as JSON values."""
    levels = {level.value: sum(each.level is level for each in diagnosed) for level in Level}
    return {
        "levels": levels,
        "findings": [
            {"area": each.area, "level": each.level.value, "seen": each.seen, "fix": each.fix}
            for each in diagnosed
        ],
    }


def _show(diagnosed: list[Diagnosis], bad: list[Diagnosis]) -> None:
    lines = []
    for each in diagnosed:
        fix = f"\nFix: {each.fix}" if each.fix else ""
        lines.append(
            (each.level.value.upper() if each in bad else each.level.value, f"{each.area}: {each.seen}{fix}")
        )
    render.facts(lines, label=_WIDEST + 2)
    click.echo()
    render.heading(
        "Nothing to do."
        if not bad
        else f"{render.counted(len(bad), 'finding')} to look at, each with its fix above."
    )
