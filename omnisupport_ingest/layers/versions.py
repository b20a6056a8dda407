"""Versions: what makes a window stale when it changes, and how the stale window is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from omnisupport_ingest.contracts.decision_table import (
    CONTRACT_CHANGE,
    CONTRACT_VERSION,
    REVIEW_DECISION,
    REVIEW_LEDGER,
    WAIT,
    DecisionTable,
    DetectedScenario,
)
from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pii_keys import current_version
from omnisupport_ingest.contracts.pii_policies import HASH, TOKENIZE
from omnisupport_ingest.contracts.protection import has_policy, needs_protection
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.erasures import SUBJECT_KEYS, VERSION, ErasureLedger
from omnisupport_ingest.layers.plan import LOGIC_VERSION
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.workspace import Workspace

_CONTRACT_CHANGE = CONTRACT_VERSION.found(CONTRACT_CHANGE)
_FOUND = {
    "contract": _CONTRACT_CHANGE,
    "decisions": _CONTRACT_CHANGE,
    "pii_key": _CONTRACT_CHANGE,
    "pii_tokens": _CONTRACT_CHANGE,
    "reviews": REVIEW_LEDGER.found(REVIEW_DECISION),
}
"""What a version is of → the finding if it has changed. A kind that is missing here never waits: an erasure
is carried out by the next run."""

ERASURE, DESTROYED_KEY, POLICY = "erasure", "destroyed key", "policy"

_WORDS = {
    "logic": "logic version",
    "contract": "contract",
    "decisions": "decision table",
    "pii_key": "key of hashes",
    "pii_tokens": "map of tokens",
    "reviews": "review decision",
    "erasures": ERASURE,
    "subject_keys": DESTROYED_KEY,
    "policies": POLICY,
    "purge": "purge of deleted rows",
}


RULES = frozenset({_WORDS["logic"], _WORDS["contract"]})
"""What may change the fold of the same events."""


class RulesVersions:
    """The versions by which a source's events are judged. They are the same for all windows, except for
    reviews, erasures and destroyed keys.

    ``row_columns``: as of ``judging.JudgingRules``.
    """

    def __init__(self, workspace: Workspace, source: str) -> None:
        contracts = workspace.contracts.of_source(source)
        self.row_columns = _row_columns(workspace, source, contracts)
        self._common = (
            f"logic:{LOGIC_VERSION}",
            *(f"{CONTRACT}{contract.name}:{self._judged_by(contract)}" for contract in contracts),
            f"decisions:{workspace.decisions.fingerprint}",
            *_of_secrets(workspace, contracts),
        )
        self._names = {contract.name: contract.full_name for contract in contracts}
        self._protecting = {contract.name for contract in contracts if needs_protection(contract)}
        self.reviews = ReviewLedger.open(workspace, source)
        self.erasures = ErasureLedger.open(workspace, source)
        self._destroyed = workspace.subjects.destroyed_by_window(source)

    def _judged_by(self, contract: TableContract) -> str:
        columns = self.row_columns.get(contract.table_name)
        return contract.judged_by if columns is None else columns.version(contract.judged_by)

    def of_contracts(self) -> dict[str, str]:
        """Return the versions of the contracts, each with the contract's name."""
        return {each: _contract_of(each) for each in self._common if each.startswith(CONTRACT)}

    def common(self) -> tuple[str, ...]:
        """The versions of every window."""
        return self._common

    def apart(self) -> dict[str, tuple[str, ...]]:
        """Return the versions of windows that have more than the common ones, by window."""
        named = {*self.reviews.windows(), *self.erasures.windows(), *self._destroyed}
        return {window: self.of(window) for window in named}

    def of_held(
        self, window: str, state: WindowState | None, landed: Callable[[], Collection[LandedPart]]
    ) -> tuple[str, ...]:
        """Return the versions that ``window``, held with ``state``, should have. ``landed``: returns what has
        landed in it.

        If a table has no event in the window, its contract counts as unchanged: no verdict depends on it. So
        does a secret that only the policies of such tables use.
        """
        wanted = self.of(window)
        if state is None or wanted == state.versions:
            return wanted
        parts = landed()
        if not frozenset(state.batches) <= {part.batch_id for part in parts}:
            # Batches that landing has forgotten may be of any table.
            return wanted
        here = {table for part in parts for table in part.rows_per_table}
        if not here <= set(self._names.values()) and self._protect_otherwise(state.versions):
            # Events without a contract are protected while one table of the source is.
            return wanted
        held = {_contract_of(each): each for each in state.versions if each.startswith(CONTRACT)}
        absent = {name for name, table in self._names.items() if table not in here}
        kept = []
        for each in wanted:
            name = _contract_of(each) if each.startswith(CONTRACT) else ""
            if name not in absent:
                kept.append(each)
            elif name in held:
                kept.append(held[name])
        # The first or last policy of a kind adds or removes the version of its secret.
        return state.versions if contracts_changed(state.versions, kept) == frozenset() else tuple(kept)

    def _protect_otherwise(self, held: Collection[str]) -> bool:
        """Whether contracts protect values now, and possibly none did in the ``held`` versions; or the
        reverse."""
        of_contracts = {each for each in held if each.startswith(CONTRACT)}
        unchanged = {_contract_of(each) for each in of_contracts & {*self._common}}
        if self._protecting:
            return not self._protecting & unchanged
        # A contract that changed or is gone may have protected; a secret is of policies alone.
        return len(unchanged) < len(of_contracts) and any(each.partition(":")[0] in _SECRETS for each in held)

    def of(self, window: str) -> tuple[str, ...]:
        """The versions that ``window`` should be made with."""
        reviews = self.reviews.digest(window)
        return (
            *self._common,
            *(() if reviews is None else (f"reviews:{reviews}",)),
            *self.of_erased(window),
        )

    def of_erased(self, window: str) -> tuple[str, ...]:
        """Return those versions that say which values ``window`` must not have: erasures, destroyed keys."""
        erasures, destroyed = self.erasures.digest(window), self._destroyed.get(window)
        return (
            *(() if erasures is None else (f"{VERSION}{erasures}",)),
            *(() if destroyed is None else (f"{SUBJECT_KEYS}{destroyed}",)),
        )


