"""Columns of records: what comes of many at once is what comes of each by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

from confluent_kafka import KafkaError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.sources.kafka import record_columns
from omnisupport_ingest.sources.kafka.record_columns import Records, runs_of
from omnisupport_ingest_tests.examples import examples

_TEXTS = st.text(st.sampled_from('ab{}[]":,0-. \\\n\r\té\x7f\x00'), max_size=6)
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), _TEXTS)
_DOCUMENTS = st.one_of(
    _SCALARS, st.dictionaries(_TEXTS, _SCALARS, max_size=3), st.lists(_SCALARS, max_size=2)
)
_SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
_WRITTEN = st.builds(
    lambda held, separators, ascii_only, behind: (
        json.dumps(held, separators=separators, ensure_ascii=ascii_only) + behind
    ).encode(),
    _DOCUMENTS,
    _SEPARATORS,
    st.booleans(),
    st.sampled_from(["", "", "\n", " ", ",", "}"]),
)
_QUOTED = st.builds('{{"{}": "{}"}}'.format, _TEXTS, _TEXTS).map(str.encode)
"""Members as no program writes them: nothing in the texts is escaped."""
_KEYS = st.one_of(st.none(), st.binary(max_size=8), _TEXTS.map(str.encode), _QUOTED, *[_WRITTEN] * 3)

_DELIVERED = st.tuples(
    st.sampled_from(["a", "b"]), st.integers(0, 1), st.integers(0, 12), st.sampled_from([False] * 5 + [True])
)


@settings(max_examples=examples(300))
@given(st.lists(_KEYS, min_size=1, max_size=6))
@example([b"00", b"-0", b'{"a":01}', b'{"a":1"b":2}', b'{"a":1,}', b'{"a":1}\n', b"null", b""])
def test_keys_are_the_same_json_at_once_and_one_by_one(keys: list[bytes | None]) -> None:
    found = record_columns._keys_as_json(keys).to_pylist()
    assert found == [record_columns._as_json(each) for each in keys]
    assert not any(b"\n" in each or b"\r" in each for each in found)


@settings(max_examples=examples(200))
@given(st.lists(_DELIVERED, max_size=20))
def test_of_each_partition_come_the_records_whose_offsets_rise(
    delivered: list[tuple[str, int, int, bool]],
) -> None:
    messages = [
        Message(topic, number, offset, b"k%d" % i, b"value", error=KafkaError(-191) if is_error else None)
        for i, (topic, number, offset, is_error) in enumerate(delivered)
    ]
    found, errors, size = {place: Records() for place in _places()}, list[Message](), 0
    for place, are_errors, run in runs_of(messages):
        if are_errors:
            errors += run
        else:
            of = found[place]
            size += of.add(run, of.offsets[-1] + 1 if of else 3)
    expected: dict[tuple[str, int], list[tuple[int, bytes]]] = {place: [] for place in _places()}
    for i, (topic, number, offset, is_error) in enumerate(delivered):
        taken = expected[topic, number]
        if not is_error and offset >= (taken[-1][0] + 1 if taken else 3):
            taken.append((offset, b"k%d" % i))
    assert {place: [(each.offset, each.key) for each in of] for place, of in found.items()} == expected
    assert errors == [each for each in messages if each.error() is not None]
    assert size == sum(len(key) + len(b"value") for taken in expected.values() for _, key in taken)


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 20))
def test_a_block_ends_with_the_record_that_fills_it(lengths: list[int], size: int) -> None:
    count = len(lengths)
    whole = Records(
        [*range(count)], [None] * count, [b"x" * each for each in lengths], [None] * count, [0] * count
    )
    blocks = [[len(each.value or b"") for each in block] for block in whole.blocks(size)]
    assert [*chain.from_iterable(blocks)] == lengths
    assert all(sum(block) >= size for block in blocks[:-1]) and all(
        sum(block[:-1]) < size for block in blocks
    )


def _places() -> Sequence[tuple[str, int]]:
    return [(topic, number) for topic in "ab" for number in range(2)]
