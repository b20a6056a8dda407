"""Load contracts from files: ``load_contracts`` reads a folder of JSON documents into values.

A contract document is itself a JSON Schema of one row, with the policy of its change events in ``x-cdc``. The
schema of such documents is ``contracts/contract.schema.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.at_rest import read_at_rest
from omnisupport_ingest.contracts.columns import read_columns, refused
from omnisupport_ingest.contracts.cursor_policy import read_cursor
from omnisupport_ingest.contracts.documents import check_document, program_file, read_document
from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.expression_syntax import closing_after
from omnisupport_ingest.contracts.model import (
    DEFAULT_ALLOWED_LATENESS,
    DEFAULT_MAX_LATENESS,
    PINNED,
    Column,
    ContractError,
    Contracts,
    DelayedMerge,
    RetentionPolicy,
    TableContract,
    TargetPolicy,
)
from omnisupport_ingest.contracts.names import PLAIN_NAME
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.contracts.pii_policies import is_plain, lake_columns, read_policies
from omnisupport_ingest.contracts.quality_document import judged_by, read_quality

__all__ = [
    "Column",
    "ContractError",
    "Contracts",
    "TableContract",
    "contract_of",
    "contract_paths",
    "default_contracts_dir",
    "has_contract_of",
    "load_contract",
    "load_contracts",
]

SCHEMA = "contracts/contract.schema.json"

_LONGEST_DELAY = timedelta(hours=12)
"""A merge may read files of net changes that compaction has replaced since; these are kept for a day."""

LEAST_OLD_FILES = timedelta(hours=1)
"""A younger file that no version of its table holds may be of a run that has not committed yet."""

_NOT_JUDGED_BY = (
    "cursor",
    "target",
    "delayed_merge",
    "rows_per_file",
    "deletion_vectors",
    "retention",
    "evolution",
    "optional_columns",
    "history",
    "quality",
)
"""Parts of ``x-cdc`` that change no row of net changes and dimension, but by which events are accepted
(``row_columns``)."""

_WITHOUT_RULE = frozenset({"type", "x-pg-type", "description", "default"})
"""Keywords that a nullable column of text may have and still be without a rule."""


def default_contracts_dir(source: str | None = None) -> Path:
    """Return ``contracts/data`` of the working folder if it exists, else the packaged folder of that name.

    ``source``: of the embedded server. If the program has contracts for it in ``contracts/<source>/data``,
    that folder of the working folder goes before the others, and the packaged one is the last. Otherwise the
    server would have the tables of one domain, and the contracts those of another.
    """
    usual = own = "contracts/data"
    if source is not None and program_file(f"contracts/{source}/data").is_dir():
        own = f"contracts/{source}/data"
    return next((here for here in (Path(own), Path(usual)) if here.is_dir()), program_file(own))


def has_contract_of(folder: Path, source: str) -> bool:
    """Whether a file of ``folder``, which may be missing, names ``source`` as that of its table.

    Raises ``ContractError`` if none does, and one cannot be read: it may be the one.
    """
    unread: ContractError | None = None
    for path in sorted(folder.glob("*.json")):
        try:
            policy = read_document(path, ContractError).get("x-cdc")
        except ContractError as error:
            unread = unread or error
            continue
        if isinstance(policy, dict) and policy.get("source") == source:
            return True
    if unread is not None:
        raise unread
    return False


Amended = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the document in force for the document in a file."""


def load_contracts(folder: Path, amended: Amended = dict) -> Contracts:
    """Return every ``*.json`` in ``folder`` as a contract. Raises ``ContractError`` for the first that is
    none."""
    with closing_after():
        return Contracts(tuple(load_contract(path, amended) for path in contract_paths(folder)))


def contract_paths(folder: Path) -> list[Path]:
    """Return the contract files of ``folder``, sorted. Raises ``ContractError`` if it is no folder or has
    none."""
    if not folder.is_dir():
        raise ContractError(
            f"{folder} is not a folder of contracts.",
            fix="Set OMNISUPPORT_CONTRACTS_DIR to the folder that holds the contract files.",
        )
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ContractError(
            f"{folder} holds no contract (*.json).",
            fix="Write one per table from the source, which OMNISUPPORT_SOURCE_DSN names: omnisupport-ingest "
            "contracts new --all",
        )
    return paths


