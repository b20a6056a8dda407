"""The pandera gate of a contract: the last check of accepted, typed rows before the dimension shows them.

``row_rules`` judges events one by one; the gate checks that none got past it. It is generated from the same
contract and judges rows independently: tasks of Spark pass their rows to pandera's checks, lazily, and
pandera finds which rows break which. Only the names of broken rules and the numbers of rows leave a task, as
pandera's failure cases hold values.

Pandera on pandas judges the rows, because pandera on Spark gives one answer for a whole frame. Pandera on
Spark checks the columns and types of the frame.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from typing import Any

import pandas as pd
import pandera.pandas as pa
import pandera.pyspark as on_spark
import pyarrow
from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaErrors
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.column_rules import gated
from omnisupport_ingest.contracts.pg_types import FLOATS, INTEGERS, Kind
from omnisupport_ingest.contracts.spark_types import spark_type
from omnisupport_ingest.errors import IngestError

# ASCII digits. Possessive, so that a long text is not matched again at each of its digits.
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]{1,9})?|NaN|[+-]?[Ii]nf(?:inity)?"
)

ROWS_AT_ONCE = 65_536
"""Rows that pandera judges together, as each call has a fixed cost."""

_JUDGED = "rule string, rows long"


@dataclass(frozen=True, slots=True)
class Broken:
    """Row ``row`` of a table, counted from 0, breaks ``rule`` (``priority:maximum``)."""

    row: int
    rule: str


class GateFailed(IngestError):
    """The contract of a dimension could not be checked, because the Spark job of the check failed. No row was
    found wrong, and the dimension stays as it was.

    Fix: Act on the error of Spark above it in the log of the run, and run the windows again.
    """


def pandera_schema(contract: model.TableContract) -> pa.DataFrameSchema:
    """Return the withholding rules on the typed columns of ``contract`` as checks of pandera.

    A dimension may have rows that break the other rules. NOT NULL is checked if all values of the column's
    type fit its typed column; others become NULL. A frame may have further columns.
    """
    return pa.DataFrameSchema(
        {
            column.name: pa.Column(checks=_checks(gated(column)), nullable=_may_be_null(column))
            for column in contract.columns
        },
        name=contract.full_name,
    )


def broken_rows(rows: pyarrow.Table, schema: pa.DataFrameSchema) -> Iterator[Broken]:
    """Yield the broken rules that pandera finds in ``rows``, which have the columns of ``schema``.

    Raises ``GateFailed``.
    """
    frame = pd.DataFrame({name: _series(rows[name]) for name in schema.columns})
    try:
        with _validation_enabled():
            schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        cases = errors.failure_cases
        for column, check, row in zip(cases["column"], cases["check"], cases["index"], strict=True):
            if pd.isna(row):
                raise _no_answer(schema.name) from None
            name = f"{column}:not_null" if check == "not_nullable" else str(check)
            yield Broken(int(row), name)


def failures(df: DataFrame, contract: model.TableContract) -> dict[str, int]:
    """Return the rules that ``df`` breaks, sorted by name, with the numbers of rows; empty if it passes.

    Names are those of row rules (``priority:maximum``); a column that is missing or of another type is
    ``priority:schema``, with 0 rows. Never holds row values. Raises ``GateFailed`` if the Spark job fails.
    """
    found = Counter(dict.fromkeys(_of_schema(df, contract), 0))
    ruled = [name for name in _ruled(pandera_schema(contract)) if f"{name}:schema" not in found]
    if ruled:
        judge = partial(_judged, contract=contract)
        judged = df.select(*(F.col(f"`{name}`") for name in ruled)).mapInArrow(judge, _JUDGED)
        try:
            counted = judged.groupBy("rule").agg(F.sum("rows").alias("rows")).collect()
        except PySparkException:
            # Spark's message about a failed task may show a row.
            raise _no_answer(contract.full_name) from None
        found.update({row["rule"]: row["rows"] for row in counted})
    return dict(sorted(found.items()))


def failures_of_few(rows: pyarrow.Table, contract: model.TableContract) -> dict[str, int]:
    """Return ``failures`` of ``rows``, which have the contract's typed columns. Raises ``GateFailed``."""
    schema = pandera_schema(contract)
    found = Counter(broken.rule for broken in broken_rows(rows, schema.select_columns(_ruled(schema))))
    return dict(sorted(found.items()))


def _validation_enabled() -> AbstractContextManager[None]:
    """Return a context in which pandera runs all checks, whatever its environment variables say.

    With ``PANDERA_VALIDATION_ENABLED`` off, for another program, it would pass every row.
    """
    return config_context(validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_AND_DATA)


def _ruled(schema: pa.DataFrameSchema) -> list[str]:
    """Return the columns that have a rule."""
    return [name for name, column in schema.columns.items() if column.checks or not column.nullable]


