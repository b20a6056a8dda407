"""JSON documents that people write: reading them strictly, checking them by our JSON Schemas, writing them.

Every problem names the file, the JSON path (``$.x-cdc.key[0]``) and what to do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.contracts.schema_verdict import Unsure, Verdict, compile_schema
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, parse_json, read_file, refuse_nul

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Largest size of a document in bytes."""

_LONGEST = 400
"""Characters of a message about a document, which may quote much of it."""

_PACKAGE = Path(__file__).resolve().parents[1]


def program_file(relative: str) -> Path:
    """Return the path of a file that comes with the program, such as ``contracts/contract.schema.json``.

    An installed package carries it under ``packaged/``; a checkout has it at its top level.
    """
    packaged = _PACKAGE / "packaged" / relative
    return packaged if packaged.exists() else _PACKAGE.parent / relative


def is_of_program(path: Path) -> bool:
    """Whether ``path``, absolute, is among the contracts that come with the program.

    Those of a checkout are a person's own where the checkout is the working folder.
    """
    return path.is_relative_to(program_file("contracts")) and not path.is_relative_to(
        Path("contracts").absolute()
    )


def read_document(path: Path, error: type[IngestError]) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises ``error`` if it is unreadable, not JSON, or repeats a
    name."""
    content = read_bytes(path, error)
    try:
        document = parse_json(content)
        refuse_nul(content, document)
    except Unreadable as problem:
        raise error(f"{path} is not valid JSON: {problem}.", fix="Correct the JSON at that place.") from None
    if not isinstance(document, dict):
        raise error(f"{path} at $: holds no JSON object.", fix="Write one JSON object, in braces.")
    return document


def read_bytes(path: Path, error: type[IngestError]) -> bytes:
    """Return the content of a document. Raises ``error`` if it is not a file, or larger than allowed."""
    try:
        return read_file(path, limit=MAX_DOCUMENT_BYTES)
    except OSError as problem:
        raise error(
            f"{path} cannot be read: {problem.strerror}.", fix="Check the path and its permissions."
        ) from None
    except Unreadable as problem:
        raise error(f"{path} cannot be read: {problem}.", fix="Name the document itself.") from None


def check_document(document: dict[str, Any], path: Path, schema: str, error: type[IngestError]) -> None:
    """Check ``document`` against our schema ``schema`` (``contracts/contract.schema.json``).

    Raises ``error`` for the first problem in document order. Its fix is the schema's description of that
    place.
    """
    if _is_valid(document, schema):
        return
    problems = sorted(_validator(schema).iter_errors(document), key=_order)
    if problems:
        first = problems[0]
        message = first.message if len(first.message) <= _LONGEST else f"{first.message[:_LONGEST]}…"
        if isinstance(first.schema, dict) and first.schema.get("writeOnly"):
            # People may write a secret here instead of its name, so the value is not quoted.
            message = f"the value does not have the required form ({first.validator})"
        raise error(f"{path} at {json_path(first.path)}: {message}.", fix=_fix(first, schema))


def json_path(parts: Iterable[str | int]) -> str:
    """Return ``["x-cdc", "key", 0]`` as ``$.x-cdc.key[0]``."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


@lru_cache(maxsize=8)
def _validator(schema: str) -> Draft202012Validator:
    # Imported here, as most commands do not need it.
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_schema(schema))


def _is_valid(document: dict[str, Any], schema: str) -> bool:
    """Whether it is certainly valid; if not, ``_validator`` decides and finds the problem."""
    try:
        verdict = _verdict(schema)
        return verdict is not None and verdict(document)
    except Unsure:
        return False


@lru_cache(maxsize=8)
def _verdict(schema: str) -> Verdict | None:
    try:
        return compile_schema(_schema(schema))
    except Unsure:
        return None


@lru_cache(maxsize=8)
def _schema(schema: str) -> dict[str, Any]:
    found = json.loads(program_file(schema).read_text(encoding="utf-8"))
    assert isinstance(found, dict), "a schema of ours is an object"
    return found


def _order(problem: ValidationError) -> tuple[list[str], bool]:
    # Within an object an unknown name comes first: if misspelled, it is why another is missing.
    return list(map(str, problem.path)), problem.validator != "additionalProperties"


def _fix(problem: ValidationError, schema: str) -> str:
    if problem.validator == "additionalProperties" and isinstance(problem.instance, dict):
        known = problem.schema.get("properties", {})
        extra = next(name for name in problem.instance if name not in known)
        near = difflib.get_close_matches(extra, set(known) - set(problem.instance), n=1)
        names = ", ".join(sorted(known))
        return f"Write {near[0]} in place of {extra}." if near else f"Take {extra!r} out; there are: {names}."
    described = isinstance(problem.schema, dict) and problem.schema.get("description")
    return str(described or f"Write it as {schema} describes.")


def document_text(document: dict[str, Any]) -> str:
    """Return ``document`` as the text of its file: JSON with a line for each column and each part of
    ``x-cdc``.
    """
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
