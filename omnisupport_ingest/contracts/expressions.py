"""Rules about several columns of a row: SQL expressions that DuckDB evaluates over whole columns.

``expression_syntax`` says which expressions may be rules. An expression is evaluated over typed values, as
the lake has them (``typed_values``). A row keeps the rule if a column was not sent or has a value that its
type cannot hold (``infinity``), if the result is NULL, or if the computation fails for the row (a cast, an
overflow).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from omnisupport_ingest.contracts.expression_syntax import connection, quoted
from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.contracts.quality import ExpressionRule

if TYPE_CHECKING:
    import pyarrow as pa

    from omnisupport_ingest.contracts.model import Column


class ExpressionRules:
    """Evaluates ``rules``. ``columns``: those of the contract, as the source has them."""

    def __init__(self, rules: Iterable[ExpressionRule], columns: Iterable[Column]) -> None:
        self.rules = tuple(rules)
        named = {name for rule in self.rules for name in rule.columns}
        self._columns = {column.name: column for column in columns if column.name in named}
        self._types = {name: column.type for name, column in self._columns.items()}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that some rule names."""
        return tuple(self._types)

    def broken(
        self, texts: Mapping[str, pa.Array], sent: Mapping[str, pa.Array]
    ) -> dict[str, pa.BooleanArray]:
        """Return, by rule, the rows that break it.

        ``texts``, ``sent``: by column, for all of ``columns``: PostgreSQL's texts (null for NULL and for
        values that were not sent), and which values were sent.
        """
        if not self.rules:
            return {}
        import pyarrow.compute as pc

        from omnisupport_ingest.contracts.typed_values import typed_column

        typed = {name: typed_column(texts[name], column) for name, column in self._columns.items()}
        known = {
            name: pc.and_(sent[name], pc.or_(texts[name].is_null(), values.is_valid()))
            for name, values in typed.items()
        }
        false = self.false_of(typed)
        return {
            rule.name: reduce(pc.and_, (known[name] for name in rule.columns), false[rule.name])
            for rule in self.rules
        }

    def of_images(self, images: Sequence[Mapping[str, str | None]]) -> list[list[str]]:
        """Return the names of the rules that each row image breaks; an image lacks columns that were not
        sent.
        """
        if not self.rules or not images:
            return [[] for _ in images]
        import numpy as np
        import pyarrow as pa

        texts, sent = {}, {}
        for name in self.columns:
            values = [image.get(name) for image in images]
            readable = [value is None or _is_text(value) for value in values]
            texts[name] = pa.array(
                [value if each else None for value, each in zip(values, readable, strict=True)], pa.string()
            )
            sent[name] = pa.array(
                np.array([name in image for image in images]) & np.array(readable, np.bool_)
            )
        found = self.broken(texts, sent)
        masks = {name: mask.to_pylist() for name, mask in found.items()}
        return [[name for name, mask in masks.items() if mask[row]] for row in range(len(images))]

    def false_of(self, typed: Mapping[str, pa.Array]) -> dict[str, pa.BooleanArray]:
        """Return, by rule, the rows for which it is false. ``typed``: by column, for all of ``columns``."""
        import duckdb
        import pyarrow as pa

        given = pa.table({name: typed[name] for name in self.columns})
        if not given.num_rows:
            return {rule.name: pa.array([], pa.bool_()) for rule in self.rules}
        try:
            answers = self._answers(given, self.rules)
        except duckdb.Error:
            # TRY does not catch all errors, such as an unknown time zone.
            answers = [self._one_by_one(given, rule) for rule in self.rules]
        return {rule.name: answer for rule, answer in zip(self.rules, answers, strict=True)}

    def _answers(self, given: pa.Table, rules: Sequence[ExpressionRule]) -> list[pa.BooleanArray]:
        """Return, by rule, the rows of ``given`` for which it is false; ``duckdb.Error`` if one row fails."""
        asked = ", ".join(
            f"coalesce(NOT TRY(({rule.expression}\n)), false) AS rule_{place}"
            for place, rule in enumerate(rules)
        )
        relation = connection().from_arrow(given)
        found = relation.query("given", f"SELECT {asked} FROM ({_select(self._types)}) AS rows")
        assert found is not None, "a SELECT has a result"
        held = found.to_arrow_table().combine_chunks()
        return [held.column(place).chunk(0) for place in range(len(rules))]

    def _one_by_one(self, given: pa.Table, rule: ExpressionRule) -> pa.BooleanArray:
        """Return ``_answers`` for one rule; a row for which it cannot be computed keeps the rule."""
        import duckdb
        import pyarrow as pa

        try:
            return self._answers(given, [rule])[0]
        except duckdb.Error:
            if given.num_rows == 1:
                return pa.array([False])
        half = given.num_rows // 2
        return pa.concat_arrays(
            [self._one_by_one(part, rule) for part in (given.slice(0, half), given.slice(half))]
        )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which PostgreSQL cannot have sent.
        return False
    return "\x00" not in value


def _select(types: Mapping[str, PgType]) -> str:
    """Return SQL for the columns of an expression: ``numeric`` without precision is a double, as for
    ``minimum`` and ``maximum``.
    """
    return (
        "SELECT "
        + ", ".join(
            f"TRY_CAST({quoted(name)} AS DOUBLE) AS {quoted(name)}"
            if of.kind is Kind.NUMERIC_TEXT
            else quoted(name)
            for name, of in types.items()
        )
        + " FROM given"
    )
