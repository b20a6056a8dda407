"""What becomes of stored values when a policy for personal data changes and the values that landed are gone.

A stored value that was kept plain can still be protected by any policy. What is masked, hashed or a token can
only be dropped, or hidden whole: its value is not known any more. A laxer policy brings nothing back. Values
in quarantine that cannot be protected are emptied, because nobody can release their events any more.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import pyarrow as pa

from omnisupport_ingest.contracts.masks import OWN
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_policies import DROP, KEEP, MASK
from omnisupport_ingest.contracts.protection import Protect, Protection, needs_protection

UNKNOWN = "unknown"
"""The policy of values of which nobody has recorded it: they may be plain."""

HIDDEN_WHOLE = f"{MASK}:text"
"""The one mask that does not depend on the value."""


class Step(Enum):
    """What is done to the stored values of one column. ``EMPTY``: each becomes NULL. ``REMOVE``: the images
    lose the column."""

    STAY = "stay"
    PROTECT = "protect"
    EMPTY = "empty"
    REMOVE = "remove"


def policy_text(column: Column) -> str:
    """Return the policy of ``column`` as one text; different masks are different policies."""
    if column.mask is None:
        return column.pii
    text = f"{MASK}:{column.mask.form}"
    if column.mask.form != OWN:
        return text
    # Written as JSON, so that no two masks have one text.
    return f"{text}:{json.dumps([column.mask.pattern, column.mask.replacement])}"


def of_accepted(stored: str, wanted: str) -> tuple[str, Step]:
    """Return the policy that values made by ``stored`` have once ``wanted`` is applied as far as possible,
    and the step to it."""
    if stored in (wanted, DROP) or wanted == KEEP:
        return stored, Step.STAY
    if wanted == DROP:
        return wanted, Step.REMOVE
    if stored == KEEP or wanted == HIDDEN_WHOLE:
        return wanted, Step.PROTECT
    return stored, Step.STAY


def of_withheld(stored: frozenset[str], wanted: str) -> tuple[frozenset[str], Step]:
    """Do as ``of_accepted`` for values in quarantine, each made by one of the policies ``stored``.

    They may be several: to a sealed window events come later, too, each by the policy of its day.
    """
    if wanted == KEEP:
        return (stored if UNKNOWN in stored else stored | {KEEP}), Step.STAY
    if wanted == DROP:
        return frozenset(), Step.REMOVE if stored else Step.STAY
    after = frozenset({wanted})
    if stored <= after:
        return after, Step.STAY
    return after, Step.PROTECT if stored == {KEEP} or wanted == HIDDEN_WHOLE else Step.EMPTY


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """The policies by which the stored values of a column were made: those of ``accepted`` events by one,
    those in quarantine (``withheld``) by any of these."""

    accepted: str
    withheld: frozenset[str]

    @classmethod
    def made_by(cls, policy: str) -> StoredColumn:
        return cls(policy, frozenset({policy} - {DROP}))


@dataclass(frozen=True)
class StoredTable:
    """The policies by which the stored values of a table's events were made.

    ``protected``: whether accepted events have lost the columns that no contract named, and their lines;
    ``withheld_protected``: whether those in quarantine have, to which some come when no policy is in force.
    ``default``: the policy of columns that ``columns`` lacks: ``KEEP``, or ``UNKNOWN``.
    """

    protected: bool = False
    withheld_protected: bool = False
    columns: Mapping[str, StoredColumn] = field(default_factory=dict)
    default: str = KEEP

    @classmethod
    def of(cls, contract: TableContract) -> StoredTable:
        """Return what events have that are judged by ``contract``."""
        return cls(protected=needs_protection(contract)).after(contract)

    def column(self, name: str) -> StoredColumn:
        return self.columns.get(name, StoredColumn.made_by(self.default))

    def steps(self, contract: TableContract) -> Mapping[str, tuple[Step, Step]]:
        """Return the steps by which the policies of ``contract`` reach the stored values: for accepted events
        and for those in quarantine, by column."""
        return {name: (steps[0][1], steps[1][1]) for name, steps in self._changes(contract).items()}

    def after(self, contract: TableContract, *, waits: bool = False) -> StoredTable:
        """Return the policies of the values after these steps. Taken again, no step changes anything.
        ``waits``: the values of accepted events are to stay as they are."""
        now = needs_protection(contract)
        # What a contract without policies does not name comes to quarantine plain.
        was = self if now else self.with_plain()
        changed = {
            name: StoredColumn(self.column(name).accepted if waits else accepted[0], withheld[0])
            for name, (accepted, withheld) in self._changes(contract).items()
        }
        return was._with(changed, protected=self.protected or (now and not waits), withheld_protected=now)

    def with_plain(self) -> StoredTable:
        """Return the policies of the values after events have come to quarantine as they landed."""
        changed = {
            name: replace(each, withheld=of_withheld(each.withheld, KEEP)[0])
            for name, each in self.columns.items()
        }
        return self._with(changed, protected=self.protected, withheld_protected=False)

    def _with(
        self, changed: Mapping[str, StoredColumn], *, protected: bool, withheld_protected: bool
    ) -> StoredTable:
        usual = StoredColumn.made_by(self.default)
        columns = {name: each for name, each in {**self.columns, **changed}.items() if each != usual}
        return StoredTable(protected, withheld_protected, columns, self.default)

    def kept(self, contract: TableContract) -> Mapping[str, str]:
        """Return the columns of which accepted events have other values than ``contract`` says, each with the
        policy that made them. Of dropped values nothing is left to be otherwise."""
        found = {each.name: self.column(each.name).accepted for each in contract.source_columns}
        wanted = {each.name: policy_text(each) for each in contract.source_columns}
        # Nobody asks by which policy values were made that may be plain.
        return {
            name: policy
            for name, policy in found.items()
            if policy not in (DROP, wanted[name]) and (policy, wanted[name]) != (UNKNOWN, KEEP)
        }

    def to_plain(self) -> dict[str, object]:
        """Return it as JSON; ``from_plain`` reads it."""
        columns = {name: [each.accepted, sorted(each.withheld)] for name, each in self.columns.items()}
        protected = [self.protected, self.withheld_protected]
        return {"protected": protected, "default": self.default, "columns": columns}

    @classmethod
    def from_plain(cls, plain: object) -> StoredTable:
        """Raises ``ValueError`` if ``to_plain`` does not write ``plain``."""
        match plain:
            case {
                "protected": [bool(accepted), bool(withheld)],
                "default": str(default),
                "columns": dict(each),
            }:
                return cls(accepted, withheld, dict(map(_read_column, each.items())), default)
        raise ValueError("this is no record of policies")

    def _changes(
        self, contract: TableContract
    ) -> Mapping[str, tuple[tuple[str, Step], tuple[frozenset[str], Step]]]:
        return {
            each.name: (
                of_accepted((stored := self.column(each.name)).accepted, wanted := policy_text(each)),
                of_withheld(stored.withheld, wanted),
            )
            for each in contract.source_columns
        }


def _read_column(item: tuple[str, object]) -> tuple[str, StoredColumn]:
    match item:
        case (str(name), [str(accepted), list(withheld)]) if all(isinstance(each, str) for each in withheld):
            return name, StoredColumn(accepted, frozenset(withheld))
    raise ValueError("this is no record of policies")


@dataclass(frozen=True)
class StoredProtection(Protection):
    """Protects stored row images by the steps from ``stored`` to the policies of the contract. ``accepted``:
    whether the images are of accepted events, or in quarantine."""

    stored: StoredTable = field(default_factory=StoredTable)
    accepted: bool = True

    @cached_property
    def columns(self) -> Mapping[str, Protect]:
        steps = self._steps
        found: dict[str, Protect] = {
            each.name: self._of(each)
            for each in self.contract.source_columns
            if steps[each.name] is Step.PROTECT
        }
        return found | dict.fromkeys((name for name, step in steps.items() if step is Step.EMPTY), _emptied)

    @cached_property
    def kept(self) -> Container[str]:
        stored = self.stored
        if not (stored.protected if self.accepted else stored.withheld_protected):
            return super().kept
        # A column that the contract has ceased to name stays: nobody gave it another policy.
        return _AllBut(frozenset(name for name, step in self._steps.items() if step is Step.REMOVE))

    @cached_property
    def _steps(self) -> Mapping[str, Step]:
        return {
            name: of_accepted if self.accepted else of_withheld
            for name, (of_accepted, of_withheld) in self.stored.steps(self.contract).items()
        }


def _emptied(texts: pa.StringArray) -> pa.StringArray:
    return pa.nulls(len(texts), pa.string())


@dataclass(frozen=True, slots=True)
class _AllBut(Container[str]):
    removed: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name not in self.removed