def _row_columns(
    workspace: Workspace, source: str, contracts: Sequence[TableContract]
) -> dict[TableName, RowColumns]:
    # Definitions are read only where one may say something.
    if not any(each.evolution == BLOCK for each in contracts):
        return {}
    return workspace.definition(source).row_columns(contracts)


def _of_secrets(workspace: Workspace, contracts: Sequence[TableContract]) -> Iterator[str]:
    """Versions of the secrets that policies for personal data use."""
    if has_policy(contracts, HASH):
        yield f"pii_key:{current_version(workspace.settings.pii_keys)}"
    if has_policy(contracts, TOKENIZE):
        yield f"pii_tokens:{workspace.tokens.version()}"


def of_contract(contract: TableContract) -> tuple[str, ...]:
    """Versions by which the events of one table are folded."""
    return (f"logic:{LOGIC_VERSION}", f"contract:{contract.fingerprint}")


def is_current(held: Sequence[str], wanted: Sequence[str], decisions: DecisionTable) -> bool:
    """Whether a window made with ``held`` versions needs no run: they are ``wanted``, or the window may
    wait."""
    changed = {_kind(each) for each in set(held) ^ set(wanted)}
    return not changed or changed <= kinds_that_wait(decisions)


def kinds_that_wait(decisions: DecisionTable) -> frozenset[str]:
    """Return the kinds of versions for whose change alone no window is made again, by ``decisions``."""
    return frozenset(kind for kind, found in _FOUND.items() if decisions.action(found.scenario) == WAIT)


def found_in(held: Sequence[str], wanted: Sequence[str]) -> frozenset[DetectedScenario]:
    """Return the scenarios for which a window that was made with ``held`` versions is rebuilt."""
    changed = {_kind(each) for each in set(held) ^ set(wanted)}
    return frozenset(_FOUND[kind] for kind in changed & _FOUND.keys())


def contracts_changed(held: Collection[str], wanted: Collection[str]) -> frozenset[str] | None:
    """Return the names of the contracts whose change alone tells ``held`` versions from ``wanted``; None if
    something else differs too.

    The version of a secret that only one side has is no other difference: no unchanged contract uses it.
    """
    differing = set(held) ^ set(wanted)
    kinds = [_kind(each) for each in differing if not each.startswith(CONTRACT)]
    if not set(kinds) <= _SECRETS or len(set(kinds)) < len(kinds):
        return None
    return frozenset(_contract_of(each) for each in differing if each.startswith(CONTRACT))


def of_table(versions: Collection[str], name: str) -> tuple[str, ...]:
    """Return those of a window's ``versions`` on which events of the table called ``name`` may depend: all
    but the contracts of other tables, and the policies of all. Where these changed an event, its hash says
    so."""
    others = (each for each in versions if each.startswith(CONTRACT) and _contract_of(each) != name)
    policies = (each for each in versions if each.startswith(POLICIES))
    return tuple(sorted({*versions}.difference(others, policies)))


def changes(held: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return what differs, in words for people: ``contract``, ``review decision``, …"""
    found = {_kind(each) for each in set(held) ^ set(wanted)}
    return tuple(word for kind, word in _WORDS.items() if kind in found)


CONTRACT = "contract:"
POLICIES = "policies:"
"""Prefix of the version of a sealed window whose values were rewritten; the rest is JSON
(``stored_policies.tables_to_text``)."""

_SECRETS = frozenset({"pii_key", "pii_tokens"})


def _contract_of(version: str) -> str:
    return version.split(":")[1]


def _kind(version: str) -> str:
    return version.partition(":")[0]
