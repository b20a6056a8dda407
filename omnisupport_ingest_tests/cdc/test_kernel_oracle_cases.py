"""Every case of the oracle's own tests, run against the kernels too.

The cases are not written down again: where one asks the oracle, the kernels are asked the same, and their
answer must be the oracle's. What the case then says of the answer holds for both. The oracle's properties
have their own form for kernels, in ``test_kernel_fold`` and ``test_kernel_judging``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import is_hypothesis_test

from omnisupport_ingest_tests.cdc import kernels, test_kernel_judging
from omnisupport_ingest_tests.cdc.kernels import Cut, Table
from omnisupport_ingest_tests.oracle import judging, test_judging, test_oracle
from omnisupport_ingest_tests.oracle.model import Event, Key, Row, TableShape
from omnisupport_ingest_tests.oracle.oracle import Layers, current_state, layers

_ASKING = ("fold", "current_state", "layers", "judge", "reasons")
"""What the cases ask the oracle with."""

READ_AT = "the fold does not know what the read of a snapshot saw: the key is read again (moved_rows)"

ELSEWHERE = {
    "test_a_snapshot_row_that_saw_the_move_gives_what_the_old_key_cannot": READ_AT,
    "test_a_snapshot_row_under_the_old_key_that_saw_the_move_is_another_row": READ_AT,
}
"""Cases whose answer the kernels alone do not have, and where it is had."""


def cases() -> Iterator[Any]:
    """Each case of the fold that asks the oracle: the function, the class it is of, and its parameters."""
    for owner in (test_oracle, *_classes()):
        for name, function in vars(owner).items():
            if name.startswith("test_") and not is_hypothesis_test(function) and _asks(function):
                for number, values in enumerate(_parameters(function)):
                    of = owner if inspect.isclass(owner) else None
                    yield pytest.param(function, of, values, id=f"{name[5:]}-{number}")


def _asks(function: Any) -> bool:
    return any(f"{name}(" in inspect.getsource(function) for name in _ASKING)


def _classes() -> list[type]:
    return [each for name, each in vars(test_oracle).items() if name.startswith("Test")]


def _marks(function: Any) -> list[pytest.Mark]:
    return list(getattr(function, "pytestmark", ()))


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """Every combination of what ``parametrize`` gives the case."""
    sets = []
    for mark in _marks(function):
        if mark.name == "parametrize":
            names = mark.args[0]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            sets.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in product(*sets):
        yield {name: value for each in chosen for name, value in each.items()}


CASES = list(cases())


def test_no_case_is_left_out() -> None:
    assert {case.values[1] for case in CASES} == {*_classes()} - {test_oracle.TestSoups}
    assert len(CASES) >= 55


@pytest.mark.parametrize(("case", "owner", "values"), CASES)
def test_case(
    case: Callable[..., None], owner: type | None, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []

    def state(events: Iterable[Event], shape: TableShape) -> dict[Key, Row]:
        sent = list(events)
        rows = current_state(sent, shape)
        if case.__name__ not in ELSEWHERE and not any(event.read_at for event in sent):
            agree(sent, shape, rows)
        checked.append(len(sent))
        return rows

    def sorted_out(raw: Iterable[Event]) -> Layers:
        sent = list(raw)
        found = layers(sent)
        judged_alike(sent, found)
        checked.append(len(sent))
        return found

    monkeypatch.setattr(test_oracle, "current_state", state)
    monkeypatch.setattr(test_oracle, "layers", sorted_out)
    case(*([owner()] if owner else []), **values)
    assert checked


def agree(events: list[Event], shape: TableShape, rows: dict[Key, Row]) -> None:
    """Assert that the kernels come to ``rows``, in one window, and cut into windows by transaction."""
    if not any(event.table == shape.name for event in events):
        return
    # The time of an event tells which one ended a life.
    ranks = {at: rank for rank, at in enumerate(sorted({event.at for event in events}))}
    sent = [
        replace(
            e,
            source_ts=test_oracle.NOON + test_oracle.timedelta(minutes=ranks[e.at]),
            # Landed events name the columns that were not sent.
            unchanged=e.unchanged if e.after is None else frozenset(shape.columns) - e.after.keys(),
        )
        for e in events
    ]
    table = Table(shape, ("id",), {"id": "text", **dict.fromkeys(shape.columns, "text")})
    due = kernels.without_shown(kernels.expected(rows, sent), sent)
    for windows in ({e.at[:2]: "w" for e in sent}, {e.at[:2]: f"w{e.at.commit_lsn % 3}" for e in sent}):
        cut = Cut(2, 2, 1)
        folded = kernels.fold(kernels.events_table(sent, table, windows), table, cut)
        found = kernels.current(kernels.merged([folded, folded], table, cut), table, cut)
        states = kernels.without_shown(kernels.states(found, table), sent)
        moved = {event.key for event in sent if event.moved_from is not None}
        assert states.keys() == due.keys()
        for key, state in states.items():
            assert state == due[key] or (
                len(set(windows.values())) > 1 and key in moved and state.is_part_of(due[key])
            )


def judged_alike(raw: list[Event], found: Layers) -> None:
    """Assert that the kernel of judging sorts ``raw`` as the oracle did; it knows of no withheld."""
    if any(event.quarantined for event in raw):
        return
    deliveries = [
        replace(
            test_judging.FIRST,
            number=number,
            event=replace(
                event, after=event.after if event.after is not None or event.op not in "cur" else {}
            ),
        )
        for number, event in enumerate(raw, 1)
    ]
    judging_rules = test_kernel_judging.no_rules()
    verdicts = test_kernel_judging.judged(deliveries, judging_rules, 2)
    by_verdict = {
        test_kernel_judging.ACCEPTED: found.accepted,
        test_kernel_judging.DUPLICATE: found.duplicates,
        test_kernel_judging.oracle.QUARANTINED: found.quarantined,
    }
    for verdict, events in by_verdict.items():
        assert sum(sent[0] == verdict for sent in verdicts.values()) == len(events), verdict
    assert {sent[1] for sent in verdicts.values()} <= {None, "duplicate_position", "collision"}


class TestJudging:
    """The cases of ``test_judging``: each list of deliveries that is judged there, by the kernel too."""

    @pytest.fixture(autouse=True)
    def kernel_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def judge(deliveries: Iterable[Any], judging_rules: Any) -> Any:
            sent = list(deliveries)
            found = judging.judge(sent, judging_rules)
            kernel = test_kernel_judging.as_kernel_rules(judging_rules, sent)
            assert test_kernel_judging.judged(sent, kernel, 2) == test_kernel_judging.due(sent, judging_rules)
            return found

        monkeypatch.setattr(test_judging, "judge", judge)

    @pytest.mark.parametrize(
        ("case", "values"),
        [
            pytest.param(function, values, id=f"{name[5:]}-{number}")
            for name, function in vars(test_judging).items()
            if name.startswith("test_") and _asks(function)
            for number, values in enumerate(_parameters(function))
        ],
    )
    def test_case(self, case: Callable[..., None], values: dict[str, Any]) -> None:
        case(**values)
