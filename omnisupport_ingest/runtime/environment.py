"""Passes the settings of this process to the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from omnisupport_ingest.settings import PREFIX, Settings


def settings_environment(settings: Settings) -> dict[str, str]:
    """Return every setting that has a value, as the environment variable from which ``Settings`` reads it.

    Paths are absolute, so a child may have another working directory. The result contains secrets: it is for
    the environment of a child, never for a file, a log or a command line.
    """
    environment = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        elif isinstance(value, Path):
            value = value.absolute()
        if value is not None:
            environment[PREFIX + name.upper()] = str(value)
    return environment


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the settings that are secret."""
    secret = secret_variables()
    return {name: value for name, value in environment.items() if name not in secret}


def secret_variables() -> frozenset[str]:
    """Return the variables of the secret settings, for processes that must not have them."""
    return frozenset(
        PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
        if SecretStr in getattr(field.annotation, "__args__", (field.annotation,))
    )
