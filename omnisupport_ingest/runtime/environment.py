"""Handing the settings of this process to the processes that it starts."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import SecretStr

from omnisupport_ingest.settings import PREFIX, Settings


def settings_environment(settings: Settings) -> dict[str, str]:
    """Every setting that has a value as the variable that ``Settings`` reads it from.

    Paths are made absolute, so that a child may have another working directory. Secrets are in
    the result: it is for the environment of a child, never for a file, a log or a command line.
    """
    environment = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        elif isinstance(value, Path):
            value = value.expanduser().absolute()
        if value is not None:
            environment[PREFIX + name.upper()] = str(value)
    return environment


def with_window_of_home(settings: Settings) -> Settings:
    """``settings`` with the window size that the home was made with, unless one was set explicitly.

    A home fixes its window size when it is made (``home.json``); only who asks for another one
    should be refused. A home that is missing or unreadable changes nothing here.
    """
    if "window" in settings.model_fields_set:
        return settings
    try:
        window = json.loads((settings.home.expanduser() / "home.json").read_text())["window"]
    except (OSError, ValueError, KeyError, TypeError):
        return settings
    return Settings.model_validate({**settings.model_dump(exclude_unset=True), "window": window})
