"""``init``: makes a folder for a project of one's own, outside of the program's repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.durable import create_exclusively
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint

_DECISIONS = "reports/week03/late_arrival_decision_table.csv"

_ENV = """\
# Settings of this project; a variable of the environment wins. All of them: omnisupport-ingest settings

# The source: a PostgreSQL with wal_level = logical. Keep its password where libpq looks for one, in
# ~/.pgpass (mode 0600), and not here. Without this line a PostgreSQL for trials is started.
#OMNISUPPORT_SOURCE_DSN=host=db.example port=5432 dbname=shop user=omnisupport_capture sslmode=require

# The size of a window, fixed when the home is made: hourly, daily or minutes:N.
#OMNISUPPORT_WINDOW=hourly
"""

_WORKSPACE = """\
# For a plain `dagster dev` in this folder; `omnisupport-ingest up` does not read it.
load_from:
  - python_module:
      module_name: omnisupport_ingest.definitions
      location_name: omnisupport_ingest
      working_directory: .
"""

_IGNORED = """\
.omnisupport/
.omnisupport-*/
.env
*.log
"""

_README = """\
# Ingestion of our database

| here | what it is |
|---|---|
| `contracts/data/` | a contract per table: columns, key, rules, personal data |
| `contracts/sources/` | further sources: another PostgreSQL, tables by a cursor, Kafka topics, files |
| `data/seed_manifests/` | descriptions of files that are delivered |
| `reports/week03/late_arrival_decision_table.csv` | what is done with late, repeated and wrong events |
| `.env` | settings; not for version control |
| `.omnisupport/` | the home: landing, lake and Dagster's records; not for version control |

From nothing to the first query:

    omnisupport-ingest contracts new --all             # a contract per table; decide on personal data
    omnisupport-ingest source grants --database shop   # SQL for an administrator; connects to nothing
    omnisupport-ingest preflight                       # what is missing, with the SQL that adds it
    omnisupport-ingest sync                            # source to lake, once, and compared
    omnisupport-ingest up                              # from now on, with Dagster's UI
"""

_EMPTY = ("contracts/data", "contracts/sources", "data/seed_manifests")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def init(folder: Path) -> None:
    """Make a project in FOLDER: places for contracts, sources and manifests, and settings.

    A file that is there already is kept as it is. The other commands are run in the folder.

    \b
    Example:
      omnisupport-ingest init shop

    Exit code: 0 done, 1 a file cannot be written, 2 usage.
    """
    try:
        written = list(_write(folder))
    except OSError as problem:
        raise IngestError(
            f"{problem.filename or folder} cannot be written: {problem.strerror}.",
            fix="Check the path and its permissions, or name another folder.",
        ) from None
    for path in written:
        click.echo(f"written  {path}")
    if not written:
        click.echo(f"{folder} has everything already.")
    click.echo(f"Next: cd {folder}, and set OMNISUPPORT_SOURCE_DSN in .env. Then:")
    click.echo("  omnisupport-ingest contracts new --all")


def _write(folder: Path) -> Iterator[Path]:
    """Write the missing files of a project, and yield the path of each."""
    files = {
        ".env": _ENV,
        ".gitignore": _IGNORED,
        "README.md": _README,
        "workspace.yaml": _WORKSPACE,
        _DECISIONS: program_file(_DECISIONS).read_text(encoding="utf-8"),
        **{f"{name}/.gitkeep": "" for name in _EMPTY},
    }
    for name, content in files.items():
        path = folder / name
        with failpoint("contract.file", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            created = create_exclusively(path, content.encode())
        if created:
            yield path
