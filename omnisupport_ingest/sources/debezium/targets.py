"""The PostgreSQL type of the column that a value goes into, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from omnisupport_ingest.contracts.pg_types import Kind, PgType

_MODIFIER = re.compile(r"\(\s*([0-9]{1,9})\s*(?:,\s*-?[0-9]{1,9}\s*)?\)")
_ALIASES = {
    "bool": "boolean",
    "varbit": "bit varying",
    "decimal": "numeric",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "time with time zone": "timetz",
    "float4": "real",
    "float8": "double precision",
    "int2": "smallint",
    "int4": "integer",
    "int": "integer",
    "int8": "bigint",
}
_OF_EXTENSIONS = (".hstore", ".geometry", ".geography")
"""Types that stand in the schema of their extension, whatever its name."""


@dataclass(frozen=True, slots=True)
class Target:
    """The PostgreSQL type of a column: name, modifier and scale.

    ``name`` is the type's plain name, empty if nothing is known; ``modifier`` its first number (length,
    precision); ``scale`` of a numeric. ``element``: for an array, the type of its elements.
    """

    name: str = ""
    modifier: int | None = None
    scale: int = 0
    element: Target | None = None

    @classmethod
    def of(cls, pg_type: str | None) -> Target:
        """Return the target for ``pg_type``, as a contract writes it; None: nothing is known."""
        return cls() if pg_type is None else _target(pg_type)


@cache
def _target(pg_type: str) -> Target:
    modifier = _MODIFIER.search(pg_type)
    name = " ".join(_MODIFIER.sub(" ", pg_type).lower().split())
    if name.endswith("[]"):
        return Target("array", element=_target(pg_type.rstrip()[:-2]))
    name = name.removeprefix("pg_catalog.")
    if name.endswith(_OF_EXTENSIONS):
        name = name.rpartition(".")[2]
    parsed = PgType.parse(pg_type)
    scale = parsed.scale if parsed.kind is Kind.DECIMAL else 0
    return Target(_ALIASES.get(name, name), int(modifier.group(1)) if modifier else None, scale)
