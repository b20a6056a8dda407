"""Sentences with numbers: nouns and verbs agree, also for one."""

from __future__ import annotations

import pytest

from omnisupport_ingest.checks.lake_checks import _named
from omnisupport_ingest.wording import agreeing, counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 batches differ"), (1, "1 batch differs"), (1300, "1,300 batches differ")],
)
def test_noun_and_verb_agree_with_the_number(number: int, text: str) -> None:
    assert f"{counted(number, 'batch')} {agreeing(number, 'differs', 'differ')}" == text


def test_one_more_window_is_one_window() -> None:
    assert _named([f"w{number}" for number in range(4)]).endswith(" and 1 more window")
