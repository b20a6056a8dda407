"""Proposes the next version of a contract whose table has changed, with the compatibility of each step.

The contract's own choices stay: descriptions, rules, policies, a wider type, columns that it leaves out. It
follows the source where rows would otherwise be quarantined, and adds columns that the source has added
since. For readers of the tables, each step is ``additive`` (a new column), ``widening`` (new values in an
existing column) or ``breaking`` (a column fewer, or different values).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.contracts.at_rest import ENCRYPTED
from omnisupport_ingest.contracts.learned import raised
from omnisupport_ingest.contracts.model import BLOCK
from omnisupport_ingest.contracts.pg_types import Fit, Kind, PgType, fit
from omnisupport_ingest.contracts.pii_policies import DROP, KEEP, takes
from omnisupport_ingest.contracts.pii_scan import with_notes
from omnisupport_ingest.landing.schema_changes import SchemaChange, keeps_values
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveColumn
from omnisupport_ingest.sources.postgres.catalog.new_contract import column_document, left_out_columns
from omnisupport_ingest.sources.postgres.catalog.next_quality import NextQuality, TakenOut
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema, renamed_from

ADDITIVE, WIDENING, BREAKING = "additive", "widening", "breaking"
_WORST = (ADDITIVE, WIDENING, BREAKING)

_RULES = ("enum", "pattern", "maxLength", "minimum", "maximum")
"""Keywords of rules that apply to only one kind of value."""


@dataclass(frozen=True, slots=True)
class Step:
    """One edit of a contract. ``at``: the path in the file. ``what`` and ``why``: for a person."""

    compatibility: str
    at: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class NextContract:
    """The ``document`` of the next version, and the steps to it. Without steps it is the present version.

    ``for_a_person``: changes that no edit of the contract covers, as sentences. ``renamed_key``: the names of
    the key's columns if one of them was renamed and the key is no other one.
    """

    document: dict[str, Any]
    steps: tuple[Step, ...]
    for_a_person: tuple[str, ...]
    renamed_key: tuple[str, ...] = ()

    @property
    def compatibility(self) -> str | None:
        """The compatibility of the least compatible step; None without steps."""
        return max((each.compatibility for each in self.steps), key=_WORST.index, default=None)


def next_contract(
    document: dict[str, Any],
    schema: LiveSchema,
    changes: Sequence[SchemaChange],
    *,
    every: bool = False,
    again: str | None = "omnisupport-ingest source snapshot",
    key_follows: bool = True,
) -> NextContract:
    """Return the next version of the contract ``document``. ``schema``: its table as it is now.

    ``changes``: the recorded changes of the table; columns that they add are added to the contract.
    ``every``: add all other columns that the contract does not name, too. ``again``: the command that reads
    the table again; None if there is none. ``key_follows``: whether the contract may get another key, as that
    of a log or a cursor may.
    """
    draft = _Draft(deepcopy(document), schema, again)
    given = document["x-cdc"].get("pii", {})
    renamed = renamed_from(given, changes)
    draft.follow_names(changes, key_follows=key_follows)
    draft.keep_covered(given, renamed)
    if key_follows:
        draft.follow_key(changes)
    draft.drop()
    renamed_values = {each.column for each in changes if each.kind == "enum_values_changed"}
    for name in list(draft.properties):
        draft.follow(name, renamed_values)
    for change in changes:
        if change.kind == "column_added_again" and change.column in draft.properties:
            # What older rows had in it was said of the column that is gone.
            draft.properties[change.column].pop("default", None)
    recorded = {each.column for each in changes if each.kind in ("column_added", "column_added_again")}
    # Renamed columns whose former name another column has now.
    named = document["properties"].keys() - {*document["x-cdc"]["key"]}
    recorded |= {each.after for each in changes if each.kind == "column_renamed" and each.before in named}
    draft.add(None if every else recorded)
    draft.keep_covered(given, renamed)
    if again is None and draft.policy.get("evolution") == BLOCK:
        draft.let_vary(document["properties"], changes)
    draft.add_undecided(changes, key_follows=key_follows)
    draft.judge_rules()
    # Only for new columns: a person has decided about the others.
    noted = with_notes(draft.document)["x-cdc"].get("pii", {})
    policies = draft.policy.get("pii", {})
    new = {name: note for name, note in noted.items() if name in draft.added and name not in policies}
    if new:
        # A new contract must not publish personal data before a person decides.
        draft.set_personal({name: note | {"policy": DROP} for name, note in new.items()})
    for name, note in new.items():
        draft.for_a_person.append(f"x-cdc.pii.{name} leaves the column out until you decide. {note['note']}")
    renamed_key = tuple(draft.policy["key"]) if draft.key_is_renamed else ()
    proposal = NextContract(draft.document, tuple(draft.steps), tuple(draft.for_a_person), renamed_key)
    if proposal.compatibility is not None:
        major = int(proposal.compatibility == BREAKING)
        draft.policy["version"] = raised(draft.policy["version"], major=major, minor=1)
    return proposal


class _Draft:
    """A contract that is edited, step by step, into its next version."""

    def __init__(self, document: dict[str, Any], schema: LiveSchema, again: str | None) -> None:
        self.document, self._schema = document, schema
        self._read_it = f": read the table ({again})" if again else ""
        self._quality = NextQuality(document["x-cdc"])
        self.steps: list[Step] = []
        self.for_a_person: list[str] = []
        self.added: list[str] = []
        self.key_is_renamed = False

    @property
    def properties(self) -> dict[str, Any]:
        properties: dict[str, Any] = self.document["properties"]
        return properties

    @property
    def policy(self) -> dict[str, Any]:
        policy: dict[str, Any] = self.document["x-cdc"]
        return policy

    def follow_names(self, changes: Sequence[SchemaChange], *, key_follows: bool) -> None:
        """Rename columns that were renamed at the source; of the key only if ``key_follows``."""
        for change in changes:
            old, new = change.before, change.after
            if change.kind != "column_renamed" or old is None or new is None:
                continue
            if old not in self.properties or new in self.properties or self._live(old) is not None:
                continue
            if old in self.policy["key"] and not key_follows:
                self.for_a_person.append(
                    f"The key column {old} is called {new} now. The key of events and files cannot be "
                    "changed in their contract: rename the column back, or give the table a home of its own."
                )
                continue
            names = {old: new}
            self.key_is_renamed |= old in self.policy["key"]
            self.policy["key"] = [names.get(each, each) for each in self.policy["key"]]
            self.document["properties"] = {
                names.get(each, each): line for each, line in self.properties.items()
            }
            # Rows from before the change carried a value, under the former name.
            self.properties[new].pop("default", None)
            self.document["required"] = [names.get(each, each) for each in self.document["required"]]
            if old in self.policy.get("pii", {}):
                pii = self.policy["pii"]
                self.policy["pii"] = {names.get(each, each): policy for each, policy in pii.items()}
            events = self.policy["events"]
            events["soft_delete_column"] = names.get(
                events["soft_delete_column"], events["soft_delete_column"]
            )
            self._quality.rename(old, new)
            self._rename_in_policy(old, new)
            self._step(
                BREAKING, f"properties.{new}", f"{old} is called {new}",
                f"events from before the change carry {old}; rows that were not written since have {new} "
                "only after a read of the table",
            )  # fmt: skip

    def follow_key(self, changes: Sequence[SchemaChange]) -> None:
        """Give the contract the key that the table has been given at the source."""
        key, former = self._schema.seen.key, self.policy["key"]
        changed = any(each.kind == "key_changed" for each in changes)
        if not changed or not key or set(key) == set(former):
            return
        self.add(key)
        hidden = [name for name in key if self._policy_of(name) != KEEP]
        unnamed = [name for name in key if name not in self.properties]
        if hidden or unnamed:
            why = "has a policy for personal data" if hidden else "is in no contract"
            self.for_a_person.append(
                f"The table's key is {', '.join(key)} now, and {(hidden or unnamed)[0]} {why}: a key column "
                "must be readable. Write x-cdc.key yourself."
            )
            return
        for name in key:
            if name not in self.document["required"]:
                self._require(name)
        self.policy["key"], self.key_is_renamed = list(key), False
        self._step(
            BREAKING, "x-cdc.key", f"the key is {', '.join(key)}, was {', '.join(former)}",
            "dimension and history begin anew when the table has been read by it, and show it by the former "
            f"key until then{self._read_it}",
        )  # fmt: skip

    def _policy_of(self, name: str) -> str:
        policy: str = self.policy.get("pii", {}).get(name, {}).get("policy", KEEP)
        return policy

    def _require(self, name: str) -> None:
        """Let the column have no NULL any more."""
        line = self.properties[name]
        self.document["required"] = [*self.document["required"], name]
        types = [line["type"]] if isinstance(line["type"], str) else line["type"]
        types = [each for each in types if each != "null"]
        line["type"] = types[0] if len(types) == 1 else types
        if "enum" in line:
            line["enum"] = [each for each in line["enum"] if each is not None]

    def drop(self) -> None:
        """Remove columns that the table no longer has."""
        for name in list(self.properties):
            if self._live(name) is not None:
                continue
            if name in self._needed():
                self.for_a_person.append(f"{name} is gone, which the contract cannot be without.")
                continue
            if self._covered() == {name}:
                self.for_a_person.append(
                    f"{name} is gone. It is the last column with a policy for personal data: without one, "
                    "values of columns that are gone would be uncovered in deduped_events. Leave its "
                    "line, or give another column a policy (x-cdc.pii)."
                )
                continue
            del self.properties[name]
            self.document["required"] = [each for each in self.document["required"] if each != name]
            self.policy.get("pii", {}).pop(name, None)
            self._step(
                BREAKING,
                f"properties.{name}",
                f"{name} is taken out",
                "the table has no such column any more",
            )
            self._taken_out(self._quality.take_out_column(name))

    def _needed(self) -> set[str | None]:
        """Return the columns that the contract needs to be valid."""
        cursor, at_rest = self.policy.get("cursor") or {}, self.policy.get("at_rest", {})
        needed = {*self.policy["key"], self.policy["events"]["soft_delete_column"]}
        needed |= {cursor.get("field"), cursor.get("event_time"), at_rest.get("subject_column")}
        # Needed columns stay readable. The last one that an erasure of a subject empties must stay.
        emptied = self.policy.get("pii", {}).keys() - needed
        return needed | emptied if self._names_subject and len(emptied) == 1 else needed

    def _covered(self) -> set[str]:
        """Return the columns that a policy covers. If any, columns without an entry stay covered too.

        Empty where personal values land encrypted: then columns without an entry land encrypted too.
        """
        policies = {} if self._encrypted else self.policy.get("pii", {})
        return {name for name, each in policies.items() if each["policy"] != KEEP}

    @property
    def _encrypted(self) -> bool:
        encrypted: bool = self.policy.get("at_rest", {}).get("pii") == ENCRYPTED
        return encrypted

    @property
    def _names_subject(self) -> bool:
        at_rest: dict[str, Any] = self.policy.get("at_rest", {})
        return self._encrypted or len(at_rest) > 1

    def _rename_in_policy(self, old: str, new: str) -> None:
        """Rename a column in the parts of ``x-cdc`` other than key, personal data and soft deletes."""
        cursor, at_rest = self.policy.get("cursor") or {}, self.policy.get("at_rest", {})
        named = [*((cursor, each) for each in ("field", "event_time")), (at_rest, "subject_column")]
        named += [(each, "column") for each in cursor.get("candidates", ())]
        for part, member in named:
            if part.get(member) == old:
                part[member] = new

    def _taken_out(self, found: Iterable[TakenOut]) -> None:
        for each in found:
            self._step(BREAKING, each.at, each.what, each.why)

    def follow(self, name: str, renamed_values: Collection[str | None]) -> None:
        """Make the column accept all values that the source may send.

        ``renamed_values``: the columns of which a listed value was renamed or removed.
        """
        live = self._live(name)
        if live is None:
            return
        line = self.properties[name]
        declared = _length(line["x-pg-type"])
        self._follow_type(name, line, live)
        if not live.not_null and name in self.document["required"] and name not in self.policy["key"]:
            self._let_be_null(name)
            self._step(
                WIDENING, "required", f"{name} may be NULL", "the source has no NOT NULL on it any more"
            )
        unlisted = [label for label in live.labels if "enum" in line and label not in line["enum"]]
        if unlisted:
            line["enum"] = [*unlisted, *line["enum"]] if None in line["enum"] else [*line["enum"], *unlisted]
            why = "rows with a value that is not listed are quarantined"
            if name in renamed_values:
                why += f"; rows that were not written since have the value of before{self._read_it}"
            self._step(WIDENING, f"properties.{name}.enum", f"{name} may be {', '.join(unlisted)}", why)
        length = line.get("maxLength")
        # A limit below that of the type, or on a type without one, is a rule that somebody wrote.
        of_type = length is not None and declared is not None and length >= declared
        if of_type and (live.max_length or length + 1) > length:
            if live.max_length is None:
                del line["maxLength"]
                _without_policies(line, "maxLength")
            else:
                line["maxLength"] = live.max_length
            limit = "any length" if live.max_length is None else f"{live.max_length} characters"
            self._step(
                WIDENING,
                f"properties.{name}.maxLength",
                f"{name} may have {limit}",
                "longer values are quarantined",
            )

    def _let_be_null(self, name: str) -> None:
        line = self.properties[name]
        self.document["required"] = [each for each in self.document["required"] if each != name]
        _without_policies(line, "required")
        types = line["type"] if isinstance(line["type"], list) else [line["type"]]
        line["type"] = [*types, "null"]
        if "enum" in line:
            line["enum"] = [*line["enum"], None]

    def _follow_type(self, name: str, line: dict[str, Any], live: LiveColumn) -> None:
        before, now = PgType.parse(line["x-pg-type"]), live.type
        if fit(before, now) is Fit.ALL or line["x-pg-type"] == live.pg_type:
            return
        was = line["x-pg-type"]
        if not keeps_values(was, live.pg_type):
            # A text of the former type, which the server has converted in the rows.
            line.pop("default", None)
        body = column_document(live, name in self.policy["key"])
        for key in ("type", "x-pg-type", "items"):
            line.pop(key, None)
            if key in body:
                line[key] = body[key]
        # NULL is judged separately: the contract may allow it although the source does not, or still forbid
        # it although the source now allows it.
        types = [body["type"]] if isinstance(body["type"], str) else body["type"]
        types = [each for each in types if each != "null"]
        nullable = name not in self.document["required"]
        line["type"] = [*types, "null"] if nullable else types[0] if len(types) == 1 else types
        gone: list[str] = []
        if now.kind is not before.kind:
            # The rules were written for another kind of value.
            gone = [f"{rule} {line.pop(rule)}" for rule in _RULES if rule in line]
            _without_policies(line, *_RULES, *(["type"] if now.kind is Kind.TEXT else []))
        kept = self._former_types(name, line, was, now)
        self._follow_policy(name, live)
        widens = fit(now, before) is Fit.ALL and now.kind.name != "TEXT"
        why = (
            "values that came before have their place in it"
            if fit(now, before) is Fit.ALL
            else "values that came before and have no place in it are NULL, with their exact text in "
            f"_cdc_exact{'' if kept else ', or quarantined'}"
        )
        if not widens:
            why += "; `omnisupport-ingest contracts retype` lets readers have it"
        description = f"{name} is {live.pg_type}, was {was}"
        if gone:
            description += f", and its rules are taken out ({', '.join(gone)})"
        self._step(WIDENING if widens else BREAKING, f"properties.{name}.x-pg-type", description, why)

    def _former_types(self, name: str, line: dict[str, Any], was: str, now: PgType) -> bool:
        """Let the column keep the values from before its type changed; return whether it does."""
        former = [was, *line.pop("x-former-types", ())]
        if name in self.policy["key"]:
            return False
        unfit = [each for each in dict.fromkeys(former) if fit(now, PgType.parse(each)) is Fit.NONE]
        if unfit:
            line["x-former-types"] = unfit
        return True

    def _follow_policy(self, name: str, live: LiveColumn) -> None:
        """Leave the column out of the lake if its policy for personal data does not fit its new type."""
        given = self.policy.get("pii", {}).get(name)
        if given is None or takes(given["policy"], live.type.kind):
            return
        self.policy["pii"][name] = {"policy": DROP, "note": given["note"]}
        self.for_a_person.append(
            f"x-cdc.pii.{name} leaves the column out until you decide: its policy was {given['policy']}, "
            f"which cannot be applied to {live.pg_type}."
        )

    def judge_rules(self) -> None:
        """Remove rules over several columns that do not fit the columns' new types."""
        if self.steps:
            self._taken_out(self._quality.take_out_unfit(self.properties))

    def add(self, names: Collection[str | None] | None) -> None:
        """Add columns that the contract does not name. ``names``: only these; None: all."""
        left_out = {each.column: each.why for each in left_out_columns(self._schema.live)}
        for live in self._schema.live.columns:
            if live.name in self.properties or (names is not None and live.name not in names):
                continue
            if not live.pg_type:
                self.for_a_person.append(
                    f"{live.name} is new, and nothing tells its type: write it into the contract yourself."
                )
                continue
            if live.name in left_out:
                self.for_a_person.append(f"{live.name} stays in the raw layers: {left_out[live.name]}.")
                continue
            line = self._schema.line(live.name)
            self.properties[live.name] = line
            self.added.append(live.name)
            if live.not_null:
                self.document["required"] = [*self.document["required"], live.name]
            known = (
                f"rows from before the change have {line['default'] or 'NULL'} in it"
                if "default" in line
                else "nothing that has landed says what rows from before the change have in it"
                + self._read_it
            )
            self._step(
                ADDITIVE, f"properties.{live.name}", f"{live.name} ({live.pg_type}) is taken in", known
            )

    def let_vary(self, before: Collection[str], changes: Sequence[SchemaChange]) -> None:
        """Let rows have or lack the columns in which rows that have landed differ from the contract.

        Else those would wait (``row_columns``). ``before``: the columns that the contract had. A column that
        a person has to write into it is not among them: its rows go on waiting.
        """
        came = {each.column for each in changes if each.kind == "column_added"}
        gone = {each.column for each in changes if each.kind == "column_dropped"} | {*before}
        names = {*self.added, *(came & self.properties.keys()), *(gone - self.properties.keys())}
        names |= {
            each.name
            for each in self._schema.live.columns
            if each.name not in self.properties and (each.pg_type or each.name not in came)
        }
        for name in sorted(
            {each.name for each in self._schema.live.columns} - self.properties.keys() - names
        ):
            self.for_a_person.append(
                f"With {name}, write it into x-cdc.optional_columns too: rows from before are without it."
            )
        known = self.policy.get("optional_columns", [])
        new = sorted(each for each in names if each is not None and each not in known)
        if new:
            self.policy["optional_columns"] = [*known, *new]
            self._step(
                ADDITIVE, "x-cdc.optional_columns", f"a row may have or lack {', '.join(new)}",
                "rows that landed before the contract followed have other columns than those after",
            )  # fmt: skip

    def set_personal(self, policies: dict[str, Any]) -> None:
        """Give new columns their policies for personal data."""
        self.policy["pii"] = self.policy.get("pii", {}) | policies
        for name in policies:
            if self._names_subject and name in self.document["required"]:
                # It becomes NULL when its subject is erased; the source keeps its NOT NULL.
                self._let_be_null(name)

    def keep_covered(self, given: dict[str, Any], renamed: dict[str, str]) -> None:
        """Give columns the policies that they had under the names that they have in ``renamed``.

        ``given``: the policies for personal data, by those names.
        """
        for name, former in renamed.items():
            live = self._live(name)
            if live is None or name not in self.properties or name in self.policy.get("pii", {}):
                continue
            policy = given[former]
            if name in self.policy["key"] or (name not in self.added and policy["policy"] == KEEP):
                continue
            self.set_personal({name: dict(policy)})
            self._follow_policy(name, live)
            self.for_a_person.append(
                f"{name} has the policy {policy['policy']} for personal data, as it was called {former} when "
                f"that was given one. Decide about {name}, and about {former} if the contract still has it."
            )
            if name not in self.added:
                self._step(
                    BREAKING, f"x-cdc.pii.{name}", f"{name} has the policy {policy['policy']}",
                    f"it holds now what {former} held",
                )  # fmt: skip

    def add_undecided(self, changes: Sequence[SchemaChange], *, key_follows: bool) -> None:
        """Add changes that no edit of the contract covers to ``for_a_person``."""
        key = self._schema.seen.key
        if key and set(key) != set(self.policy["key"]):
            follow = f"If the contract is to follow, write its x-cdc.key{self._read_it}."
            stay = "The key of events and files cannot be changed; a home of its own takes it in."
            self.for_a_person.append(
                f"The table's key is {', '.join(key)}, the contract's {', '.join(self.policy['key'])}. "
                f"{follow if key_follows else stay}"
            )
        for change in changes:
            if change.kind == "table_renamed" and change.after == self._schema.seen.name:
                self.for_a_person.append(
                    f"The table is called {change.after} now. Events bear the name that it had: rename it "
                    "back, or write a contract for the new name (contracts new): it begins with a snapshot."
                )
            if change.kind == "column_added_again" and change.column in self.properties:
                self.for_a_person.append(
                    f"{change.column} was dropped and added again: rows that were not written since have "
                    f"another value than their last event{self._read_it}."
                )

    def _live(self, name: str) -> LiveColumn | None:
        live = self._schema.live.column(name)
        return None if live is None or live.generated else live

    def _step(self, compatibility: str, at: str, description: str, why: str) -> None:
        self.steps.append(Step(compatibility, at, description, why))


def _length(pg_type: str) -> int | None:
    """Return the n of ``varchar(n)`` and ``char(n)``; None for any other type."""
    found = re.fullmatch(r"(?:character varying|character|varchar|char)\((\d+)\)", pg_type.lower())
    return None if found is None else int(found.group(1))


def _without_policies(line: dict[str, Any], *keywords: str) -> None:
    """Remove the policies (``x-policy``) of rules that the column no longer has."""
    x_policy = line.get("x-policy", {})
    for keyword in keywords:
        x_policy.pop(keyword, None)
    if "x-policy" in line and not x_policy:
        del line["x-policy"]
