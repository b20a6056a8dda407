"""A hash of a set of rows that does not depend on their order or their split into files.

Each row has a 64-bit hash. The hash of a set has three parts: the number of rows, the sum of their hashes
modulo 2^64, and the exclusive or of their hashes. All three are commutative and associative, so parts of a
set can be hashed separately and added. The sum counts repeated rows, which cancel in the exclusive or. The
hash detects accidents, not attacks: a person who can choose the rows can make two sets collide.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MODULUS = 1 << 64
_ODD = 0x9E3779B97F4A7C15
"""An odd number, so that multiplying by it loses nothing (2^64 divided by the golden ratio)."""


@dataclass(frozen=True, slots=True)
class ContentHash:
    """The hash of a set of rows; ``ContentHash()`` is the hash of the empty set."""

    count: int = 0
    total: int = 0
    parity: int = 0

    @classmethod
    def of(cls, hashes: npt.NDArray[np.int64]) -> ContentHash:
        """Return the hash of the set of rows that have these ``hashes``."""
        values = np.ascontiguousarray(hashes, dtype=np.int64).view(np.uint64)
        # numpy's sum of unsigned numbers wraps around at 2^64, which is the modulus wanted.
        total = int(np.add.reduce(values)) if len(values) else 0
        parity = int(np.bitwise_xor.reduce(values)) if len(values) else 0
        return cls(len(values), total, parity)

    def __add__(self, other: ContentHash) -> ContentHash:
        return ContentHash(
            self.count + other.count, (self.total + other.total) % _MODULUS, self.parity ^ other.parity
        )

    def __sub__(self, other: ContentHash) -> ContentHash:
        """Return the hash without the rows of ``other``, which must be a subset of this set."""
        return ContentHash(
            self.count - other.count, (self.total - other.total) % _MODULUS, self.parity ^ other.parity
        )

    def __str__(self) -> str:
        """48 hexadecimal digits: count, sum, exclusive or."""
        return f"{self.count:016x}{self.total:016x}{self.parity:016x}"

    @classmethod
    def parse(cls, text: str) -> ContentHash:
        """Read the form that ``str`` writes."""
        return cls(int(text[:16], 16), int(text[16:32], 16), int(text[32:], 16))


def hash_of_files(files: Iterable[str | os.PathLike[str]], column: str) -> ContentHash:
    """Return the hash of all rows of the Parquet ``files``; the int64 ``column`` holds each row's hash.

    A file without rows adds nothing. Raises ``ValueError`` if a row has no hash (NULL).
    """
    found = ContentHash()
    for file in files:
        with pq.ParquetFile(os.fspath(file)) as parquet:
            for batch in parquet.iter_batches(columns=[column]):
                hashes = batch.column(0)
                if hashes.null_count:
                    raise ValueError(f"{hashes.null_count} rows of {os.fspath(file)} have no {column}")
                found += ContentHash.of(hashes.to_numpy(zero_copy_only=False))
    return found


def hash_of_rows(
    files: Iterable[str | os.PathLike[str]],
    where: Mapping[str, str],
    *,
    withheld: bool = False,
) -> ContentHash:
    """Return the hash of the events that have the values of ``where``, by column.

    ``withheld``: hash the rows as withheld events, which differs from the hash of the same rows accepted.
    """
    found = ContentHash()
    for file in files:
        with pq.ParquetFile(os.fspath(file)) as parquet:
            for batch in parquet.iter_batches(columns=["event_hash", *where]):
                chosen = np.ones(batch.num_rows, np.bool_)
                for name, value in where.items():
                    chosen &= pc.fill_null(pc.equal(batch[name], value), False).to_numpy(zero_copy_only=False)
                hashes = batch["event_hash"].to_numpy(zero_copy_only=False)[chosen]
                if withheld:
                    hashes = (hashes.view(np.uint64) * np.uint64(_ODD) + np.uint64(1)).view(np.int64)
                found += ContentHash.of(hashes)
    return found
