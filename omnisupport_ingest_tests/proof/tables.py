"""The tables that the proof's histories are about, in the oracle's words and as contracts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from omnisupport_ingest_tests.oracle.judging import QUARANTINE, REJECT_BATCH
from omnisupport_ingest_tests.oracle.model import TableShape
from omnisupport_ingest_tests.proof import quality
from omnisupport_ingest_tests.proof.policies import DROP, Policy, Protecting, Secrets
from omnisupport_ingest_tests.proof.quality import Rule, lengths

SOURCE = "desk"
KEY = ("lane", "id")

TICKETS = TableShape("tickets", ("status", "note", "body", "cost", "left"), soft_delete_column="left")
AGENTS = TableShape("agents", ("note", "gone", "body", "tags", "rate"), soft_delete_column="gone")
SHAPES = (TICKETS, AGENTS)
"""Rows of the one are marked as deleted by a time, those of the other by a text."""

TYPES: Mapping[str, str] = {
    "cost": "numeric(12,2)",
    "left": "timestamp with time zone",
    "tags": "text[]",
    "rate": "double precision",
}
"""Of columns that are not text."""

LATER_TYPES: Mapping[str, str] = {"cost_2": "numeric(12,2)", "rate_2": "double precision"}
"""Of columns that some histories have from some event on, under a name that another one had before."""

LEARNABLE: Mapping[str, Mapping[str, str | None]] = {
    "tickets": {"note_2": None, "cost_2": "0.00", "body_2": "none yet"},
    "agents": {"note_2": "none yet", "rate_2": None, "body_2": None},
}
"""Columns that a contract may learn, each with what rows have in it that are older than the column."""

UNKNOWN = "drafts"
"""A table that lands and has no contract."""

TOO_LONG = "x" * 40
KILOBYTES = "long words " * 500
"""Stand at the end of values that a strict contract does not allow."""

NO_VALUE = "no value of its type"
TWO_DIMENSIONS = "{{a,b},{c,d}}"
_TAGS = r'{"a \"quoted\" #",NULL,"NULL","\\",é}'

_AWKWARD = (
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "\t",
    "é",
    "漢",
    "🙂",
    "\u2028",
    "\x01",
    "{}",
    '\\"',
    "$1",
    "%s",
    "NULL",
)
"""Stand at the beginning of some texts: what quoting, JSON and lines stumble over."""

_EPOCH = datetime(2026, 2, 1, tzinfo=UTC)

Held = object
"""A value as the lake has it: typed, or ``Exact``."""


@dataclass(frozen=True)
class ContractShape(TableShape):
    """A table as one version of its contract has it.

    ``types``: of its columns that are not text, by name. ``policies``: of the columns of which the lake has
    what ``secrets`` leave of the values. ``changed_only``: its history leaves out what changes nothing.
    """

    types: tuple[tuple[str, str], ...] = ()
    policies: tuple[tuple[str, Policy], ...] = ()
    secrets: Secrets = field(default_factory=Secrets, compare=False)
    changed_only: bool = False


@dataclass(frozen=True)
class Exact:
    """A value that its typed column cannot hold, so its text stands beside it."""

    text: str


def spelled(column: str, text: str) -> str | None:
    """The value numbered as ``text`` is, as PostgreSQL writes one of ``column``; some break a contract."""
    number = int(text.rpartition(" ")[2])
    if column in ("gone", "left") and number % 5:
        return None
    if column == "cost":
        return _cost(number)
    if column == "left":
        return _time(number)
    if column == "tags":
        return _tags(number)
    if column == "rate":
        return NO_VALUE if number % 23 == 0 else repr(number / 7)
    if number % 23 == 0:
        return f"{text} {KILOBYTES if number % 2 else TOO_LONG}"
    return (_AWKWARD[number // 4 % len(_AWKWARD)] if number % 4 == 0 else "") + text


def _cost(number: int) -> str:
    if number % 23 == 0:
        return NO_VALUE
    return "NaN" if number % 7 == 0 else f"{'-' if number % 3 == 0 else ''}{number}.{number % 100:02}"


def _time(number: int) -> str:
    if number % 23 == 0:
        return NO_VALUE
    if number % 7 == 0:
        return "infinity"
    return (_EPOCH + timedelta(minutes=number, microseconds=number)).isoformat(" ").removesuffix(":00")


def _tags(number: int) -> str:
    if number % 7 == 0:
        return TWO_DIMENSIONS
    return "{}" if number % 5 == 0 else _TAGS.replace("#", str(number))


def types_of(shape: TableShape) -> Mapping[str, str]:
    """The types of the columns that are not text, by name."""
    return dict(shape.types) if isinstance(shape, ContractShape) else TYPES


def held(shape: TableShape, column: str, text: str | None) -> Held:
    """What the lake must hold for ``text`` in ``column``."""
    if text is None:
        return None
    if isinstance(shape, ContractShape) and (policy := dict(shape.policies).get(column)) is not None:
        return policy.left_of(text, shape.secrets)
    kind = types_of(shape).get(column, "text")
    if kind == "text":
        return text
    if text in ("NaN", "infinity", TWO_DIMENSIONS):
        return Exact(text)
    if kind.startswith("double"):
        return float(text)
    if kind in _WHOLE or kind == "boolean":
        return _of_other_kind(kind, text)
    if column == "tags":
        number = "".join(filter(str.isdigit, text))
        return (f'a "quoted" {number}', None, "NULL", "\\", "é") if number else ()
    if kind.startswith("numeric"):
        return Decimal(text)
    return datetime.fromisoformat(text) if kind.startswith("timestamp") else text


_WHOLE = frozenset(("smallint", "integer", "bigint"))
_TRUE, _FALSE = ("t", "true"), ("f", "false")


def _of_other_kind(kind: str, text: str) -> Held:
    """A whole number or a boolean; of a value that its column had as one of a former type, the text."""
    if kind == "boolean":
        return text in _TRUE if text in (*_TRUE, *_FALSE) else Exact(text)
    return int(text) if text.lstrip("-").isdigit() else Exact(text)


def from_lake(value: object, exact: str | None) -> Held:
    """What the lake holds, of the typed column and the exact text beside it."""
    if exact is not None:
        return Exact(exact) if value is None else (value, Exact(exact))
    if isinstance(value, list):
        return tuple(value)
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def marked_at(shape: TableShape, mark: str) -> datetime | None:
    """The time that a soft delete names; null where its column holds no time, or one that never comes."""
    told = held(shape, shape.soft_delete_column or "", mark)
    return told if isinstance(told, datetime) else None


@dataclass(frozen=True)
class Terms:
    """What the contract of a table says: the rules of its rows, and its lateness in hours.

    ``purge``: for how many hours rows are still shown after their delete; null: for ever. ``without``:
    columns that this version does not have; ``beside``: columns that it has beside those of other versions.
    ``retyped``: columns that have another type in this version. ``learned``: columns that the contract has
    learned, each with what older rows have in it. ``policies``: for personal data, by column.
    ``subject``: the column that says whose the personal values of a row are, which land encrypted; null: they
    land plain. ``key``: the id of the key by which values are hashed. ``changed_only``: the history leaves
    out what changes nothing.
    """

    rules: tuple[Rule, ...]
    allowed: int
    most: int
    purge: int | None = None
    without: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    retyped: Mapping[str, str] = field(default_factory=dict)
    learned: Mapping[str, str | None] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    subject: str | None = None
    key: str = "k1"
    changed_only: bool = False

    def source_of(self, shape: TableShape) -> ContractShape:
        """The table as this version of its contract has it, with the values of the source."""
        columns = tuple(name for name in shape.columns if name not in self.without) + self.beside
        columns += tuple(name for name in self.learned if name not in columns)
        types = {name: kind for name, kind in (TYPES | LATER_TYPES).items() if name in columns} | self.retyped
        typed = tuple((name, kind) for name, kind in types.items() if kind != "text")
        # What the file says of a column counts before what was learned of it.
        defaults = tuple((name, text) for name, text in self.learned.items() if name not in self.beside)
        return ContractShape(
            shape.name, columns, shape.soft_delete_column, defaults, typed, changed_only=self.changed_only
        )

    def shape_of(self, shape: TableShape, tokens: Path | None = None) -> ContractShape:
        """The table as the lake has it. ``tokens``: the file of the home's map."""
        source = self.source_of(shape)
        changed = {name: each for name, each in self.policies.items() if not each.plain}
        columns = tuple(n for n in source.columns if n not in changed or changed[n].policy != DROP)
        return replace(
            source,
            columns=columns,
            types=tuple((n, kind) for n, kind in source.types if n in columns and n not in changed),
            # Beside hashes and masks a default would be a value.
            defaults=tuple(
                (n, text)
                for n, text in source.defaults
                if n in columns and (text is None or n not in changed)
            ),
            policies=tuple((n, each) for n, each in changed.items() if n in columns),
            secrets=Secrets(self.key, tokens),
        )

    def protects(self, shape: TableShape) -> bool:
        """Whether the layers above raw have other images of the table's events than what landed."""
        columns = self.source_of(shape).columns
        return self.subject is not None or not all(
            each.plain for name, each in self.policies.items() if name in columns
        )

    def readable(self, shape: TableShape) -> frozenset[str] | None:
        """The columns of a row image that land as they are; null if all do."""
        if self.subject is None:
            return None
        plain = {name for name in self.source_of(shape).columns if name not in self.policies}
        return frozenset({*KEY, self.subject, shape.soft_delete_column or self.subject, *plain})

    def under(self, protecting: Protecting, table: str, learned: Mapping[str, str | None]) -> Terms:
        """The same with what is said of personal data, and the columns that the contract has learned."""
        return replace(
            self,
            learned=learned,
            policies=protecting.policies[table],
            subject=protecting.subjects.get(table),
            key=protecting.key,
        )

    def rejecting_nothing(self) -> Terms:
        """The same with rules that have a row wait where they would have its whole batch wait."""
        rules = tuple(
            replace(each, policy=QUARANTINE) if each.policy == REJECT_BATCH else each for each in self.rules
        )
        return replace(self, rules=rules)

    @property
    def lateness(self) -> tuple[timedelta, timedelta]:
        return timedelta(hours=self.allowed), timedelta(hours=self.most)

    def shown_since(self, watermark: datetime | None) -> datetime | None:
        """Rows deleted before this are purged: so long ago that nothing in time can arrive below.

        To the hour, so that a dimension is not another one with every event.
        """
        if self.purge is None or watermark is None:
            return None
        hours = max(self.purge, self.allowed + self.most)
        return (watermark - timedelta(hours=hours)).replace(minute=0, second=0, microsecond=0)


