"""JSON documents that people write: read strictly and checked against a JSON Schema of ours.

Every problem names the file, the JSON path (``$.x-cdc.key[0]``) and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

_PACKAGE = Path(__file__).resolve().parents[1]


def program_file(relative: str) -> Path:
    """A file that comes with the program, ``contracts/contract.schema.json`` say.

    An installed package carries it under ``packaged/``; a checkout has it at its top level.
    """
    packaged = _PACKAGE / "packaged" / relative
    return packaged if packaged.exists() else _PACKAGE.parent / relative


def read_document(path: Path, error: type[IngestError]) -> dict[str, Any]:
    """The JSON object in ``path``; ``error`` if it is unreadable, not JSON, or repeats a name."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except OSError as problem:
        raise error(
            f"{path} cannot be read: {problem.strerror}.", fix="Check the path and its permissions."
        ) from None
    except ValueError as problem:
        raise error(f"{path} is not valid JSON: {problem}.", fix="Correct the JSON at that place.") from None
    if not isinstance(document, dict):
        raise error(f"{path} at $: holds no JSON object.", fix="Write one JSON object, in braces.")
    return document


def check_document(document: dict[str, Any], path: Path, schema: str, error: type[IngestError]) -> None:
    """Check ``document`` against our schema ``schema`` (``contracts/contract.schema.json``).

    ``error`` tells the first problem in document order, and the fix that the schema's own
    description of that place gives.
    """
    problems = sorted(
        _validator(schema).iter_errors(document), key=lambda problem: list(map(str, problem.path))
    )
    if problems:
        first = problems[0]
        raise error(f"{path} at {json_path(first.path)}: {first.message}.", fix=_fix(first, schema))


def json_path(parts: Iterable[str | int]) -> str:
    """``["x-cdc", "key", 0]`` as ``$.x-cdc.key[0]``."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


@lru_cache(maxsize=8)
def _validator(schema: str) -> Draft202012Validator:
    # Imported here: the command line starts without it.
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(program_file(schema).read_text(encoding="utf-8")))


def _fix(problem: ValidationError, schema: str) -> str:
    described = isinstance(problem.schema, dict) and problem.schema.get("description")
    return str(described or f"Write it as {schema} describes.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {repeated!r} stands twice in one object")
    return found
