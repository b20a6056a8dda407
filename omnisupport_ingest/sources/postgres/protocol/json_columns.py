"""Columns of texts joined to JSON, row by row: byte for byte what ``orjson`` writes for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.sources.postgres.protocol.text_columns import pieces

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_FIRST_UNESCAPED = 0x20


def escape(letter: str) -> str:
    """How ``letter`` stands in a JSON string."""
    return orjson.dumps(letter).decode()[1:-1]


def escaped(texts: pa.StringArray) -> pa.StringArray:
    """``texts`` as they stand between the quotes of a JSON string."""
    # The backslash first, as the others bring in new ones.
    for letter in sorted(_special_letters(texts), reverse=True):
        pattern = chr(letter)
        texts = pc.replace_substring(texts, pattern=pattern, replacement=escape(pattern))
    return texts


def json_arrays(columns: Sequence[pa.StringArray]) -> pa.StringArray:
    """One JSON array per row of the values in ``columns`` (one or more, escaped)."""
    return _joined("[", ["" for _ in columns], columns, "]")


def json_objects(
    names: Sequence[str], columns: Sequence[pa.StringArray], unsent: npt.NDArray[np.bool_] | None = None
) -> pa.StringArray:
    """One JSON object per row, ``names`` → ``columns`` (one or more, escaped).

    ``unsent`` (rows × columns): values that the object of the row leaves out.
    """
    prefixes = [orjson.dumps(name).decode() + ":" for name in names]
    if unsent is None:
        return _joined("{", prefixes, columns, "}")
    members = [
        pc.if_else(pa.array(left_out), None, pc.binary_join_element_wise(prefix, _values(column), ""))
        for prefix, column, left_out in zip(prefixes, columns, unsent.T, strict=True)
    ]
    inner = pc.binary_join_element_wise(*members, ",", null_handling="skip")
    return pc.binary_join_element_wise("{", inner, "}", "")


def _joined(
    start: str, prefixes: Sequence[str], columns: Sequence[pa.StringArray], end: str
) -> pa.StringArray:
    arguments: list[str | pa.StringArray] = []
    between = start
    for prefix, column in zip(prefixes, columns, strict=True):
        if column.null_count:
            arguments += [between + prefix, _values(column)]
            between = ","
        else:
            arguments += [f'{between}{prefix}"', column]
            between = '",'
    return pc.binary_join_element_wise(*arguments, between[:-1] + end, "")


def _values(texts: pa.StringArray) -> pa.StringArray:
    """JSON strings, and ``null`` for null."""
    return pc.fill_null(pc.binary_join_element_wise('"', texts, '"', ""), "null")


def _special_letters(texts: pa.StringArray) -> set[int]:
    content = texts.buffers()[2]
    if content is None:
        return set()
    found = set[int]()
    for piece in pieces(np.frombuffer(content, np.uint8)):
        special = (piece < _FIRST_UNESCAPED) | (piece == _QUOTE) | (piece == _BACKSLASH)
        found.update(np.unique(piece[special]).tolist())
    return found