VERSIONS: tuple[Mapping[str, Terms], ...] = (
    {"tickets": Terms(lengths(status=30, body=30), 1, 2, 1), "agents": Terms(lengths(body=30), 2, 100, 1)},
    {
        "tickets": Terms((), 1, 2, without=frozenset(("note", "cost")), beside=("note_2",)),
        "agents": Terms(lengths(body=30), 0, 1, 3, retyped={"rate": "text"}),
    },
    {
        "tickets": Terms(
            lengths(status=30, note=13), 0, 3, 4, retyped={"cost": "numeric(14,4)", "left": "text"}
        ),
        "agents": Terms(lengths(note=12), 1, 1, 0, without=frozenset(("tags",)), beside=("note_2",)),
    },
)
"""Versions that the contracts go through; each change makes the windows stale. Some purge rows sooner than
what is in time has arrived, if they were left to. Columns leave the contract and come back, typed ones too,
or get another type, a wider one or one that a person has to ask for; ``note_2`` is what some histories call
their ``note`` from some event on."""


def shapes_of(terms: Mapping[str, Terms], tokens: Path | None = None) -> tuple[ContractShape, ...]:
    """The tables as the lake has them by these contracts. ``tokens``: the file of the home's map."""
    return tuple(terms[shape.name].shape_of(shape, tokens) for shape in SHAPES)


