"""Decrypt the row images of events that landed encrypted, with the keys of their data subjects, before events
are judged.

A value whose key was destroyed becomes NULL, and the fold treats its column as known. So it does with every
column that such an image does not show: it may have landed encrypted, because no contract named it then.
Rules see the image as if these columns had not been sent, so the erasure of a subject withholds no row and no
batch. A key that is missing without having been destroyed is a loss, not an erasure: decrypting raises an
error, and judging stops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.compiled import compiled_images
from omnisupport_ingest.contracts.at_rest import null_once_erased
from omnisupport_ingest.contracts.encrypted_images import MARK, decrypted, key_id, without_values
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable

_IMAGES = ("before", "after")
_MARK_BYTES = MARK.encode()


def has_encrypted(batch: pa.RecordBatch) -> bool:
    """Whether an event of ``batch`` landed with an encrypted image."""
    return any(_may_be_marked(batch.column(name)) for name in _IMAGES) and any(
        _marked(batch.column(name)).true_count for name in _IMAGES
    )


def decrypt(
    batch: pa.RecordBatch, contracts: Sequence[TableContract], keys: SubjectKeys | None
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return ``batch`` with readable images twice: as it is stored, and as it is judged.

    Args:
        batch: columns of ``RAW_TYPE`` and any others.
        contracts: of the source.
        keys: keys of the data subjects; None if the home has none.

    Returns:
        The batch to store, in which columns with a destroyed key are NULL, and the batch to judge, in which
            such columns are missing.

    Raises:
        SubjectKeysUnreadable: a key is missing that was not destroyed.
    """
    judged = batch
    hidden = {each.table_name: null_once_erased(each) for each in contracts}
    for name in _IMAGES:
        if not _may_be_marked(batch.column(name)):
            continue
        marked = _marked(batch.column(name))
        if not marked.true_count:
            continue
        events = batch.filter(marked)
        made, left = _decrypted(events, name, hidden, keys)
        index = batch.schema.get_field_index(name)
        field, landed = batch.schema.field(index), batch.column(name)
        kept = pc.replace_with_mask(landed, marked, pa.array(made, pa.string()))
        batch = batch.set_column(index, field, kept)
        to_judge = kept if left is made else pc.replace_with_mask(landed, marked, pa.array(left, pa.string()))
        judged = judged.set_column(index, field, to_judge)
    return batch, judged


def _may_be_marked(images: pa.StringArray) -> bool:
    """Whether the mark of encrypted values occurs in any of ``images``; one search over all their bytes."""
    if not pa.types.is_string(images.type):
        return True
    _, offsets, texts = images.buffers()
    if texts is None or not len(images):
        return False
    ends = np.frombuffer(offsets, np.int32, len(images) + 1, 4 * images.offset)
    start, stop = int(ends[0]), int(ends[-1])
    if compiled_images is not None:
        return compiled_images.contains(texts, start, stop, _MARK_BYTES)
    return re.search(re.escape(_MARK_BYTES), memoryview(texts)[start:stop]) is not None


def _marked(images: pa.StringArray) -> pa.BooleanArray:
    return pc.fill_null(pc.match_substring(images, MARK), False)


def _decrypted(
    events: pa.RecordBatch,
    name: str,
    hidden: dict[TableName, tuple[str, ...]],
    keys: SubjectKeys | None,
) -> tuple[list[str], list[str]]:
    """Return the images ``name`` of ``events``, and the same without the columns whose key is destroyed."""
    images: list[str] = events.column(name).to_pylist()
    ids = [key_id(image) for image in images]
    wanted = {each for each in ids if each is not None}
    if wanted and keys is None:
        raise SubjectKeysUnreadable(
            "Events landed encrypted, and the home has no keys of subjects.",
            fix="Restore keys/ of the home from its newest backup. Nothing was changed.",
        )
    known = keys.by_id(wanted) if keys is not None and wanted else {}
    schemas, tables = (events.column(each).to_pylist() for each in ("source_schema", "source_table"))
    unsent = events.column("unchanged").to_pylist() if name == "after" else [None] * len(images)
    found: list[str] = []
    left = found
    for row, (image, each) in enumerate(zip(images, ids, strict=True)):
        table_name = schemas[row], tables[row]
        key = None if each is None else known[each]
        if key is None or key.secret is None:
            if left is found:
                left = [*found]
            left.append(without_values(image, (), None))
            found.append(without_values(image, hidden.get(table_name, ()), unsent[row]))
            continue
        found.append(decrypted(image, key, ".".join(table_name).encode()))
        if left is not found:
            left.append(found[-1])
    return found, left
