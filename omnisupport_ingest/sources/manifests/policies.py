"""The policies for faults of a delivery, as data: for each kind of fault, what each policy does.

The refusals of ``contracts/seed_manifest.schema.json`` and the table in ``docs/manifests.md`` repeat this
module; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACCEPT, WARN, QUARANTINE, REJECT = ACTIONS = ("accept", "warn", "quarantine", "reject")
"""Policies, the mildest first. ``reject``: nothing of the delivery lands, and the command says why."""

FULL_SNAPSHOT, INCREMENTAL, BACKFILL = ROW_MODES = ("full_snapshot", "incremental_cursor", "backfill")
CDC, REPLAY = "cdc", "replay"
MODES = (*ROW_MODES, CDC, REPLAY)
"""Load modes: three whose files hold rows, one whose files hold Debezium events, one without files."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A policy that is supported, and its effect."""

    effect: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A policy that the schema refuses, and the reason."""

    why: str


Rule = Effect | Refused

_REJECTS = Effect("nothing lands")
_FILE_WAITS = Effect("every row of the file waits in quarantine; a full snapshot then ends no row")
_ROW_WAITS = Effect("the row waits in quarantine, the rest lands")

FAULTS: Mapping[str, str] = {
    "checksum": "A file is not the one described: its SHA-256 is another.",
    "row_count": "A file has more or fewer rows than described.",
    "schema": "A line is no row: not readable, without a key, or without a cursor where the mode needs one.",
    "unknown_column": "A row has a column that the contract does not name.",
    "row": "A row breaks a rule of the contract.",
    "license": "The licence is none of those that the source's definition lists.",
    "duplicate_delivery": "The same content has landed before.",
    "missing_file": "A file is not there, or not whole; of a replay, a batch that has not landed.",
}
"""Kinds of faults."""

OPTIONAL: Mapping[str, str] = {
    "license": REJECT,
    "duplicate_delivery": ACCEPT,
    "missing_file": REJECT,
}
"""The policy for a kind of fault that a manifest does not name; the other kinds must be named."""

RULES: Mapping[str, tuple[Rule, Rule, Rule, Rule]] = {
    "checksum": (
        Effect("the file lands as it is"),
        Effect("the file lands as it is, with a warning"),
        _FILE_WAITS,
        _REJECTS,
    ),
    "row_count": (
        Effect("what the file has lands"),
        Effect("what the file has lands, with a warning"),
        _FILE_WAITS,
        _REJECTS,
    ),
    "schema": (
        Refused("what is no row cannot land as one"),
        Refused("a line that was left out would be lost"),
        _ROW_WAITS,
        _REJECTS,
    ),
    "unknown_column": (
        Effect("the column stays in the raw layers"),
        Effect("the column stays in the raw layers, with a warning"),
        _ROW_WAITS,
        _REJECTS,
    ),
    "row": (
        Refused("no table publishes a row that breaks its contract"),
        Refused("no table publishes a row that breaks its contract"),
        Effect("the row lands, and judging puts it into quarantine with the names of the rules"),
        _REJECTS,
    ),
    "license": (
        Effect("the delivery lands"),
        Effect("the delivery lands, with a warning"),
        Refused("what may not be kept may not be kept in quarantine either"),
        _REJECTS,
    ),
    "duplicate_delivery": (
        Effect("nothing lands twice; it counts as done"),
        Effect("nothing lands twice; it counts as done, with a warning"),
        Refused("all of its rows are in the lake, so none is left to wait"),
        Effect("nothing lands twice; it is refused"),
    ),
    "missing_file": (
        Effect("the other files land; a full snapshot then ends no row"),
        Effect("the other files land, with a warning; a full snapshot then ends no row"),
        Refused("there is no row that could wait"),
        _REJECTS,
    ),
}
"""Kind of fault → the effect of each of ``ACTIONS`` in a delivery of rows."""

_NO_FILES = Refused("a replay reads no file")
_EVENTS = Refused("its rows are events, which find their places one by one; a whole file cannot wait")
_WIDER = Refused("columns of a log change with the table, so new ones always stay in the raw layers")

_OF_EVENTS: Mapping[tuple[str, str], Rule] = {
    ("checksum", QUARANTINE): _EVENTS,
    ("row_count", QUARANTINE): _EVENTS,
    ("unknown_column", WARN): _WIDER,
    ("unknown_column", QUARANTINE): _WIDER,
    ("unknown_column", REJECT): _WIDER,
    ("row", REJECT): Refused("the change has happened at the source, so its event is kept and waits"),
}
"""The exceptions for a delivery of events."""


def rule(mode: str, fault: str, action: str) -> Rule:
    """Return what ``action`` does about ``fault`` in a delivery of ``mode``, or why the schema refuses it."""
    if mode == REPLAY and (fault != "missing_file"):
        return _NO_FILES
    matching = RULES[fault][ACTIONS.index(action)]
    if mode == REPLAY and isinstance(matching, Effect):
        return matching if action == REJECT else Effect("the other batches are folded again")
    return _OF_EVENTS.get((fault, action), matching) if mode == CDC else matching


def allowed(mode: str, fault: str) -> list[str]:
    """Return the policies that ``mode`` supports for ``fault``."""
    return [action for action in ACTIONS if isinstance(rule(mode, fault, action), Effect)]


def gates_schema() -> dict[str, Any]:
    """Return ``properties.gates`` of the JSON Schema: every kind of fault and every policy."""
    return {
        "description": "Say what to do about each kind of fault: accept, warn, quarantine or reject.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            fault: {"description": description, "enum": list(ACTIONS)}
            for fault, description in FAULTS.items()
        },
    }


def modes_schema() -> list[dict[str, Any]]:
    """Return ``allOf`` of the JSON Schema: the members of each load mode, and the policies it refuses."""
    named = [fault for fault in FAULTS if fault not in OPTIONAL]
    only_replay = {"description": "Take it out: only load mode replay has it.", "not": {}}
    conditions = []
    for modes in (list(ROW_MODES), [CDC], [REPLAY]):
        gates: dict[str, Any] = {"properties": {fault: _gate_schema(modes[0], fault) for fault in FAULTS}}
        if modes == [REPLAY]:
            files = {"description": f"Take it out: {_NO_FILES.why}.", "not": {}}
            then = {"required": ["replay"], "properties": {"files": files, "gates": gates}}
        else:
            gates["required"] = named
            then = {"required": ["files", "gates"], "properties": {"replay": only_replay, "gates": gates}}
        is_so = {"properties": {"load_mode": {"enum": modes}}, "required": ["load_mode"]}
        conditions.append({"if": is_so, "then": then})
    return conditions


def gates_table() -> str:
    """Return the table of the docs, in Markdown."""
    lines = [f"| fault | {' | '.join(ACTIONS)} |", f"|---|{'---|' * len(ACTIONS)}"]
    for fault in FAULTS:
        cells = [_cell(RULES[fault][number]) for number in range(len(ACTIONS))]
        lines.append(f"| `{fault}` | {' | '.join(cells)} |")
    for mode in (CDC, REPLAY):
        for fault in FAULTS if mode == CDC else ("missing_file",):
            of_mode = [rule(mode, fault, action) for action in ACTIONS]
            if of_mode != list(RULES[fault]):
                cells = [
                    _cell(one) if one != all_ else "" for one, all_ in zip(of_mode, RULES[fault], strict=True)
                ]
                lines.append(f"| `{fault}` in `{mode}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rule: Rule) -> str:
    return rule.effect if isinstance(rule, Effect) else f"*refused*: {rule.why}"


def _gate_schema(mode: str, fault: str) -> dict[str, Any]:
    able = allowed(mode, fault)
    if not able:
        return {"description": f"Take it out: {_NO_FILES.why}.", "not": {}}
    reasons: dict[str, list[str]] = {}
    for action in ACTIONS:
        matching = rule(mode, fault, action)
        if isinstance(matching, Refused):
            reasons.setdefault(matching.why, []).append(action)
    refusals = [f"Not {' or '.join(actions)}: {why}." for why, actions in reasons.items()]
    return {"description": " ".join([f"Use {' or '.join(able)}.", *refusals]), "enum": able}
