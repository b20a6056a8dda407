"""``settings``: every setting, its value here, and what it means."""

from __future__ import annotations

import json
from typing import Any

import click
from pydantic import SecretStr

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.settings import PREFIX


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def settings(as_json: bool) -> None:
    """List every setting with its value and meaning; secrets are not shown.

    A setting is an environment variable, or a line of .env in the working directory; the variable
    wins. The size of the windows is that of the home, if the home is there.

    \b
    Examples:
      omnisupport-ingest settings
      omnisupport-ingest settings --json | jq -r '.[] | select(.set) | .name'

    Exit code: 0 listed, 2 a setting cannot be used.
    """
    values = open_settings()
    listed = []
    for name, field in type(values).model_fields.items():
        value: Any = getattr(values, name)
        secret = isinstance(value, SecretStr)
        listed.append(
            {
                "name": f"{PREFIX}{name.upper()}",
                # Numbers stay numbers; a path is its text.
                "value": None
                if secret
                else value
                if isinstance(value, (int, float))
                else value and str(value),
                "secret": secret,
                "set": name in values.model_fields_set,
                "meaning": field.description,
            }
        )
    if as_json:
        click.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    for each in listed:
        shown = "(not set)" if each["value"] is None else each["value"]
        click.echo(f"{each['name']}={'(set, not shown)' if each['secret'] else shown}")
        click.echo(f"    {each['meaning']}")
