"""What the stored events of a sealed window need so that they have the policies for personal data in force.

This is the one rule: from the policies that were recorded, the contracts that judged the window and those in
force now. Of **accepted** events nothing is guessed: what nobody knows stays as it is. What is **withheld**
in quarantine may be plain unless it is known not to be; nobody can release it, so it is covered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.contracts.stored_policies import UNKNOWN, StoredTable


@dataclass(frozen=True)
class Record:
    """What the state of a window says of its policies since it was rewritten.

    ``tables``: by full name, those that were changed. ``covered``, ``withheld_covered``: whether events of
    tables without a contract, accepted and in quarantine, have lost their images.
    """

    tables: Mapping[str, StoredTable] = field(default_factory=dict)
    covered: bool = False
    withheld_covered: bool = False

    def to_text(self) -> str:
        """Return one line of JSON."""
        plain = {
            "covered": [self.covered, self.withheld_covered],
            "tables": {name: each.to_plain() for name, each in self.tables.items()},
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Record:
        """Raises ``ValueError`` if ``to_text`` does not write ``text``."""
        plain: Any = json.loads(text)
        match plain:
            case {"covered": [bool(accepted), bool(withheld)], "tables": dict(tables)}:
                read = {str(name): StoredTable.from_plain(each) for name, each in tables.items()}
                return cls(read, accepted, withheld)
        raise ValueError("this is no record of policies")


@dataclass(frozen=True)
class Judging:
    """By which contracts a window was judged.

    ``known``: the policies of those on record, by table. ``unknown``: the names of the others.
    """

    known: Mapping[TableName, StoredTable] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredWindow:
    """The policies by which the values of a sealed window were made.

    ``tables``: by full name, every table that a contract has named. ``covered`` and ``withheld_covered``: as
    in ``Record``. ``uncertain``: a contract that nobody knows has named a table that nobody knows; so an
    accepted event without a contract may be one of these.
    """

    tables: Mapping[str, StoredTable]
    covered: bool
    withheld_covered: bool
    uncertain: bool = False

    @classmethod
    def of(
        cls, record: Record | None, judging: Judging, contracts: Collection[TableContract]
    ) -> StoredWindow:
        """``record``: None if the window was never rewritten. ``contracts``: those in force."""
        # A name is that of one table of the lake, so only the policies of its contract are unknown.
        uncertain = not judging.unknown <= {each.name for each in contracts}
        tables = {".".join(place): each for place, each in judging.known.items()}
        for each in contracts:
            # A table that no contract named had no policy.
            known = not uncertain and each.name not in judging.unknown
            tables.setdefault(each.full_name, StoredTable() if known else StoredTable(default=UNKNOWN))
        if record is not None:
            return cls({**tables, **record.tables}, record.covered, record.withheld_covered, uncertain)
        judged = judging.known.values()
        return cls(
            tables,
            any(each.protected for each in judged),
            any(each.withheld_protected for each in judged),
            uncertain,
        )

    def after(self, contracts: Sequence[TableContract], waiting: Collection[str] = ()) -> StoredWindow:
        """Return the window once ``contracts`` are applied to it as far as they can, and events by them have
        come to its quarantine. Applied again, they change nothing.

        ``waiting``: the names of contracts whose tables wait for a person. These tables' accepted events stay
        as they are.
        """
        protecting = {each.name for each in contracts if needs_protection(each)}
        in_force = {each.full_name for each in contracts}
        # Without a policy of the source, events of a table whose contract is away come plain.
        away = {
            name: each if protecting else each.with_plain()
            for name, each in self.tables.items()
            if name not in in_force
        }
        now = {
            each.full_name: self.tables[each.full_name].after(each, waits=each.name in waiting)
            for each in contracts
        }
        applied = bool(protecting.difference(waiting))
        covered = self.covered or (applied and not self.uncertain)
        return StoredWindow({**away, **now}, covered, bool(protecting), self.uncertain)

    def changed(self, after: StoredWindow) -> frozenset[str]:
        """Return the full names of the tables that differ in ``after``."""
        return frozenset(name for name, each in after.tables.items() if each != self.tables.get(name))

    def is_uncovered(self, contracts: Collection[TableContract]) -> bool:
        """Whether accepted events of tables without a contract keep their images under ``contracts``, because
        one that nobody knows may have named them."""
        return self.uncertain and not self.covered and any(map(needs_protection, contracts))
