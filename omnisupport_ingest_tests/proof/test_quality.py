"""What the drawn rules mean, and that histories break them; without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest_tests.oracle.judging import ACCEPT, REJECT_BATCH, WARN
from omnisupport_ingest_tests.oracle.model import Event
from omnisupport_ingest_tests.proof.history import lane
from omnisupport_ingest_tests.proof.quality import REFUSED, Rule, refused
from omnisupport_ingest_tests.proof.story import draw, rejecting_nothing, versions_with_rules
from omnisupport_ingest_tests.proof.tables import write_contracts

DRAWN = [versions_with_rules(Random(f"any {number}")) for number in range(20)]
RULES = [
    (table, rule)
    for versions in DRAWN
    for version in versions
    for table, terms in version.items()
    for rule in terms.rules
]


def of(table: str, name: str) -> Rule:
    return next(rule for each, rule in RULES if (each, rule.name) == (table, name))


@pytest.mark.parametrize(
    ("table", "name", "texts", "broken"),
    [
        ("tickets", "status:pattern", ("status 37",), True),
        ("tickets", "status:pattern", ("status 17",), False),
        ("tickets", "status:pattern", (None,), False),
        ("agents", "rate:maximum", ("145.5",), False),
        ("agents", "rate:maximum", ("145.6",), True),
        ("agents", "rate:maximum", ("no value of its type",), False),
        ("agents", "gone:enum", ("another",), True),
        ("tickets", "dear_has_name", ("1000.00", "status 1000"), True),
        ("tickets", "dear_has_name", ("1000.00", "a longer status"), False),
        ("tickets", "dear_has_name", ("NaN", "status 1000"), False),
        ("tickets", "dear_has_name", (None, "status 1000"), False),
        ("tickets", "left_early", ("body 1", "2026-02-01 16:00:00+00"), True),
        ("tickets", "left_early", ("body 1", "infinity"), False),
        ("tickets", "left_early", ("a longer body", "2026-02-01 16:00:00+00"), False),
        ("agents", "long_note_is_low", ("x" * 40, "2.0"), True),
        ("agents", "long_note_is_low", ("x" * 40, "1.9"), False),
        ("tickets", "not_turned_down", (REFUSED, "5.05"), True),
        ("tickets", "not_turned_down", (REFUSED, "NaN"), False),
        ("agents", "not_turned_down", (REFUSED, None), False),
    ],
)
def test_a_rule_is_broken_by_what_its_words_say(
    table: str, name: str, texts: tuple[str | None, ...], broken: bool
) -> None:
    assert of(table, name).breaks(*texts) is broken


def test_a_row_that_lacks_a_column_keeps_the_rule_and_nobody_asks_what_is_accepted() -> None:
    rule = next(rule for _, rule in RULES if rule.name == "not_turned_down" and len(rule.columns) == 2)
    row = dict.fromkeys(rule.columns, REFUSED)
    for _, each in RULES:
        if each.name == "not_turned_down" and each.columns == rule.columns:
            assert each.broken_by(row | {rule.columns[1]: "5"}) is (each.policy != ACCEPT)
            assert not each.broken_by({rule.columns[0]: REFUSED})


def test_a_looser_rule_has_fewer_rows_wait() -> None:
    rows = [each.event for seed in range(100) for each in lane(seed, epochs=1, sure_order=True)]
    bounds = {(table, rule.name, str(rule.bound)): (table, rule) for table, rule in RULES}
    looser_bounds = 0
    for table, rule in bounds.values():
        for lot in range(4):
            looser = rule.loosened(Random(lot))
            assert (looser.name, looser.columns) == (rule.name, rule.columns)
            if looser.bound == rule.bound:
                assert looser.policy in (WARN, ACCEPT)
                continue
            looser_bounds += 1
            waiting, left = (broken_rows(each, table, rows) for each in (rule, looser))
            assert left < waiting, "some of those that wait, and no other"
    assert looser_bounds


def broken_rows(rule: Rule, table: str, rows: Sequence[Event]) -> set[int]:
    """The numbers of the ``rows`` of ``table`` that break ``rule``."""
    found = set()
    for number, event in enumerate(rows):
        image = {**event.carried_before, **(event.after or {})}
        whole = event.table == table and event.op in "cur" and all(name in image for name in rule.columns)
        if whole and rule.breaks(*(image[name] for name in rule.columns)):
            found.add(number)
    return found


def test_every_policy_is_drawn_and_the_contracts_are_valid(tmp_path: Path) -> None:
    policies = Counter(rule.policy for _, rule in RULES)
    assert set(policies) == {"accept", "warn", "quarantine", "reject_batch"}
    assert {terms.changed_only for each in DRAWN for terms in each[0].values()} == {False, True}
    for number, version in enumerate(DRAWN[0]):
        write_contracts(tmp_path / str(number), version)
        held = {each.table: each for each in load_contracts(tmp_path / str(number))}
        for table, terms in version.items():
            several = {rule.name: rule.policy for rule in terms.rules if not rule.keyword}
            assert {each.name: each.policy for each in held[table].quality.rules} == several
            assert held[table].changed_only is terms.changed_only


def test_the_histories_break_most_rules() -> None:
    rows = [each.event for seed in range(100) for each in lane(seed, epochs=1, sure_order=True)]
    broken: Counter[tuple[str, str]] = Counter()
    asked = {(table, rule.name, rule.columns, str(rule.bound)): (table, rule) for table, rule in RULES}
    for table, rule in asked.values():
        for event in rows:
            image = {**event.carried_before, **(event.after or {})}
            if event.table == table and event.op in "cur" and all(name in image for name in rule.columns):
                broken[table, rule.name] += rule.breaks(*(image[name] for name in rule.columns))
    assert [place for place, count in broken.items() if not count] == []
    rejecting = {(table, rule.name) for table, rule in RULES if rule.policy == REJECT_BATCH}
    assert rejecting


def test_few_rows_are_refused_and_nothing_else_of_them_changes() -> None:
    events = [each.event for each in lane(3, epochs=1, sure_order=True) if each.event.table == "tickets"]
    changed = [pair for pair in zip(events, refused(Random(1), events), strict=True) if pair[0] != pair[1]]
    assert len(changed) <= 2
    for before, after in changed:
        assert (before.at, before.op, before.key) == (after.at, after.op, after.key)
        assert before.after is not None and after.after is not None
        assert before.after.keys() == after.after.keys()


def test_a_story_is_the_same_whenever_it_is_drawn() -> None:
    first, again = (draw(range(5), slots=3).versions for _ in range(2))
    said = [
        [(table, rule.name, rule.policy, rule.bound) for table in each for rule in each[table].rules]
        for each in (*first, *again)
    ]
    assert said[: len(first)] == said[len(first) :]


def test_batches_are_rejected_in_some_homes_and_in_at_most_half() -> None:
    """In the others the same events delivered otherwise come to the same contents."""
    homes = [draw(range(number, number + 1), slots=2) for number in range(60)]
    rejecting = [
        any(
            rule.policy == REJECT_BATCH
            for each in home.versions
            for terms in each.values()
            for rule in terms.rules
        )
        for home in homes
    ]
    assert 10 < sum(rejecting) <= 30


def test_a_home_that_rejects_no_batch_has_the_same_rules() -> None:
    for versions in DRAWN:
        for before, after in zip(versions, rejecting_nothing(versions), strict=True):
            for table, terms in before.items():
                pairs = [*zip(terms.rules, after[table].rules, strict=True)]
                assert all(old.name == new.name and old.withholds == new.withholds for old, new in pairs)
                assert all(new.policy != REJECT_BATCH for _, new in pairs)
