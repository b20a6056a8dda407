"""Stored values follow their policy: nothing is protected twice, and what may not stay plain does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.masks import Mask
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pii_policies import DROP, HASH, KEEP, MASK, TOKENIZE, lake_columns
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.contracts.stored_policies import (
    HIDDEN_WHOLE,
    UNKNOWN,
    Step,
    StoredColumn,
    StoredProtection,
    StoredTable,
    of_accepted,
    of_withheld,
    policy_text,
)
from omnisupport_ingest_tests.cdc.test_decrypting import ENCRYPTED

NAME = "mask:name"
POLICIES = [KEEP, DROP, HASH, TOKENIZE, NAME, "mask:email", HIDDEN_WHOLE]

Value = tuple[str, ...]
"""A value as the policies that were applied to it, one after another; None: NULL, or no such column."""


def stepped(value: Value | None, step: Step, wanted: str) -> Value | None:
    if value is None or step is Step.STAY:
        return value
    return (*value, wanted) if step is Step.PROTECT else None


def judged(policy: str) -> Value | None:
    """A value of an event that is judged by ``policy``."""
    return None if policy == DROP else () if policy == KEEP else (policy,)


def is_right(value: Value | None) -> bool:
    """Whether no value was protected twice, but for hiding it whole."""
    return value is None or len([each for each in value if each != HIDDEN_WHOLE]) <= 1


@given(st.lists(st.tuples(st.sampled_from(POLICIES), st.booleans()), min_size=1, max_size=8))
def test_values_follow_every_change_as_far_as_they_can(changes: list[tuple[str, bool]]) -> None:
    """``changes``: the policies in turn, and whether an event comes to quarantine by each."""
    (first, _), *later = changes
    stored, accepted = StoredColumn.made_by(first), judged(first)
    withheld = [judged(first)]
    for wanted, comes in later:
        (now, step), (those, other) = (
            of_accepted(stored.accepted, wanted),
            of_withheld(stored.withheld, wanted),
        )
        accepted = stepped(accepted, step, wanted)
        withheld = [stepped(each, other, wanted) for each in withheld]
        stored = StoredColumn(now, those)
        # A second call changes nothing.
        assert of_accepted(now, wanted) == (now, Step.STAY)
        assert of_withheld(those, wanted) == (those, Step.STAY)
        if comes:
            withheld.append(judged(wanted))
        assert is_right(accepted) and all(map(is_right, withheld))
        if wanted != KEEP:
            assert accepted != () and () not in withheld
            # In quarantine every value is as the policy says, or gone.
            assert {each[-1:] for each in withheld if each is not None} <= {(wanted,)}
        if wanted == DROP:
            assert accepted is None and set(withheld) == {None}
        if accepted is not None:
            assert (accepted[-1:] or (KEEP,)) == (stored.accepted,)


@given(
    st.lists(
        st.tuples(st.sampled_from([KEEP, HASH, NAME, DROP, None]), st.sampled_from([KEEP, HASH])),
        min_size=2,
        max_size=7,
    )
)
def test_in_quarantine_no_value_stays_plain_and_none_is_protected_twice(
    changes: list[tuple[str | None, str]],
) -> None:
    """``changes``: the policies in turn of a column that may not be named (None), and of another. An event
    comes to quarantine by each contract."""
    held: list[Value | None] = []
    stored: StoredTable | None = None
    for wanted, other in changes:
        mask = Mask("name") if wanted == NAME else None
        named = [] if wanted is None else [column("a", MASK if mask else wanted, mask)]
        contract = contract_of(*named, column("b", other))
        protects = needs_protection(contract)
        if stored is not None:
            step = stored.steps(contract)["a"][1] if wanted is not None else Step.STAY
            stripped = wanted is None and protects and not stored.withheld_protected
            held = [None if stripped else stepped(each, step, wanted or KEEP) for each in held]
            stored = stored.after(contract)
        else:
            stored = StoredTable.of(contract)
        assert stored.after(contract) == stored
        assert all(map(is_right, held))
        if wanted not in (None, KEEP):
            assert () not in held and {each[-1:] for each in held if each} <= {(wanted,)}
        if wanted is None:
            held.append(None if protects else ())
        else:
            held.append(judged(wanted))


@given(st.sampled_from(POLICIES))
def test_of_values_that_nobody_knows_the_policy_of_only_what_is_certain_is_done(wanted: str) -> None:
    certain = {DROP: Step.REMOVE, HIDDEN_WHOLE: Step.PROTECT}
    assert of_accepted(UNKNOWN, wanted)[1] is certain.get(wanted, Step.STAY)
    usual = Step.STAY if wanted == KEEP else Step.EMPTY
    assert of_withheld(frozenset({UNKNOWN}), wanted)[1] is certain.get(wanted, usual)


def column(name: str, policy: str, mask: Mask | None = None) -> Column:
    return Column(name, "text", pii=policy, personal=True, mask=mask)


def contract_of(*columns: Column) -> Any:
    return replace(ENCRYPTED, subject=None, columns=lake_columns(columns), unprotected=columns)


def test_masks_are_told_apart() -> None:
    texts = {
        policy_text(column("a", MASK, mask))
        for mask in (Mask("name"), Mask("email"), Mask("pattern", "a", "b"), Mask("pattern", "a", "c"))
    }
    assert len(texts) == 4 and policy_text(column("a", HASH)) == HASH
    parted = (Mask("pattern", "a:b", "c"), Mask("pattern", "a", "b:c"))
    assert len({policy_text(column("a", MASK, mask)) for mask in parted}) == 2


@given(st.lists(st.sampled_from([KEEP, DROP, HASH, TOKENIZE]), min_size=1, max_size=5), st.booleans())
def test_a_record_is_read_as_it_was_written_and_a_second_application_is_none(
    policies: list[str], known: bool
) -> None:
    stored = StoredTable(default=KEEP if known else UNKNOWN)
    for policy in policies:
        contract = contract_of(column("a", policy), column("b", KEEP))
        stored = stored.after(contract)
        assert stored.after(contract) == stored
        assert StoredTable.from_plain(json.loads(json.dumps(stored.to_plain()))) == stored
        if not known and policy == KEEP:
            assert stored.after(contract) == stored
    assert "b" not in stored.columns or not known


def test_what_is_judged_by_a_contract_needs_no_step_to_it() -> None:
    contract = contract_of(column("a", HASH), column("b", DROP), column("c", KEEP))
    stored = StoredTable.of(contract)
    assert stored.after(contract) == stored and stored.protected
    assert {each for pair in stored.steps(contract).values() for each in pair} == {Step.STAY}
    assert stored.kept(contract_of(column("a", KEEP), column("b", KEEP))) == {"a": HASH}


@pytest.mark.parametrize("accepted", [True, False])
def test_an_image_is_protected_by_the_steps_alone(accepted: bool) -> None:
    was = StoredTable.of(contract_of(*(column(name, KEEP) for name in "ab"), column("c", MASK, Mask("name"))))
    assert was.protected
    now = contract_of(column("a", MASK, Mask("text")), column("b", DROP), column("c", MASK, Mask("email")))
    image = {"a": "Ada", "b": "Eve", "c": "A***", "gone": "x"}
    protection = StoredProtection(now, stored=was, accepted=accepted)
    left = protection.row(image)
    # A column that the contract has ceased to name stays.
    assert left == {"a": "***", "c": "A***" if accepted else None, "gone": "x"}
    first = StoredProtection(now, stored=StoredTable(), accepted=accepted).row(image)
    assert json.dumps(first) == '{"a": "***", "c": "***"}'
    # While no policy was in force, such images may have come to quarantine.
    between = was.after(contract_of(*(column(name, KEEP) for name in "abc")))
    again = StoredProtection(now, stored=between, accepted=accepted).row(image)
    assert ("gone" in again) == accepted


def test_values_wait_with_their_table_but_not_in_quarantine() -> None:
    was = StoredTable.of(contract_of(column("a", KEEP)))
    waiting = was.after(contract_of(column("a", HASH)), waits=True)
    assert waiting.column("a") == StoredColumn(KEEP, frozenset({HASH})) and not waiting.protected
    assert waiting.after(contract_of(column("a", HASH)), waits=True) == waiting
    assert waiting.after(contract_of(column("a", HASH))).column("a") == StoredColumn.made_by(HASH)
    # The mistake is taken back: accepted events are as they were.
    back = waiting.after(contract_of(column("a", KEEP)))
    assert back.column("a") == StoredColumn(KEEP, frozenset({KEEP, HASH}))


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"protected": [True, True], "default": KEEP, "columns": {"a": [HASH]}},
        {"protected": True, "default": KEEP, "columns": {}},
        {"protected": [True, True], "default": KEEP, "columns": {"a": [1, "hash"]}},
        ["no", "table"],
    ],
)
def test_a_damaged_record_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="no record of policies"):
        StoredTable.from_plain(plain)
