"""What most commands begin with: the settings and the home they name."""

from __future__ import annotations

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.environment import with_window_of_home
from omnisupport_ingest.settings import Settings


def open_settings(*, window: str | None = None) -> Settings:
    """The settings of this process; the window size is the home's unless it was set explicitly.

    ``window`` is the size that a command asks for itself.
    """
    return with_window_of_home(Settings() if window is None else Settings(window=window))


def open_home(settings: Settings) -> Home:
    """The home of ``settings``, made if it is not there; ``HomeMismatch`` if it is another kind."""
    return Home.open(settings.home, settings.window_size)