def load_contract(path: Path, amended: Amended = dict) -> TableContract:
    """Return the contract in one file. Raises ``ContractError``, which names the file, the JSON path and the
    fix."""
    document = read_document(path, ContractError)
    try:
        document = amended(document)
    except (AttributeError, KeyError, TypeError):
        # The document is no contract: ``contract_of`` raises the error that names the place in the file.
        return contract_of(document, path)
    return contract_of(document, path)


def contract_of(document: dict[str, Any], path: Path) -> TableContract:
    """Return the contract in ``document``, which is or will be the content of ``path``. Raises
    ``ContractError``."""
    check_document(document, path, SCHEMA, ContractError)
    policy = document["x-cdc"]
    columns = read_policies(path, policy, read_columns(path, document))
    in_lake = lake_columns(columns)
    _check_key(path, policy["key"], columns)
    subject = read_at_rest(path, policy, columns, _name(path, policy))
    soft_delete = policy["events"]["soft_delete_column"]
    if soft_delete is not None and soft_delete not in {column.name for column in columns}:
        raise refused(
            path,
            "x-cdc.events.soft_delete_column",
            f"{soft_delete!r} is not a column",
            "Name a column, or null.",
        )
    if soft_delete is not None and soft_delete in document["required"]:
        raise refused(
            path,
            "x-cdc.events.soft_delete_column",
            f"{soft_delete!r} is required, and a row is deleted where it is not NULL: every row would be",
            "Name a column that is NULL while a row lives, or null.",
        )
    lateness = policy.get("lateness", {})
    allowed = _duration(path, "lateness.allowed", lateness.get("allowed"))
    allowed = DEFAULT_ALLOWED_LATENESS if allowed is None else allowed
    longest = _duration(path, "lateness.max", lateness.get("max"))
    longest = max(DEFAULT_MAX_LATENESS, allowed) if longest is None else longest
    if longest < allowed:
        raise refused(
            path, "x-cdc.lateness.max", "is shorter than allowed", "Make max at least as long as allowed."
        )
    return TableContract(
        name=_name(path, policy),
        version=policy["version"],
        source=policy["source"],
        schema=policy["schema"],
        table=policy["table"],
        title=document["title"],
        description=document["description"],
        owner=policy["owner"],
        key=tuple(policy["key"]),
        columns=in_lake,
        soft_delete_column=soft_delete,
        allowed_lateness=allowed,
        max_lateness=longest,
        path=str(path),
        fingerprint=_fingerprint(document),
        purge_deleted_after=_duration(
            path, "events.purge_deleted_after", policy["events"].get("purge_deleted_after")
        ),
        cursor=read_cursor(path, policy.get("cursor"), columns),
        target=_target(path, policy),
        delayed_merge=_delayed_merge(path, policy.get("delayed_merge")),
        rows_per_file=policy.get("rows_per_file"),
        deletion_vectors=policy.get("deletion_vectors", False),
        unprotected=() if in_lake == columns else columns,
        retention=_retention(path, policy.get("retention", {}), longest),
        evolution=policy.get("evolution", PINNED),
        optional_columns=tuple(policy.get("optional_columns", ())),
        changed_only=policy.get("history") == "changed_only",
        # If values are protected, columns that the contract does not name are dropped. Once it names one, its
        # events must be made again from raw.
        verdicts_by="" if subject or not all(map(is_plain, columns)) else _verdicts_by(document, columns),
        quality=read_quality(path, policy.get("quality"), columns),
        subject=subject,
    )


