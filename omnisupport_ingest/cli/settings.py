"""``settings``: every setting, its value here, and what it means."""

from __future__ import annotations

import click
from pydantic import SecretStr

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.settings import PREFIX


@click.command()
def settings() -> None:
    """List every setting with its value and meaning; secrets are not shown."""
    values = open_settings()
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        shown = "(not set)" if value is None else value
        if isinstance(value, SecretStr):
            shown = "(set, not shown)"
        click.echo(f"{PREFIX}{name.upper()}={shown}")
        click.echo(f"    {field.description}")
