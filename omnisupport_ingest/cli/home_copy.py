"""``home copy``: copies landing and lake of a home to an object store, and proves that both are equal.

All files are uploaded, then read back from the store, and their SHA-256 is compared with those of the
folders. Only then is the marker of the home put there, and the home records its new storage. So an
interrupted copy does not count, and the same command continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.render import Commands, counted
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.storage import (
    LOCAL,
    Kept,
    Storage,
    StorageRefused,
    is_kept,
    open_storage,
    recorded_storage,
)

_AT_ONCE = 8


class CopyDiffers(IngestError):
    """The copy of a home in the object store is not equal to the home. The home is as it was.

    Fix: Run ``home copy`` again; where the message names a foreign object, give a prefix that nothing was put
    to.
    """


@click.group(cls=Commands)
def home() -> None:
    """Move landing and lake of the home to an object store."""


@home.command()
@click.argument("url")
def copy(url: str) -> None:
    """Copy landing and lake of this home to URL, and keep them there from then on.

    Nothing may run on the home meanwhile. Every object is read back and compared with its file before the
    home is switched; the folders stay, as copies. An interrupted copy is gone on with by the same command.

    \b
    Example:
      omnisupport-ingest home copy s3://our-bucket/omnisupport

    Exit code: 0 done, 1 the copy differs, 2 usage or settings, 3 no home, 4 the store is away, 6 in use.
    """
    settings = open_settings()
    source_home = existing_home(settings)
    with ExitStack() as alone:
        alone.enter_context(HomeLock(source_home, "home copy"))
        for source in sorted(each.name for each in source_home.landing.iterdir() if each.is_dir()):
            alone.enter_context(take_lease(source_home.run, source))
        done = copy_home(source_home, url)
    size = f"{done.bytes / 1e6:,.1f} MB"
    click.echo(
        f"{counted(done.files, 'file')}, {size}: read back from {url}, each with the SHA-256 of its file."
    )
    click.echo("The home keeps landing and lake there from now on; its folders are copies.")


@dataclass(frozen=True, slots=True)
class Copied:
    """How much was copied and compared."""

    files: int
    bytes: int


def copy_home(home: Home, url: str) -> Copied:
    """Copy landing and lake to ``url``, compare them, and record the storage in the home.

    Raises:
        StorageRefused: the home is in an object store already, another one is at ``url``, or the store there
            ignores conditions of puts.
        CopyDiffers: an object differs from its file, or has none. The home is then unchanged.
    """
    recorded = recorded_storage(home.path)
    if recorded is not None:
        raise StorageRefused(
            f"{home.path} has its landing and lake in {recorded} already.",
            fix="Copy a bucket to another with the tools of its provider.",
        )
    storage = open_storage(home.path, url)
    # Its own marker is there if a copy was cut off before the home recorded its storage.
    home.require_own_marker(storage)
    storage.require_conditions()
    every = (each for folder in (home.landing, home.lake) for each in LOCAL.listed(folder))
    files = [each for each in every if is_kept(home.path, each.path)]
    # No failpoint: objects of no home, until home.marker puts its marker beside them.
    storage.upload(each.path for each in files)
    _require_equal(storage, home, files)
    home.move_to(storage, url)
    return Copied(len(files), sum(each.bytes for each in files))


def _require_equal(storage: Storage, home: Home, files: Sequence[Kept]) -> None:
    copied = {each.path for folder in (home.landing, home.lake) for each in storage.listed(folder)}
    strangers = sorted(copied - {each.path for each in files})
    if strangers:
        raise _differs(f"there is no {strangers[0]} for its object", "Give a prefix that nothing was put to.")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for path, same in pool.map(lambda each: (each.path, _is_equal(storage, each.path)), files):
            if not same:
                raise _differs(f"the object of {path} is another", "Run the same command again.")


def _is_equal(storage: Storage, path: Path) -> bool:
    try:
        return storage.digest(path) == LOCAL.digest(path)
    except FileNotFoundError:
        return False


def _differs(difference: str, fix: str) -> CopyDiffers:
    return CopyDiffers(f"The copy is not equal to the home: {difference}. The home is as it was.", fix=fix)
