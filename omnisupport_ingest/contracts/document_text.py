"""A contract document as the text of its file: a line for each column, as people write them."""

from __future__ import annotations

import json
from typing import Any


def document_text(document: dict[str, Any]) -> str:
    """``document`` as JSON; what stands below ``properties`` and ``x-cdc`` gets a line each."""
    parts = []
    for name, value in document.items():
        if name in ("properties", "x-cdc"):
            inner = ",\n".join(f"    {_line(key)}: {_line(each)}" for key, each in value.items())
            parts.append(f"  {_line(name)}: {{\n{inner}\n  }}")
        else:
            parts.append(f"  {_line(name)}: {_line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
