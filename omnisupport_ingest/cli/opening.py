"""What most commands begin with: the settings and the home they name."""

from __future__ import annotations

from typing import Any

from omnisupport_ingest.contracts.in_force import record_in_force, settings_of_home
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings, require_known_variables


def open_settings(**asked: Any) -> Settings:
    """The settings of this process; window size and source are the home's unless they were set explicitly.

    ``asked``: settings that a command asks for itself.
    """
    require_known_variables()
    return settings_of_home(Settings(**asked))


def open_home(settings: Settings) -> Home:
    """The home of ``settings`` for a command that writes, made if it is not there.

    It records its contracts and decision table if it does not yet. ``HomeMismatch`` if it is another kind.
    """
    home = Home.open(settings.home, settings.window_size, first=settings.first_window)
    record_in_force(settings, home)
    return home


class HomeMissing(IngestError):
    """A command that only looks was pointed at a folder without a home."""

    exit_code = 3


def existing_home(settings: Settings, *, earlier: bool = False) -> Home:
    """The home of ``settings`` for a command that makes none; ``HomeMissing`` if it is not there.

    ``earlier``: one of an earlier format is opened, too.
    """
    folder = settings.home.expanduser().absolute()
    if not (folder / "home.json").exists():
        raise HomeMissing(
            f"There is no home in {folder} yet.",
            fix="Make one with `omnisupport-ingest up` or `omnisupport-ingest demo`, or point "
            "OMNISUPPORT_HOME at the home to look at.",
        )
    return Home.open(folder, settings.window_size, earlier=earlier)