def _fingerprint(document: dict[str, Any]) -> str:
    """Return the SHA-256 of ``document``, without the parts that change nothing that landed: those that are
    only about reading, targets, merges and their files, or retention."""
    policy = {name: value for name, value in document["x-cdc"].items() if name not in _NOT_JUDGED_BY}
    policy |= judged_by(document["x-cdc"].get("quality"))
    judged = document | {"x-cdc": policy}
    text = json.dumps(judged, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _verdicts_by(document: dict[str, Any], columns: tuple[Column, ...]) -> str:
    """Return the SHA-256 of the parts of ``document`` on which verdicts depend.

    It also leaves out titles, descriptions, version, owner, and columns that have no rule. So if a contract
    learns such a column, no event is judged again.
    """
    properties = document["properties"]
    free = {
        each.name
        for each in columns
        if each.nullable and each.type.kind is Kind.TEXT and properties[each.name].keys() <= _WITHOUT_RULE
    }
    ruled = {
        name: {key: value for key, value in body.items() if key not in ("description", "default")}
        for name, body in properties.items()
        if name not in free
    }
    words = {"title": "", "description": "", "properties": ruled}
    policy = {name: value for name, value in document["x-cdc"].items() if name not in ("version", "owner")}
    return _fingerprint(document | words | {"x-cdc": policy})


def _name(path: Path, policy: dict[str, Any]) -> str:
    """Return the table's name in the lake: ``x-cdc.name``, else its own name if the lake allows it."""
    name: str = policy.get("name", policy["table"])
    if not PLAIN_NAME.fullmatch(name):
        raise refused(
            path,
            "x-cdc.table",
            f"{name!r} cannot name folders and assets of the lake",
            "Leave it as the source has it, and give the table a plain name in x-cdc.name: letters, digits "
            "and underscores, not beginning with a digit.",
        )
    return name


def _target(path: Path, policy: dict[str, Any]) -> TargetPolicy | None:
    target = policy.get("target")
    if target is None:
        return None
    connection = target["connection"]
    schema, table = target.get("schema", "public"), target.get("table", _name(path, policy))
    return TargetPolicy(connection.get("env"), connection.get("file"), schema, table)


def _delayed_merge(path: Path, delay: dict[str, Any] | None) -> DelayedMerge | None:
    if delay is None:
        return None
    age = _duration(path, "delayed_merge.max_age", delay["max_age"])
    assert age is not None, "the schema asks for a text"
    if not timedelta(0) < age <= _LONGEST_DELAY:
        raise refused(
            path,
            "x-cdc.delayed_merge.max_age",
            f"is {delay['max_age']}, and a merge may wait up to PT12H",
            "Write a shorter time, or leave delayed_merge out: then every run merges at once.",
        )
    return DelayedMerge(age, float(delay["max_share"]))


def _retention(path: Path, policy: dict[str, Any], max_lateness: timedelta) -> RetentionPolicy:
    layers = [each.name for each in fields(RetentionPolicy)]
    kept = RetentionPolicy(*(_duration(path, f"retention.{name}", policy.get(name)) for name in layers))
    for name, kept_for, least, problem, fix in (
        (
            *("raw", kept.raw, kept.landing),
            "is shorter than landing, from which raw would be made again",
            "Keep landing no longer than raw: give both, landing the shorter time.",
        ),
        (
            *("raw", kept.raw, max_lateness),
            "is shorter than lateness.max, within which late events are taken in by a replay from raw",
            "Keep raw at least as long as lateness.max.",
        ),
        (
            *("quarantine", kept.quarantine, kept.raw),
            "is shorter than raw, from which the events would be quarantined again",
            "Keep raw no longer than quarantine: give both, raw the shorter time.",
        ),
        (
            *("net_changes", kept.net_changes, kept.raw),
            "is shorter than raw, from which a window is judged again",
            "Keep raw no longer than net_changes: give both, raw the shorter time.",
        ),
        (
            *("history", kept.history, max_lateness),
            "is shorter than lateness.max, within which late events still make versions",
            "Keep history at least as long as lateness.max.",
        ),
        (
            *("old_files", kept.old_files, LEAST_OLD_FILES),
            "is shorter than PT1H, and a run that is in progress needs its files",
            "Keep them for an hour at least, and longer than the longest run takes.",
        ),
    ):
        # None is without end.
        if kept_for is not None and (least is None or kept_for < least):
            raise refused(path, f"x-cdc.retention.{name}", problem, fix)
    return kept


def _check_key(path: Path, key: list[str], columns: tuple[Column, ...]) -> None:
    by_name = {column.name: column for column in columns}
    for index, name in enumerate(key):
        at = f"x-cdc.key[{index}]"
        if name not in by_name:
            raise refused(
                path, at, f"{name!r} is not a column of this contract", "Name a column under properties."
            )
        if by_name[name].nullable:
            raise refused(
                path, at, f"{name!r} may be null, and a key may not", f"List {name} in required, as NOT NULL."
            )


def _duration(path: Path, name: str, text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as problem:
        raise refused(
            path,
            f"x-cdc.{name}",
            str(problem),
            "Write an ISO 8601 duration without years and months.",
        ) from None
