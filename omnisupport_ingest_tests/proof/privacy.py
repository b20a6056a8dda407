"""What must not stand where people read: values under a policy above raw, and values at rest that no contract
lets land as they are.

The oracle says which rows every layer holds; here is looked for values, wherever they may be in a row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from omnisupport_ingest.contracts.encrypted_images import MARK, MEMBER, decrypted, key_id
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.oracle.model import Event
from omnisupport_ingest_tests.proof.tables import SHAPES, SOURCE, ContractShape, Terms

Row = Mapping[str, Any]

_IMAGES = ("before", "after")
_WITHOUT_VALUES = "tb"

_SHORTEST = 5
"""Shorter values stand by chance in others."""

_WITHIN = 60
"""So many of the values are looked for within texts too, spread evenly; all are looked for as whole texts."""


@dataclass(frozen=True)
class Hidden:
    """Which values nobody may see above raw.

    ``shapes``: of the tables of which policies change the images, by name. ``others``: the tables with a
    contract whose images are kept as they landed.
    """

    shapes: Mapping[str, ContractShape]
    others: frozenset[str]

    def images_of(self, table: str) -> bool:
        """Whether images of ``table`` are others above raw, as what nobody has described is where one is."""
        return bool(self.shapes) and table not in self.others

    def column(self, table: str, name: str) -> bool:
        shape = self.shapes.get(table)
        if shape is None:
            return self.images_of(table)
        return name not in shape.columns or name in dict(shape.policies)

    def values(self, events: Iterable[tuple[Event, str | None]]) -> dict[str, Sought]:
        """The values of ``events`` by table, each event with the text that came in place of its image."""
        by_table: dict[str, Sought] = defaultdict(Sought)
        for event, unreadable in events:
            found = by_table[event.table]
            found.shown.update(part for part in event.key or () if part is not None)
            if unreadable is not None:
                (found.hidden if self.images_of(event.table) else found.shown).add(unreadable)
            for image in (event.before, event.after):
                for name, text in (image or {}).items():
                    if text is not None:
                        (found.hidden if self.column(event.table, name) else found.shown).add(text)
        return dict(by_table)


@dataclass(frozen=True)
class Sought:
    """Texts that are ``hidden``, and those that are ``shown``, maybe the same."""

    hidden: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)

    @property
    def sought(self) -> frozenset[str]:
        """Those that may stand nowhere."""
        return frozenset(text for text in self.hidden - self.shown if len(text) >= _SHORTEST)

    def found_in(self, texts: Iterable[str]) -> set[str]:
        """Which of those stand in ``texts``."""
        held = set(texts)
        sought = sorted(self.sought)
        found = self.sought & held
        for text in sought[:: max(1, len(sought) // _WITHIN)]:
            if any(text in each for each in held) and not any(text in each for each in self.shown):
                found |= {text}
        return set(found)


def hidden_by(terms: Mapping[str, Terms], shapes: Iterable[ContractShape]) -> Hidden:
    """What the contracts ``terms`` hide of their tables, which the lake has as ``shapes``."""
    of_lake = {each.name: each for each in shapes}
    changed = {each.name: of_lake[each.name] for each in SHAPES if terms[each.name].protects(each)}
    return Hidden(changed, frozenset(of_lake.keys() - changed.keys()))


def exposed(
    workspace: Workspace, values: Mapping[str, Sought], read: Callable[[LakeTable], Iterable[Row]]
) -> Iterator[tuple[str, list[str]]]:
    """The tables above raw that hold hidden values of their own table, and some of these.

    ``read``: gives the rows of a table of the lake.
    """
    sought = {name: each for name, each in values.items() if each.sought}
    for shared in (workspace.deduped(SOURCE), workspace.quarantine(SOURCE)):
        rows = [*read(shared)] if sought and shared.exists else []
        for name, of_table in sought.items():
            texts = (text for row in rows if row["source_table"] == name for text in texts_in(row))
            if found := of_table.found_in(texts):
                yield f"{shared.spec.path}, {name}", sorted(found)[:3]
    for contract in workspace.contracts.of_source(SOURCE):
        if contract.table not in sought:
            continue
        for table in (
            workspace.net_changes(contract),
            workspace.dimension(contract),
            workspace.history(contract),
        ):
            rows = [*read(table)] if table.exists else []
            texts = (text for row in rows for text in texts_in(row))
            if found := sought[contract.table].found_in(texts):
                yield table.spec.path, sorted(found)[:3]


def exposed_files(workspace: Workspace, values: Mapping[str, Sought]) -> Iterator[tuple[str, list[str]]]:
    """The files above raw, of whatever version, that hold values that no table may show."""
    every = Sought(
        {text for each in values.values() for text in each.hidden},
        {text for each in values.values() for text in each.shown},
    )
    raw = workspace.raw(SOURCE).folder
    for file in sorted(each for each in workspace.home.lake.rglob("*") if each.is_file()):
        if not file.is_relative_to(raw) and (found := every.found_in(texts_of(file))):
            yield str(file.relative_to(workspace.home.lake)), sorted(found)[:3]


def texts_of(file: Path) -> Iterator[str]:
    """Every text in a file of Parquet; of any other, all of it as one text."""
    if file.suffix != ".parquet":
        yield file.read_bytes().decode("utf-8", "replace")
        return
    for row in pq.read_table(file, partitioning=None).to_pylist(maps_as_pydicts="strict"):
        yield from texts_in(row)


def texts_in(value: object) -> Iterator[str]:
    """Every text in ``value``, and those in texts that are JSON."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "["):
            try:
                yield from texts_in(json.loads(value))
            except ValueError:
                return
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def readable_members(row: Row) -> frozenset[str]:
    """The names of what can be read in the images of a landed event; an image that is no object is one."""
    found: set[str] = set()
    for name in _IMAGES:
        if row[name] is None or row["op"] in _WITHOUT_VALUES:
            continue
        try:
            found |= json.loads(row[name]).keys()
        except ValueError:
            found.add(str(row[name]))
    if row["envelope"] is not None:
        found.add("the line as it was delivered")
    return frozenset(found - {MEMBER})


def as_received(rows: Iterable[Row], keys: SubjectKeys) -> list[dict[str, Any]]:
    """Rows of raw with their images as they were received: decrypted, where they landed encrypted.

    Of those whose key is destroyed, what landed readable.
    """
    found = [dict(row) for row in rows]
    marked = [(row, name) for row in found for name in _IMAGES if MARK in (row[name] or "")]
    ids = {key_id(row[name]) for row, name in marked}
    known = keys.by_id(each for each in ids if each is not None) if marked else {}
    for row, name in marked:
        named = key_id(row[name])
        key = None if named is None else known[named]
        if key is None or key.secret is None:
            shown = {column: text for column, text in json.loads(row[name]).items() if column != MEMBER}
            row[name] = json.dumps(shown)
            continue
        row[name] = decrypted(row[name], key, f"{row['source_schema']}.{row['source_table']}".encode())
    return found
