"""Contracts, sources and decision table as they were when all of them were last right: a copy in the home.

Services read these documents again when a file changes. While one of them is wrong, services go on with the
copy, as a web server goes on with its last good configuration. Commands by which people act refuse a wrong
document.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.decision_table import DecisionTableRefused
from omnisupport_ingest.contracts.in_force import (
    KEPT,
    KEPT_CONTRACTS,
    KEPT_DECISIONS,
    RECORD,
    contracts_in_force,
    decisions_in_force,
    in_force,
)
from omnisupport_ingest.contracts.landed_keys import FILE as KEYS
from omnisupport_ingest.contracts.learned import FOLDER as LEARNED
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.sources import sources_folder, sources_in_force
from omnisupport_ingest.durable import replace, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import Settings

_NEWEST = "newest"
"""A link to the newest copy: settings name the copy by it, so they stay right when a newer one is made."""

_DIGITS = 16

_log = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int], ...]
"""Path, time of change (ns) and size of files, by which changed, added and removed ones are noticed."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents that a service uses.

    ``settings`` name the files themselves, or the copy. ``refused``: why the files are not used; None if they
    are. ``since``: the time of the copy in use, ISO 8601 in UTC. ``files``: the settings that name the files;
    None: ``settings``. ``stamp``: of the files, taken before they were read.
    """

    settings: Settings
    refused: IngestError | None = None
    since: str | None = None
    files: Settings | None = None
    stamp: Stamp = field(default=(), repr=False)

    @classmethod
    def named(cls, settings: Settings) -> Documents:
        """Return the documents that ``settings`` name, right or wrong."""
        return cls(settings, stamp=documents_stamp(settings))

    @property
    def notice(self) -> str | None:
        """What a person must know while the files are not used."""
        if self.refused is None:
            return None
        return (
            f"{self.refused.problem} Until it is corrected, the platform goes on with the contracts, sources "
            f"and decision table as they were at {self.since}. Fix: {self.refused.fix}"
        )


def usable(settings: Settings) -> Documents:
    """Return the documents of the home of ``settings``; while one of them is wrong, the copy.

    Raises ``ContractError`` or ``DecisionTableRefused`` for the wrong one if the home has no copy.
    """
    stamp = documents_stamp(settings)
    try:
        _check(settings)
    except (ContractError, DecisionTableRefused) as wrong:
        newest = _folder(settings) / _NEWEST
        if not newest.is_dir():
            raise
        since = datetime.fromtimestamp(newest.lstat().st_mtime, UTC).isoformat(timespec="seconds")
        return Documents(_with_copy(settings, newest), wrong, since, settings, stamp)
    return Documents(settings, stamp=stamp)


def documents_stamp(settings: Settings) -> Stamp:
    """Return the stamp of contracts, sources and decision table of the home of ``settings``, of the record
    that names them, of the columns that contracts have learned, and of the keys in force."""
    chosen, home = in_force(settings), _home_of(settings)
    return stamp_of(
        (
            *chosen.contracts.glob("*.json"),
            *sources_folder(settings).glob("*.json"),
            *(home / LEARNED).glob("*.json"),
            *(home / "landing").glob(f"*/{KEYS}"),
            chosen.decision_table,
            home / RECORD,
        )
    )


def stamp_of(files: Iterable[Path]) -> Stamp:
    """Return the stamp of ``files``; of a missing one, too."""

    def seen(file: Path) -> tuple[str, int, int]:
        try:
            status = file.stat()
        except OSError:
            return str(file), 0, 0
        return str(file), status.st_mtime_ns, status.st_size

    return tuple(sorted(map(seen, files)))


def keep(documents: Documents) -> None:
    """Copy ``documents``, for the time when one is wrong, unless they are the copy. A service does so when it
    begins to use them."""
    if documents.refused is not None:
        return
    try:
        _keep(documents.settings)
    except OSError as error:
        # For example, the disk is full, or a file was removed meanwhile. The earlier copy stays.
        _log.warning("The documents of the home were not copied: %s", error)


def _check(settings: Settings) -> None:
    """Raise ``ContractError`` or ``DecisionTableRefused`` for the first document that cannot be used."""
    contracts = contracts_in_force(settings)
    decisions_in_force(settings)
    for source in sources_in_force(settings, contracts).all:
        if contracts.of_source(source.name):
            source.tables(contracts)


def _keep(settings: Settings) -> None:
    """Copy the documents of the home of ``settings``; nothing if the copy has them, or if one is wrong by
    now."""
    kept, files = _folder(settings), dict(_files(settings))
    copy, newest = kept / _digest(files), kept / _NEWEST
    if newest.is_symlink() and newest.readlink().name == copy.name and copy.is_dir():
        return
    for relative, content in files.items():
        path = copy / relative
        # No failpoint: no link leads to a half copied folder, and the next load copies again.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(path, content)
    try:
        _check(_with_copy(settings, copy))
    except (ContractError, DecisionTableRefused):
        return
    link = kept / f".{_NEWEST}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(copy.name)
    link.rename(newest)
    sync_folder(kept)
    _remove_others(kept, copy.name)


def _files(settings: Settings) -> Iterator[tuple[str, bytes]]:
    """Yield each document by its path in the copy."""
    chosen = in_force(settings)
    for path in sorted(chosen.contracts.glob("*.json")):
        yield f"{KEPT_CONTRACTS}/{path.name}", path.read_bytes()
    for path in sorted(sources_folder(settings).glob("*.json")):
        yield f"sources/{path.name}", path.read_bytes()
    yield KEPT_DECISIONS, chosen.decision_table.read_bytes()


def _digest(files: dict[str, bytes]) -> str:
    found = hashlib.sha256()
    for name, content in files.items():
        found.update(f"{name}\n{len(content)}\n".encode() + content)
    return found.hexdigest()[:_DIGITS]


def _folder(settings: Settings) -> Path:
    return _home_of(settings) / KEPT


def _home_of(settings: Settings) -> Path:
    return settings.home.absolute()


def _with_copy(settings: Settings, copy: Path) -> Settings:
    named: dict[str, Any] = {"contracts_dir": copy / KEPT_CONTRACTS, "decision_table": copy / KEPT_DECISIONS}
    return settings.model_copy(update=named)


def _remove_others(kept: Path, newest: str) -> None:
    """Remove all copies but the newest two: a process may be reading the one before."""
    others = []
    for each in kept.iterdir():
        if each.name != newest and not each.is_symlink():
            with suppress(FileNotFoundError):
                # Another process may remove it, too.
                others.append((each.stat().st_mtime_ns, each))
    # No failpoint: a copy that is left over is removed with the next one.
    for _, each in sorted(others)[:-1]:
        shutil.rmtree(each, ignore_errors=True)
