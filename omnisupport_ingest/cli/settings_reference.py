"""``docs/settings.md`` and ``.env.example``, made from the ``Settings`` class.

``python -m omnisupport_ingest.cli.settings_reference`` writes both below the working directory. In
the page only the table is made; what stands outside its two marks is written by hand.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from omnisupport_ingest.settings import PREFIX, Settings

PAGE = Path("docs/settings.md")
EXAMPLE = Path(".env.example")
REGENERATE = "python -m omnisupport_ingest.cli.settings_reference"

_BEGIN = "<!-- made from omnisupport_ingest/settings.py -->"
_END = "<!-- end of what is made -->"
_WIDTH = 100
_PLAIN = ("name", "path")
"""Values that need no word in an example."""


def page(before: str) -> str:
    """The page ``before`` with its table made anew; ``ValueError`` if a mark is missing."""
    head, _, rest = before.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not end:
        raise ValueError(f"{PAGE} has lost the marks {_BEGIN} and {_END}")
    rows = ["| variable | default | values | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{PREFIX}{name.upper()}` | {default} | {values_of(field)} | {field.description} |")
    table = "\n".join(rows)
    return f"{head}{_BEGIN}\n\n{table}\n\n{_END}{tail}"


def example() -> str:
    """``.env.example``: every setting, commented out, with its default or an example."""
    lines = [
        "# Copy to .env and uncomment what you change. `omnisupport-ingest settings` lists the values in",
        f"# force, docs/settings.md explains them. This file is made by: {REGENERATE}",
    ]
    for name, field in Settings.model_fields.items():
        sample = field.default if field.default is not None else next(iter(field.examples or ()), "")
        values = values_of(field).replace("`", "")
        text = f"{field.description}{'' if values in _PLAIN else f' Values: {values}.'}"
        lines += ["", *textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{PREFIX}{name.upper()}={sample}")
    return "\n".join(lines) + "\n"


def values_of(field: FieldInfo) -> str:
    """What a setting accepts, in a few words: said by the setting itself, else by its type."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "values" in extra:
        return str(extra["values"])
    kinds = getattr(field.annotation, "__args__", (field.annotation,))
    if Path in kinds:
        return "path"
    if SecretStr in kinds:
        return "text, secret"
    if bool in kinds:
        return "`true`, `false`"
    if int in kinds or float in kinds:
        return _bounds(field.metadata)
    return "name"


def _bounds(rules: list[Any]) -> str:
    lowest = next((rule.ge for rule in rules if isinstance(rule, Ge)), None)
    above = next((rule.gt for rule in rules if isinstance(rule, Gt)), None)
    highest = next((rule.le for rule in rules if isinstance(rule, Le)), None)
    if lowest is not None and highest is not None:
        return f"{lowest} to {highest}"
    if above is not None:
        return f"> {above}"
    return f"≥ {lowest}" if lowest is not None else "number"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    EXAMPLE.write_text(example())


if __name__ == "__main__":
    main()
