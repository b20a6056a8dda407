"""The compiled hash of events is the one that the library gives, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.cdc import event_hashes as hashing
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.compiled import compiled_hashes
from omnisupport_ingest.position import UNREAD

pytestmark = pytest.mark.skipif(compiled_hashes is None, reason="installed without a C compiler")

WHOLE = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.none() | st.text(max_size=40) | st.text("aé", min_size=20, max_size=300)
EVENT = st.tuples(
    st.integers(-(1 << 31), (1 << 31) - 1),
    WHOLE,
    WHOLE,
    *[TEXTS] * 6,
    st.none() | st.lists(st.sampled_from(["b", "a", "c"]), max_size=3),
    TEXTS,
    st.integers(-(1 << 50), 1 << 50),
    TEXTS | st.sampled_from(UNREAD).map(lambda start: f"{start} 7"),
)
SCHEMA = pa.schema(
    [
        ("epoch", pa.int32()),
        ("commit_lsn", pa.int64()),
        ("ordinal", pa.int64()),
        *((name, pa.string()) for name in ("op", "source_schema", "source_table", "key", "before", "after")),
        ("unchanged", pa.list_(pa.string())),
        ("moved_from_key", pa.string()),
        ("source_ts", pa.timestamp("us", tz="UTC")),
        ("identity", pa.string()),
    ]
)


def table(events: list[tuple[Any, ...]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, each, strict=True)) for each in events], SCHEMA)


@given(st.lists(EVENT, max_size=6), st.integers(0, 3))
def test_the_hash_is_that_of_the_library(events: list[tuple[Any, ...]], start: int) -> None:
    rows = table(events).slice(start)
    found = event_hashes(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "compiled_hashes", None)
        assert found.equals(event_hashes(rows))


def test_no_events_have_no_hashes_even_without_offsets() -> None:
    empty = pa.StringArray.from_buffers(0, pa.py_buffer(b""), pa.py_buffer(b""))
    rows = table([]).set_column(3, "op", empty)
    assert event_hashes(rows).equals(pa.array([], pa.int64()))


def test_texts_in_another_form_have_the_same_hash() -> None:
    event = (1, 2, 3, "c", "public", "t", '["1"]', None, "{}", None, None, 5, None)
    rows = table([event, event])
    for form in (pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()):
        other = rows.set_column(3, "op", rows["op"].cast(form))
        assert event_hashes(other).equals(event_hashes(rows))


def test_bytes_of_any_number_are_hashed_as_by_the_library() -> None:
    assert compiled_hashes is not None
    texts = ["x" * size for size in range(200)]
    array = pa.array(texts)
    valid, offsets, held = array.buffers()
    made = compiled_hashes.hash_events(len(texts), (("t", 0, offsets, held, valid),), (None,))
    found = np.frombuffer(hashing.buffer_of(made), np.uint64).tolist()
    assert found == [xxhash.xxh64_intdigest(text.encode(), 42) for text in texts]


def test_arguments_that_do_not_fit_are_refused() -> None:
    assert compiled_hashes is not None
    numbers = ("n", 0, np.zeros(2, np.int64), None, None)
    short = ("i", 0, np.zeros(1, np.int32), None, None)
    for columns, absent in (
        ((numbers,), ()),
        ((short,), (None,)),
        ((("c", 0, None, b"a", None),), (None,)),
        ((("t", 0, np.array([0, 2, 2], np.int32), b"a", None),), (None,)),
    ):
        with pytest.raises(ValueError, match=r"absent|does not fit|constant|not within"):
            compiled_hashes.hash_events(2, columns, absent)
    with pytest.raises(TypeError):
        compiled_hashes.hash_events(2, (numbers,), ("text",))  # type: ignore[arg-type]