def _no_answer(name: str) -> GateFailed:
    return GateFailed(
        f"The contract checks of {name} could not be run.",
        fix="Look for the Spark job's own error above; the dimension stays as it was.",
    )


def _judged(
    batches: Iterable[pyarrow.RecordBatch], contract: model.TableContract
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the result of a task: by rule, how many of its rows break it."""
    found, schema = Counter[str](), pandera_schema(contract)
    for rows in _joined(batches):
        found.update(broken.rule for broken in broken_rows(rows, schema.select_columns(rows.column_names)))
    columns = [pyarrow.array(found.keys(), pyarrow.string()), pyarrow.array(found.values(), pyarrow.int64())]
    yield pyarrow.RecordBatch.from_arrays(columns, names=["rule", "rows"])


def _joined(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.Table]:
    held: list[pyarrow.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(each.num_rows for each in held) >= ROWS_AT_ONCE:
            yield pyarrow.Table.from_batches(held)
            held = []
    if held:
        yield pyarrow.Table.from_batches(held)


def _of_schema(df: DataFrame, contract: model.TableContract) -> set[str]:
    """Return the columns that ``df`` lacks or has with another type. Runs no Spark job."""
    columns = {each.name: on_spark.Column(spark_type(each), nullable=True) for each in contract.columns}  # type: ignore[arg-type]
    with _validation_enabled():
        validated: Any = on_spark.DataFrameSchema(columns, name=contract.full_name).validate(df)
    entries = [
        entry
        for kinds in validated.pandera.errors.values()
        for entries in kinds.values()
        for entry in entries
    ]
    return {f"{entry['column']}:schema" for entry in entries}


def _may_be_null(column: model.Column) -> bool:
    return column.nullable or not column.always_fits


def _series(values: pyarrow.ChunkedArray) -> pd.Series[Any]:
    """Return ``values`` with NULL distinct from NaN, exact whole numbers, and Python texts and decimals."""
    is_number = pyarrow.types.is_integer(values.type) or pyarrow.types.is_floating(values.type)
    if is_number:
        return pd.Series(pd.arrays.ArrowExtensionArray(values))
    return pd.Series(values.to_numpy(), dtype=object)


def _checks(column: model.Column) -> list[pa.Check]:
    """Return the checks of values that are not NULL; pandera does not check NULL."""
    found: dict[str, Callable[..., pa.Check]] = {}
    if column.enum:
        found["enum"] = partial(pa.Check.isin, column.enum)
    if column.minimum is not None:
        found["minimum"] = _bounded(column.type.kind, column.minimum, least=True)
    if column.maximum is not None:
        found["maximum"] = _bounded(column.type.kind, column.maximum, least=False)
    if column.max_length is not None:
        found["max_length"] = partial(pa.Check.str_length, max_value=column.max_length)
    if column.pattern is not None:
        search = re.compile(column.pattern).search
        found["pattern"] = partial(pa.Check, lambda text: search(text) is not None, element_wise=True)
    names = {rule: f"{column.name}:{rule}" for rule in found}
    return [make(name=names[rule], error=names[rule]) for rule, make in found.items()]


def _bounded(kind: Kind, bound: Decimal, *, least: bool) -> Callable[..., pa.Check]:
    if kind in INTEGERS:
        whole = int(bound.to_integral_value(ROUND_CEILING if least else ROUND_FLOOR))
        within = partial(_within_whole, bound=whole, least=least)
    elif kind in FLOATS:
        within = partial(_within_float, bound=float(bound), least=least)
    elif kind is Kind.NUMERIC_TEXT:
        within = partial(_within_text, bound=float(bound), least=least)
    else:
        return partial(pa.Check.ge if least else pa.Check.le, bound)
    return partial(pa.Check, within)


def _within_whole(values: pd.Series[Any], bound: int, *, least: bool) -> pd.Series[Any]:
    if abs(bound) >= 1 << 63:
        # The bound is outside the range of every integer column.
        return pd.Series([(bound < 0) == least] * len(values), index=values.index)
    return values >= bound if least else values <= bound


def _within_float(values: pd.Series[Any], bound: float, *, least: bool) -> pd.Series[Any]:
    # NaN is greater than every number, as in PostgreSQL.
    return ~(values < bound) if least else values <= bound


def _within_text(values: pd.Series[Any], bound: float, *, least: bool) -> pd.Series[Any]:
    """Compare exact numbers kept as texts, rounded to a double. A text that is no number breaks no bound."""

    def within(text: str) -> bool:
        if not _NUMBER.fullmatch(text):
            return True
        value = float(text)
        return not value < bound if least else value <= bound

    return values.map(within).astype(bool)
