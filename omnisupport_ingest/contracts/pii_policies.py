"""Reading the policies for personal data of a contract (``x-cdc.pii``); policies that cannot be applied are
refused.

A policy defines what the tables that people query have in place of a column's values. ``keep``: the values.
``drop``: nothing, the lake has no such column. ``mask``: a part of the text (``masks``). ``hash``: a keyed
hash, equal for equal values of all tables (``pii_keys``). ``tokenize``: a random token, equal for equal
values (``token_map``). NULL stays NULL under each of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.masks import OWN, Mask
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind

KEEP, DROP, MASK, HASH, TOKENIZE = "keep", "drop", "mask", "hash", "tokenize"
POLICIES = (KEEP, DROP, MASK, HASH, TOKENIZE)

_TAKES = {MASK: frozenset({Kind.TEXT}), HASH: INTEGERS | {Kind.TEXT, Kind.DATE}}
_TAKES[TOKENIZE] = _TAKES[HASH]
"""Kinds of columns to which a policy applies; others have several texts for one value."""

LAKE_TYPE = "text"
"""The lake type of values that a policy has changed."""


def read_policies(path: Path, policy: dict[str, Any], columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return ``columns`` with their policies from ``policy``, the ``x-cdc`` of the contract in ``path``.

    Raises ``ContractError`` for the first policy that cannot be carried out.
    """
    given: dict[str, dict[str, str]] = policy.get("pii", {})
    unknown = sorted(given.keys() - {column.name for column in columns})
    if unknown:
        raise refused(path, f"x-cdc.pii.{unknown[0]}", "is not a column", "Name columns only.")
    for column in columns:
        if column.name in given:
            _check(path, policy, column, given[column.name])
    return tuple(_with_policy(path, column, given.get(column.name)) for column in columns)


def lake_columns(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return the columns in the lake, after the policies of the source's ``columns``."""
    return tuple(_in_lake(column) for column in columns if column.pii != DROP)


def is_plain(column: Column) -> bool:
    """Whether the lake has the values of the column unchanged."""
    return column.pii == KEEP


def takes(policy: str, kind: Kind) -> bool:
    """Return whether ``policy`` can be applied to columns of ``kind``."""
    return policy not in _TAKES or kind in _TAKES[policy]


def _check(path: Path, policy: dict[str, Any], column: Column, given: dict[str, str]) -> None:
    name, chosen = column.name, given["policy"]
    at = f"x-cdc.pii.{name}"
    if chosen == KEEP:
        return
    if name in policy["key"]:
        raise refused(
            path,
            f"{at}.policy",
            f"is {chosen!r}, and {name} is of the key: by the key's own values events, snapshots, deletes, "
            "ranges of keys and erasures find a row",
            "Use keep; or have a column without personal data be the key, at the source.",
        )
    if name == policy["events"]["soft_delete_column"]:
        raise refused(
            path,
            f"{at}.policy",
            f"is {chosen!r}, and {name} is the soft-delete column, which says whether a row lives",
            "Use keep.",
        )
    cursor = policy.get("cursor") or {}
    if name in (cursor.get("field"), cursor.get("event_time")):
        raise refused(
            path,
            f"{at}.policy",
            f"is {chosen!r}, and {name} is a column of x-cdc.cursor: positions and times of events are made "
            "of its values, and the dimension shows them",
            "Use keep; or name another column in x-cdc.cursor.",
        )
    if not takes(chosen, column.type.kind):
        raise refused(
            path,
            f"{at}.policy",
            f"is {chosen!r}, which cannot be applied to the type {column.pg_type!r}",
            "Use drop or keep. "
            + ("mask takes text." if chosen == MASK else "It takes text, integers, dates."),
        )


def _with_policy(path: Path, column: Column, given: dict[str, str] | None) -> Column:
    if given is None:
        return column
    return replace(
        column,
        pii=given["policy"],
        personal=True,
        pii_note=given["note"],
        mask=_mask(path, f"x-cdc.pii.{column.name}", given),
    )


def _mask(path: Path, at: str, given: dict[str, str]) -> Mask | None:
    if given["policy"] != MASK:
        if {"mask", "pattern", "replacement"} & given.keys():
            raise refused(path, at, f"has the policy {given['policy']!r} and a mask", "Take the mask out.")
        return None
    form = given.get("mask")
    if form is None:
        raise refused(path, at, "does not say which mask", "Add mask, such as email, name or text.")
    own = {"pattern", "replacement"}
    if own & given.keys() != (own if form == OWN else set()):
        raise refused(
            path,
            at,
            f"has the mask {form!r}",
            "Write pattern and replacement with the mask pattern, and there alone.",
        )
    mask = Mask(form, given.get("pattern", ""), given.get("replacement", ""))
    if form == OWN:
        _check_pattern(path, at, mask)
    return mask


def _check_pattern(path: Path, at: str, mask: Mask) -> None:
    # Imported here: Arrow is slow to load, and reading contracts must be quick.
    import pyarrow as pa

    from omnisupport_ingest.contracts.masking import masked

    try:
        masked(mask, pa.array(["x"]))
    except pa.ArrowInvalid as problem:
        raise refused(
            path, f"{at}.pattern", f"is no regular expression of RE2: {problem}", "Correct the pattern."
        ) from None


def _in_lake(column: Column) -> Column:
    if is_plain(column):
        return column
    # Rules apply to the values of events, before the policy. A default is dropped too: beside hashes and
    # masks it would be a plain value.
    known = column.default if column.default is not None and column.default.text is None else None
    return replace(
        column,
        pg_type=LAKE_TYPE,
        enum=(),
        minimum=None,
        maximum=None,
        pattern=None,
        max_length=None,
        default=known,
        former_types=(),
    )
