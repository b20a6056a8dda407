"""Handing the settings of this process to the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping
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


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the settings that are secret."""
    secret = secret_variables()
    return {name: value for name, value in environment.items() if name not in secret}


def secret_variables() -> frozenset[str]:
    """The variables of the settings that are secret, for processes that shall not have them."""
    return frozenset(
        PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
        if SecretStr in getattr(field.annotation, "__args__", (field.annotation,))
    )
