"""Fold ordinary groups by whole columns. A group is one window's events of one key.

A group is ordinary if each of its events has a position of its own, none is a key change that left a column
unsent, and its images are proven to be flat. Nearly all groups are. The others are folded one by one by
``event_fold``, which defines what a fold means. Both give the same row for a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.key_changes import without_complete_key_changes
from omnisupport_ingest.contracts import plain_texts
from omnisupport_ingest.contracts.flat_images import read_flat, read_keys

Rows = npt.NDArray[np.int64]
"""Numbers of events; -1 for none."""

Mask = npt.NDArray[np.bool_]

Defaults = tuple[tuple[str, str | None], ...]
"""Columns that were added to a table later, each with the text that older rows have in it."""

_FEW_STRETCHES = 8
"""Slices up to which folded rows are passed on without copying; each becomes a batch."""

_LIVING, _STARTS, _DELETES = pa.array(["c", "u", "r"]), pa.array(["c", "r"]), pa.array(["d"])


class SortedGroups:
    """Events sorted by window, key and position, and where each group begins.

    Events are named by their number in the sorted table.
    """

    def __init__(self, events: pa.Table) -> None:
        """``events``: the columns of ``fold.to_fold``, at least one row, in one chunk. Images may be missing
        (``late_images``)."""
        codes = columnar.one_chunk(events["window"]).dictionary_encode()
        window = _numbers(pc.fill_null(codes.indices, -1))
        key = integer_keys(columnar.one_chunk(events["key"]))
        if key is None:
            key = _ranks(columnar.one_chunk(events["key"]))
        position = [_numbers(events[name]) for name in ("ordinal", "commit_lsn", "epoch")]
        order = _sorted(window, key, position)
        self.events = events.take(pa.array(order))
        self._divide([each[order] for each in (window, key, *position)])

    def _divide(self, sorted_by: list[Rows]) -> None:
        """Find the groups. ``sorted_by``: window, key and parts of the position of each event."""
        self._sorted_by = sorted_by
        same = [each[1:] == each[:-1] for each in sorted_by]
        new_group = np.concatenate([[True], ~(same[0] & same[1])])
        self.first = np.flatnonzero(new_group)
        self.group = np.cumsum(new_group) - 1
        self.at_one_position = np.concatenate([[False], np.logical_and.reduce(same)])

    def parts(self, needed: Mask, most: int) -> Iterator[tuple[SortedGroups, Mask]]:
        """Yield the groups in parts, in order, each with its part of ``needed``: at most ``most`` of these
        events, or one group."""
        counted = np.concatenate([[0], np.cumsum(np.add.reduceat(needed, self.first, dtype=np.int64))])
        ends, start = np.append(self.first, len(needed)), 0
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(counted, counted[start] + most, side="right")) - 1)
            low, high = ends[start], ends[stop]
            part = self if high - low == len(needed) else self._between(low, high)
            yield part, needed[low:high]
            start = stop

    def _between(self, low: int, high: int) -> SortedGroups:
        """Return the groups of the events from ``low`` (inclusive) to ``high`` (exclusive)."""
        part = copy(self)
        part.events = self.events.slice(low, high - low)
        part._divide([each[low:high] for each in self._sorted_by])
        return part

    def drop_complete_key_changes(self, plain: tuple[str, ...]) -> None:
        """Treat key changes that carry every non-key column as ordinary events (``key_changes``); needs their
        images.

        No event may be left after that.
        """
        self.events, stay = without_complete_key_changes(self.events, plain)
        if stay is not None and not stay.all():
            self._divide([each[stay] for each in self._sorted_by])

    def __len__(self) -> int:
        return len(self.first)

    @property
    def last(self) -> Rows:
        return np.append(self.first[1:], self.events.num_rows) - 1

    def latest(self, chosen: Mask) -> Rows:
        """Return the last of the ``chosen`` events of each group; -1 for none."""
        return np.maximum.reduceat(np.where(chosen, np.arange(len(chosen)), -1), self.first)

    def have(self, chosen: Mask) -> Mask:
        """Return which groups have one of the ``chosen`` events."""
        return np.logical_or.reduceat(chosen, self.first)

    def ops(self, among: pa.Array) -> Mask:
        return _mask(pc.is_in(self.events["op"], among))

    @property
    def unsent(self) -> Mask:
        """Which events name columns that were not sent."""
        return _mask(pc.greater(pc.fill_null(pc.list_value_length(self.events["unchanged"]), 0), 0))

    @property
    def withheld(self) -> Mask:
        """Which events are withheld."""
        return _mask(self.events["withheld"])

    def odd(self) -> Mask:
        """Which events make their group one for ``event_fold``, whatever their images are."""
        odd: Mask = ~(self.ops(_LIVING) | self.ops(_DELETES)) | self.at_one_position
        odd |= _mask(self.events["key"].is_null())
        # A withheld event takes nothing from an old key.
        odd |= _mask(self.events["moved_from_key"].is_valid()) & ~self.withheld
        return odd

    def needed_images(self) -> Mask:
        """Which events' images may decide a row.

        Images of other events are read only if one of these turns out not to be flat.
        """
        living = self.ops(_LIVING)
        alive = self.latest(living)
        newest = np.zeros(self.events.num_rows, np.bool_)
        newest[alive[alive >= 0]] = True
        incomplete = self.have(newest & self.unsent) | self.have(self.odd())
        needed: Mask = newest | incomplete[self.group]
        return needed


def _sorted(window: Rows, key: Rows, position: list[Rows]) -> Rows:
    """Return the numbers of events by window, key and position. ``position``: its parts, the lowest first."""
    same_part = [each[1:] == each[:-1] for each in position]
    rises = position[0][1:] >= position[0][:-1]
    for part in (1, 2):
        rises = (position[part][1:] > position[part][:-1]) | (same_part[part] & rises)
    if not rises.all():
        return np.lexsort((*position, key, window))
    # Events of one batch come in order, which a stable sort uses.
    order = np.argsort(key, kind="stable")
    return order if (window == window[0]).all() else order[np.argsort(window[order], kind="stable")]


def _ranks(keys: pa.StringArray) -> Rows:
    """Return the rank of each of ``keys`` among their distinct texts, by code points; -1 for null."""
    codes = keys.dictionary_encode()
    ranks = np.empty(len(codes.dictionary) + 1, np.int64)
    ranks[pc.sort_indices(codes.dictionary).to_numpy()] = np.arange(len(codes.dictionary))
    ranks[-1] = -1
    return ranks[_numbers(pc.fill_null(codes.indices, -1))]


def integer_keys(keys: pa.StringArray) -> Rows | None:
    """Return ``keys`` as numbers if each is one plain integer, else None. A null key becomes the lowest
    number."""
    found = plain_texts.integer_keys(keys)
    if not pc.all(found.plain).as_py():
        return None
    return np.asarray(pc.fill_null(found.values, np.iinfo(np.int64).min).to_numpy(), np.int64)


def fold_ordinary(
    events: pa.Table, columns: tuple[str, ...], key: tuple[str, ...], defaults: Defaults = ()
) -> tuple[pa.Table | None, pa.Table]:
    """Fold the ordinary groups of ``events``.

    Args:
        events: the columns of ``fold.to_fold``.
        columns: of the table.
        key: of the table.
        defaults: of columns that were added later.

    Returns:
        The folded rows, with the columns of ``event_fold.fold_groups``, or None; and the events of the other
            groups.
    """
    return fold_sorted(SortedGroups(events), columns, key, defaults)


def fold_sorted(
    groups: SortedGroups, columns: tuple[str, ...], key: tuple[str, ...], defaults: Defaults = ()
) -> tuple[pa.Table | None, pa.Table]:
    """Fold sorted events as ``fold_ordinary`` does."""
    plain = tuple(name for name in columns if name not in key)
    groups.drop_complete_key_changes(plain)
    if not groups.events.num_rows:
        return None, groups.events
    found = _GroupFold(groups, plain, tuple(each for each in defaults if each[0] in plain))
    keys_read, keys = read_keys(columnar.one_chunk(groups.events["key"]).take(pa.array(groups.first)), key)
    ordinary = found.ordinary & _mask(keys_read)
    rest = groups.events.filter(pa.array(~ordinary[groups.group]))
    if not ordinary.any():
        return None, rest
    values = keys | found.values()
    table = pa.table(
        {"window": _take(groups.events["window"], groups.first)}
        | {name: values[name] for name in columns}
        | found.state()
    )
    return columnar.filter_slices(table, ordinary, most_stretches=_FEW_STRETCHES), rest


class _GroupFold:
    """The folded rows of all groups; those of groups that are not ``ordinary`` mean nothing."""

    def __init__(self, groups: SortedGroups, plain: tuple[str, ...], defaults: Defaults) -> None:
        self._groups, self._plain, self._defaults = groups, plain, defaults
        numbers = np.arange(groups.events.num_rows)
        self._withheld = groups.withheld
        self._living, deletes = groups.ops(_LIVING), groups.ops(_DELETES)
        self._starts = groups.ops(_STARTS)
        self._alive = groups.latest(self._living)
        self._vouching = groups.latest(self._living & ~self._withheld)
        self._doubting = groups.latest(deletes & self._withheld)
        deletes &= ~self._withheld
        self._start = groups.latest(self._starts)
        alive = self._alive[groups.group]
        ending = groups.latest(deletes & (numbers < alive))
        # Lower deletes cannot matter any more (``life.deletes_that_matter``).
        self._deletes = np.flatnonzero(deletes & ((numbers > alive) | (numbers == ending[groups.group])))
        self._begins = np.maximum(self._start, ending)
        self.ordinary = ~groups.have(self._odd())
        self._decide()

    def _odd(self) -> Mask:
        groups = self._groups
        # Unsent columns may be in the old image.
        return groups.odd() | (groups.unsent & _mask(groups.events["before"].is_valid()))

    def _decide(self) -> None:
        """Find the event that decides each column; in most groups the last living one decides all."""
        alive, plain = self._alive, self._plain
        self._texts, self._image, sent = self._images()
        newest = alive[self.ordinary & (alive >= 0)]
        self._mark_unproven_odd(newest)
        self._add_defaults(newest, sent)
        incomplete = np.zeros(len(self._groups), np.bool_)
        if plain:
            of_newest = self._image[newest]
            incomplete[self._groups.group[newest]] = ~np.logical_and.reduce(
                [sent[name][of_newest] for name in plain]
            )
        self._decided = {name: alive.copy() for name in plain}
        if not incomplete.any():
            return
        group = self._groups.group
        numbers = np.arange(len(group))
        below = (
            self._living & incomplete[group] & (numbers >= self._begins[group]) & (numbers != alive[group])
        )
        older = np.flatnonzero(below)
        self._mark_unproven_odd(older)
        self._add_defaults(older, sent)
        looked_at = np.concatenate([newest, older])
        for name in plain:
            bringing = np.zeros(len(numbers), np.bool_)
            bringing[looked_at] = sent[name][self._image[looked_at]]
            self._decided[name] = self._groups.latest(bringing)

    def _images(self) -> tuple[dict[str, pa.StringArray], Rows, dict[str, Mask]]:
        """Read the images.

        Returns the texts of the images in the order in which they were read; for each event the number of its
        image (-1: not read); and by column, which images carry it.
        """
        if not self._plain:
            return {}, np.zeros(0, np.int64), {}
        after = columnar.one_chunk(self._groups.events["after"])
        if pa.types.is_dictionary(after.type):
            read, numbers = after.dictionary, pc.fill_null(after.indices, -1).to_numpy().astype(np.int64)
        else:
            needed = np.flatnonzero(self._groups.needed_images())
            read, numbers = after.take(pa.array(needed)), np.full(len(after), -1)
            numbers[needed] = np.arange(len(needed))
        images = read_flat(read, self._plain)
        self._proven = np.append(_mask(images.proven), False)
        return (
            images.texts,
            numbers,
            {name: np.append(_mask(each), False) for name, each in images.sent.items()},
        )

    def _mark_unproven_odd(self, numbers: Rows) -> None:
        """Make groups odd in which one of the events ``numbers`` has an image that is not proven to be
        flat."""
        if self._plain:
            self.ordinary[self._groups.group[numbers[~self._proven[self._image[numbers]]]]] = False

    def _add_defaults(self, numbers: Rows, sent: dict[str, Mask]) -> None:
        """Give the life starts among ``numbers`` the defaults of columns that they lack because the table had
        none."""
        for name, text in self._defaults:
            images = self._image[numbers]
            lacking = self._starts[numbers] & self._proven[images] & ~sent[name][images]
            # If columns were not sent though the table had them, ``event_fold`` must decide.
            self.ordinary[self._groups.group[numbers[lacking & self._groups.unsent[numbers]]]] = False
            if not lacking.any():
                continue
            defaulted = np.zeros(len(sent[name]), np.bool_)
            defaulted[images[lacking]] = True
            sent[name] |= defaulted
            default = pa.scalar(text, pa.string())
            self._texts[name] = pc.if_else(pa.array(defaulted[:-1]), default, self._texts[name])

    def values(self) -> dict[str, pa.StringArray]:
        """Return the texts of the non-key columns; null where a withheld event decides."""
        if not self._plain:
            return {}
        stands = np.append(np.where(self._withheld, -1, self._image), -1)
        # The last entry belongs to no event; index -1 leads to it.
        return {name: _take(self._texts[name], stands[self._decided[name]]) for name in self._plain}

    def state(self) -> dict[str, pa.Array]:
        """Return the columns of the fold's state, in their order."""
        events, groups = self._groups.events, self._groups
        at = columnar.position_column(events["epoch"], events["commit_lsn"], events["ordinal"])
        last, alive = groups.last, self._alive
        nothing = np.full(len(groups), -1)
        no_text = pa.nulls(len(groups), pa.string())
        return {
            "_cdc_kind": pa.array(["key"]).take(pa.array(np.zeros(len(groups), np.int64))),
            "_cdc_key": _take(events["key"], groups.first),
            "_cdc_ended_at": _take(at, nothing),
            "_cdc_op": _take(events["op"], last),
            "_cdc_position": _take(at, last),
            "_cdc_first": _take(at, groups.first),
            "_cdc_source_ts": _take(events["source_ts"], last),
            "_cdc_alive": _take(at, alive),
            "_cdc_updated_at": _take(events["source_ts"], alive),
            "_cdc_life_start": _take(at, self._start),
            "_cdc_moved_from_key": no_text,
            "_cdc_deletes": self._delete_lists(at),
            "_cdc_doubt": _take(at, self._doubting),
            "_cdc_vouched": _take(at, self._vouching),
            "_cdc_scope": no_text,
            "_cdc_column_positions": self._positions(at),
            "_cdc_unresolved": self._unresolved(),
            "_cdc_batch_id": _take(events["batch_id"], last),
            "_cdc_ingested_at": _take(events["landed_at"], last),
        }

    def _delete_lists(self, at: pa.StructArray) -> pa.ListArray:
        items = pa.StructArray.from_arrays(
            [_take(at, self._deletes), _take(self._groups.events["source_ts"], self._deletes)],
            fields=list(columnar.ENDING),
        )
        counts = np.bincount(self._groups.group[self._deletes], minlength=len(self._groups))
        return pa.ListArray.from_arrays(columnar.offsets(counts), items)

    def _positions(self, at: pa.StructArray) -> pa.MapArray:
        """Return the deciding position of columns that the last living event did not decide, or a withheld
        event decided."""
        columns = [self._decided[name] for name in self._plain]
        apart = self._by_group(
            [(each >= 0) & ((each != self._alive) | self._withheld[each]) for each in columns]
        )
        decided = np.stack(columns, axis=1)[apart] if columns else np.zeros(0, np.int64)
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(apart)[1]))
        return pa.MapArray.from_arrays(columnar.offsets(apart.sum(axis=1)), names, _take(at, decided))

    def _unresolved(self) -> pa.ListArray:
        columns = [self._decided[name] for name in self._plain]
        missing = self._by_group([(each < 0) | self._withheld[each] for each in columns])
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(missing)[1]))
        return pa.ListArray.from_arrays(columnar.offsets(missing.sum(axis=1)), names)

    def _by_group(self, columns: list[Mask]) -> Mask:
        return np.stack(columns, axis=1) if columns else np.zeros((len(self._groups), 0), np.bool_)


def _take(column: pa.Array | pa.ChunkedArray, rows: Rows) -> pa.Array:
    """Return the values of ``column`` at ``rows``; null where the row is -1."""
    if len(rows) == len(column) and (rows == np.arange(len(rows))).all():
        # A snapshot has one event of each key, in order: nothing is copied.
        return columnar.one_chunk(column)
    return columnar.one_chunk(column).take(pa.array(rows, mask=rows < 0))


def _numbers(column: pa.Array | pa.ChunkedArray) -> Rows:
    return np.asarray(columnar.one_chunk(column).to_numpy(), np.int64)


def _mask(column: pa.Array | pa.ChunkedArray) -> Mask:
    return np.asarray(columnar.one_chunk(column).to_numpy(zero_copy_only=False), np.bool_)