def sources_of(terms: Mapping[str, Terms]) -> tuple[ContractShape, ...]:
    """The tables as these versions of their contracts have them, with the values of the source."""
    return tuple(terms[shape.name].source_of(shape) for shape in SHAPES)


def readable_at_rest(terms: Mapping[str, Terms], table: str) -> frozenset[str] | None:
    """The columns of an image of ``table`` that land as they are; null if all do.

    Where one contract says encrypted, nothing of a table without a contract lands as it is.
    """
    for shape in SHAPES:
        if shape.name == table:
            return terms[table].readable(shape)
    return frozenset() if any(each.subject is not None for each in terms.values()) else None


_JSON_TYPES = {"numeric": "number", "double": "number", "text[]": "array"}
"""By how a type begins; others are texts."""


def write_contracts(folder: Path, terms: Mapping[str, Terms]) -> None:
    """Write their files; columns that a contract has learned stand in the home alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape in sources_of(terms):
        document = _contract(shape, terms[shape.name])
        (folder / f"{shape.name}.json").write_text(json.dumps(document))


def _json_type(kind: str) -> str:
    return next((found for begins, found in _JSON_TYPES.items() if kind.startswith(begins)), "string")


def column_document(kind: str) -> dict[str, Any]:
    """The line of a contract for a column of the type ``kind``."""
    return {"type": [_json_type(kind), "null"], "x-pg-type": kind, "description": "A column."}


def _contract(shape: ContractShape, terms: Terms) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: {"type": "integer", "x-pg-type": "bigint", "description": "Part of the key."} for name in KEY
    }
    for name in shape.columns:
        if name in dict(shape.defaults):
            continue
        kind = types_of(shape).get(name, "text")
        columns[name] = column_document(kind) | quality.document(terms.rules, name)
    encrypted = {"pii": "encrypted", "subject_column": terms.subject}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": shape.name,
        "description": f"The table {shape.name} of the proof.",
        "type": "object",
        "required": list(KEY),
        "additionalProperties": True,
        "properties": columns,
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": "public",
            "table": shape.name,
            "owner": "team:tests",
            "key": list(KEY),
            "events": {
                "soft_delete_column": shape.soft_delete_column,
                "purge_deleted_after": None if terms.purge is None else f"PT{terms.purge}H",
            },
            "lateness": {"allowed": f"PT{terms.allowed}H", "max": f"PT{terms.most}H"},
            "pii": {name: each.document for name, each in terms.policies.items() if name in shape.columns},
            **({} if terms.subject is None else {"at_rest": encrypted}),
            **({"history": "changed_only"} if terms.changed_only else {}),
            "quality": {"rules": quality.of_several(terms.rules)},
        },
    }
