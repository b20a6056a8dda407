"""The pandera gate of a contract: the last look at accepted rows, typed, before the dimension shows them.

Rows are judged and quarantined by ``row_rules``, one by one; the gate says that nothing got past it.
pandera runs a Spark job per check, so the checks of one frame share a single aggregate here, and
of its report only the names of broken checks are passed on: its messages may print rows.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pandera.pyspark as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.column_rules import gated
from omnisupport_ingest.contracts.pg_types import ALWAYS_FITS, FLOATS, Kind
from omnisupport_ingest.contracts.spark_types import spark_type
from omnisupport_ingest.errors import IngestError

# Java's regular expressions: \z is the true end, where $ would let a line break follow. A cast alone would
# not do: Spark reads '1.5d' as a number. Possessive: no long text is tried again at each of its digits.
_NUMBER = r"^[+-]?(\d++\.?+\d*+|\.\d++)([eE][+-]?\d{1,9})?\z"
_NOT_FINITE = r"^(NaN|[+-]?[Ii]nf(inity)?)\z"

Judge = Callable[[Column], Column]
"""From a value to whether it breaks a rule: true, or else false or NULL."""


def value_rules(of: model.Column) -> dict[str, Judge]:
    """The rules about a value that is there: name of the rule → how it judges the typed column.

    Those that keep rows out; a dimension has rows that break the others. A judge gives true for a value that
    breaks the rule, false or NULL for one that is NULL.
    """
    column = gated(of)
    rules: dict[str, Judge] = {}
    if column.enum:
        rules["enum"] = lambda value: ~value.isin(*column.enum)
    if column.minimum is not None:
        rules["minimum"] = lambda value: _number(column, value) < _bound(column, column.minimum)
    if column.maximum is not None:
        rules["maximum"] = lambda value: _number(column, value) > _bound(column, column.maximum)
    if column.max_length is not None:
        rules["max_length"] = lambda value: F.length(value) > F.lit(column.max_length)
    if column.pattern is not None:
        rules["pattern"] = lambda value: ~value.rlike(str(column.pattern))
    return {f"{column.name}:{rule}": judge for rule, judge in rules.items()}


def _as_double(text: Column) -> Column:
    """The number that ``text`` spells, rounded to a double; NULL if it spells none.

    Spark orders ``NaN`` above every number, as PostgreSQL does.
    """
    return F.when(text.rlike(_NUMBER) | text.rlike(_NOT_FINITE), text.try_cast("double"))


def _number(column: model.Column, value: Column) -> Column:
    return _as_double(value) if column.type.kind is Kind.NUMERIC_TEXT else value


def _bound(column: model.Column, bound: Decimal | None) -> Column:
    rounded = column.type.kind in FLOATS or column.type.kind is Kind.NUMERIC_TEXT
    return _double(bound) if rounded else F.lit(bound)


def _double(bound: Decimal | None) -> Column:
    return F.lit(None if bound is None else float(bound))


def pandera_schema(contract: model.TableContract) -> pa.DataFrameSchema:
    """The schema of the typed columns of ``contract``; a frame may have further columns.

    A NOT NULL column is held to it if its type has no values that turn into NULL by not fitting.
    Use a new schema for every frame: it remembers the answers for the one it has seen.
    """
    answers = _Answers(contract)
    return pa.DataFrameSchema(
        {
            column.name: pa.Column(
                spark_type(column),  # type: ignore[arg-type]
                checks=[pa.Check(answers.check(name), name=name, error=name) for name in _conditions(column)],
                nullable=True,
            )
            for column in contract.columns
        },
        name=contract.full_name,
    )


def failures(df: DataFrame, contract: model.TableContract) -> tuple[str, ...]:
    """The names of the checks that ``df`` fails, sorted; empty if it passes. Never row values.

    A broken value is named as the row rule is (``priority:maximum``); a column that is missing or
    of another type as ``priority:schema``. ``GateFailed`` if Spark could not run the checks.
    """
    validated: Any = pandera_schema(contract).validate(df)
    report = validated.pandera.errors
    names = set()
    for kinds in report.values():
        for reason, entries in kinds.items():
            if reason == "CHECK_ERROR":
                raise GateFailed(
                    f"The contract checks of {contract.full_name} could not be run.",
                    fix="Look for the Spark job's own error above; the dimension stays as it was.",
                )
            names |= {_name(entry) for entry in entries}
    return tuple(sorted(names))


class GateFailed(IngestError):
    """The gate gave no answer: a Spark job failed, not a check."""


class _Answers:
    """Which conditions hold for some row of a frame: all asked in one Spark job, at the first question."""

    def __init__(self, contract: model.TableContract) -> None:
        self._contract = contract
        self._answers: dict[str, bool] | None = None
        self._failure: Exception | None = None

    def check(self, name: str) -> Callable[[DataFrame], bool]:
        """The pandera check function for one condition: true if no row meets it."""
        return lambda df: not self._of(df).get(name, False)

    def _of(self, df: DataFrame) -> dict[str, bool]:
        if self._failure is not None:
            raise self._failure
        if self._answers is None:
            try:
                self._answers = self._ask(df)
            except Exception as failure:
                # pandera takes it for a failed check and goes on: the next check need not try again.
                self._failure = failure
                raise
        return self._answers

    def _ask(self, df: DataFrame) -> dict[str, bool]:
        # A column of another type is pandera's to report; its values cannot be judged.
        judged = [
            column
            for column in self._contract.columns
            if column.name in df.columns and df.schema[column.name].dataType == spark_type(column)
        ]
        met = {name: judge for column in judged for name, judge in _conditions(column).items()}
        asked = [F.max(F.coalesce(judge(), F.lit(False))) for judge in met.values()]
        row = df.agg(*asked).collect()[0] if asked else ()
        return {name: bool(answer) for name, answer in zip(met, row, strict=True)}


def _conditions(column: model.Column) -> dict[str, Callable[[], Column]]:
    def on_column(judge: Judge) -> Callable[[], Column]:
        return lambda: judge(F.col(f"`{column.name}`"))

    judges = value_rules(column)
    if not column.nullable and column.type.kind in ALWAYS_FITS:
        judges[f"{column.name}:not_null"] = lambda value: value.isNull()
    return {name: on_column(judge) for name, judge in judges.items()}


def _name(entry: dict[str, Any]) -> str:
    column, check = str(entry["column"]), str(entry["check"])
    return check if check.startswith(f"{column}:") else f"{column}:schema"
