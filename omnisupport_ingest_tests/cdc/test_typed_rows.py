"""A text that its typed column cannot hold is never lost: the exact text stands beside it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from omnisupport_ingest.cdc.typed_rows import EXACT, typed_batches
from omnisupport_ingest.contracts.model import Column

HASHED = "k1:63e02e7134651ecf9e1418153a7eb357c215aa80"


@pytest.mark.parametrize(("pg_type", "value"), [("bigint", 17), ("date", None), ("integer", 17)])
def test_a_hash_that_became_a_number_again_is_kept_as_its_text(pg_type: str, value: int | None) -> None:
    column = Column("badge", pg_type)
    texts = [HASHED, None, "17" if value else None]
    batch = pa.RecordBatch.from_pydict({"badge": pa.array(texts, pa.string())})
    (made,) = typed_batches([batch], [column], ["badge", EXACT])
    assert made.column("badge").to_pylist() == [None, None, value]
    assert made.column(EXACT).to_pylist() == [[("badge", HASHED)], [], []]
