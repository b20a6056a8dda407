"""Folding by whole columns, where a group is ordinary: each of its events stands at a position of its own.

Nearly all groups are. The others (a key change that left a column unsent, two events at one position, an
image that is not proven to be flat) are left to ``event_fold``, which is the meaning and folds one group
after another. For a group both give the same row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.key_changes import settled
from omnisupport_ingest.contracts.flat_images import read_flat, read_keys

Rows = npt.NDArray[np.int64]
"""Numbers of events, or -1 for none."""

Mask = npt.NDArray[np.bool_]

Defaults = tuple[tuple[str, str | None], ...]
"""Columns that were added to a table, each with the text that older rows have in it."""

_WHOLE_KEY = r'\A\["(?:0|-?[1-9][0-9]{0,17})"\]\z'

_FEW_STRETCHES = 8
"""Each of them is a batch to whoever takes the rows on."""

_LIVING, _STARTS, _DELETES = pa.array(["c", "u", "r"]), pa.array(["c", "r"]), pa.array(["d"])


class SortedGroups:
    """A table of events, sorted by window, key and position, and where each group begins.

    A group is one window's events of one key. Events are named by their number in the sorted table.
    """

    def __init__(self, events: pa.Table) -> None:
        """``events``: the columns that ``fold.to_fold`` gives, in one chunk; one or more. Images may be
        missing (``late_images``)."""
        codes = columnar.one_chunk(events["window"]).dictionary_encode()
        window = _numbers(pc.fill_null(codes.indices, -1))
        key = whole_keys(columnar.one_chunk(events["key"]))
        if key is None:
            key = _numbers(pc.fill_null(columnar.one_chunk(events["key"]).dictionary_encode().indices, -1))
        position = [_numbers(events[name]) for name in ("ordinal", "commit_lsn", "epoch")]
        order = _sorted(window, key, position)
        self.events = events.take(pa.array(order))
        self._divide([each[order] for each in (window, key, *position)])

    def _divide(self, place: list[Rows]) -> None:
        """``place``: window, key and position of each event."""
        self._place = place
        same = [each[1:] == each[:-1] for each in place]
        new_group = np.concatenate([[True], ~(same[0] & same[1])])
        self.first = np.flatnonzero(new_group)
        self.group = np.cumsum(new_group) - 1
        self.at_one_position = np.concatenate([[False], np.logical_and.reduce(same)])

    def settle(self, plain: tuple[str, ...]) -> None:
        """Forget the key changes that brought all of ``plain`` (``key_changes``); their images must be there.

        It may be that no event is left.
        """
        self.events, stay = settled(self.events, plain)
        if stay is not None and not stay.all():
            self._divide([each[stay] for each in self._place])

    def __len__(self) -> int:
        return len(self.first)

    @property
    def last(self) -> Rows:
        return np.append(self.first[1:], self.events.num_rows) - 1

    def latest(self, chosen: Mask) -> Rows:
        """The last of the ``chosen`` events of each group."""
        return np.maximum.reduceat(np.where(chosen, np.arange(len(chosen)), -1), self.first)

    def have(self, chosen: Mask) -> Mask:
        """Which groups have one of the ``chosen`` events."""
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
        """Which events make their group one for ``event_fold``, whatever is in their images."""
        odd: Mask = ~(self.ops(_LIVING) | self.ops(_DELETES)) | self.at_one_position
        odd |= _mask(self.events["key"].is_null())
        # Nothing is ever taken for what was withheld.
        odd |= _mask(self.events["moved_from_key"].is_valid()) & ~self.withheld
        return odd

    def needed_images(self) -> Mask:
        """Which events' images may decide a row: those of no other are looked at, but where an image turns
        out not to be what it should."""
        living = self.ops(_LIVING)
        alive = self.latest(living)
        newest = np.zeros(self.events.num_rows, np.bool_)
        newest[alive[alive >= 0]] = True
        incomplete = self.have(newest & self.unsent) | self.have(self.odd())
        needed: Mask = newest | incomplete[self.group]
        return needed


def _sorted(window: Rows, key: Rows, position: list[Rows]) -> Rows:
    """The numbers of events by window, key and position (its least part first)."""
    same_part = [each[1:] == each[:-1] for each in position]
    rises = position[0][1:] >= position[0][:-1]
    for place in (1, 2):
        rises = (position[place][1:] > position[place][:-1]) | (same_part[place] & rises)
    if not rises.all():
        return np.lexsort((*position, key, window))
    # Events of one batch come in order, and a sort that keeps it has little to do.
    order = np.argsort(key, kind="stable")
    return order if (window == window[0]).all() else order[np.argsort(window[order], kind="stable")]


def whole_keys(keys: pa.StringArray) -> Rows | None:
    """The numbers that ``keys`` are, if each is one whole number in its plainest form; null: the lowest."""
    plain = pc.match_substring_regex(keys, _WHOLE_KEY)
    if not pc.all(plain).as_py():
        return None
    numbers = pc.utf8_slice_codeunits(keys, 2, -2).cast(pa.int64())
    return np.asarray(pc.fill_null(numbers, np.iinfo(np.int64).min).to_numpy(), np.int64)


def fold_ordinary(
    events: pa.Table, columns: tuple[str, ...], key: tuple[str, ...], defaults: Defaults = ()
) -> tuple[pa.Table | None, pa.Table]:
    """Fold the ordinary groups of ``events``; their folded rows, and the events of the other groups.

    ``events``: the columns that ``fold.to_fold`` gives. ``columns``, ``key`` and ``defaults``: of the table.
    The rows have the columns that ``event_fold.fold_groups`` gives.
    """
    return fold_sorted(SortedGroups(events), columns, key, defaults)


def fold_sorted(
    groups: SortedGroups, columns: tuple[str, ...], key: tuple[str, ...], defaults: Defaults = ()
) -> tuple[pa.Table | None, pa.Table]:
    """``fold_ordinary`` of events that are sorted."""
    plain = tuple(name for name in columns if name not in key)
    groups.settle(plain)
    if not groups.events.num_rows:
        return None, groups.events
    found = _Found(groups, plain, tuple(each for each in defaults if each[0] in plain))
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
    return columnar.kept_where(table, ordinary, most_stretches=_FEW_STRETCHES), rest


class _Found:
    """What each group folds to; meaningless where the group is not ``ordinary``."""

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
        # Deletes below the last one below the living event cannot matter any more.
        self._deletes = np.flatnonzero(deletes & ((numbers > alive) | (numbers == ending[groups.group])))
        self._begins = np.maximum(self._start, ending)
        self.ordinary = ~groups.have(self._odd())
        self._decide()

    def _odd(self) -> Mask:
        groups = self._groups
        # What was not sent anew may stand in the old image.
        return groups.odd() | (groups.unsent & _mask(groups.events["before"].is_valid()))

    def _decide(self) -> None:
        """Find the event that decides each column: of most groups the last living one decides them all."""
        alive, plain = self._alive, self._plain
        self._texts, self._image, sent = self._images()
        newest = alive[self.ordinary & (alive >= 0)]
        self._refuse_unproven(newest)
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
        self._refuse_unproven(older)
        self._add_defaults(older, sent)
        looked_at = np.concatenate([newest, older])
        for name in plain:
            bringing = np.zeros(len(numbers), np.bool_)
            bringing[looked_at] = sent[name][self._image[looked_at]]
            self._decided[name] = self._groups.latest(bringing)

    def _images(self) -> tuple[dict[str, pa.StringArray], Rows, dict[str, Mask]]:
        """The texts of the images in the order in which they were read; for each event the number of its
        image, or -1 if it was not read; and what each image brings, nothing if it was not read."""
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

    def _refuse_unproven(self, numbers: Rows) -> None:
        """A group of which one of these events has an image that is not proven is odd."""
        if self._plain:
            self.ordinary[self._groups.group[numbers[~self._proven[self._image[numbers]]]]] = False

    def _add_defaults(self, numbers: Rows, sent: dict[str, Mask]) -> None:
        """Give what these events leave out the defaults of columns that were added later."""
        for name, text in self._defaults:
            images = self._image[numbers]
            lacking = self._starts[numbers] & self._proven[images] & ~sent[name][images]
            # Which columns were not sent, though the table had them, is for the exact kernel.
            self.ordinary[self._groups.group[numbers[lacking & self._groups.unsent[numbers]]]] = False
            if not lacking.any():
                continue
            defaulted = np.zeros(len(sent[name]), np.bool_)
            defaulted[images[lacking]] = True
            sent[name] |= defaulted
            default = pa.scalar(text, pa.string())
            self._texts[name] = pc.if_else(pa.array(defaulted[:-1]), default, self._texts[name])

    def values(self) -> dict[str, pa.StringArray]:
        """The texts of the plain columns; of what was withheld nothing is known."""
        if not self._plain:
            return {}
        stands = np.append(np.where(self._withheld, -1, self._image), -1)
        # The last is nobody's: -1 leads to it.
        return {name: _take(self._texts[name], stands[self._decided[name]]) for name in self._plain}

    def state(self) -> dict[str, pa.Array]:
        """The columns of the fold's state, in their order."""
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
        return pa.ListArray.from_arrays(_offsets(counts), items)

    def _positions(self, at: pa.StructArray) -> pa.MapArray:
        """Where a column was decided, if the last living event did not decide it, or a withheld one did."""
        columns = [self._decided[name] for name in self._plain]
        apart = self._by_group(
            [(each >= 0) & ((each != self._alive) | self._withheld[each]) for each in columns]
        )
        decided = np.stack(columns, axis=1)[apart] if columns else np.zeros(0, np.int64)
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(apart)[1]))
        return pa.MapArray.from_arrays(_offsets(apart.sum(axis=1)), names, _take(at, decided))

    def _unresolved(self) -> pa.ListArray:
        columns = [self._decided[name] for name in self._plain]
        missing = self._by_group([(each < 0) | self._withheld[each] for each in columns])
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(missing)[1]))
        return pa.ListArray.from_arrays(_offsets(missing.sum(axis=1)), names)

    def _by_group(self, columns: list[Mask]) -> Mask:
        return np.stack(columns, axis=1) if columns else np.zeros((len(self._groups), 0), np.bool_)


def _take(column: pa.Array | pa.ChunkedArray, rows: Rows) -> pa.Array:
    """The values of ``column`` at ``rows``; null where the row is -1."""
    if len(rows) == len(column) and (rows == np.arange(len(rows))).all():
        # A snapshot has one event of each key, and reads them in order.
        return columnar.one_chunk(column)
    return columnar.one_chunk(column).take(pa.array(rows, mask=rows < 0))


def _offsets(counts: Rows) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


def _numbers(column: pa.Array | pa.ChunkedArray) -> Rows:
    return np.asarray(columnar.one_chunk(column).to_numpy(), np.int64)


def _mask(column: pa.Array | pa.ChunkedArray) -> Mask:
    return np.asarray(columnar.one_chunk(column).to_numpy(zero_copy_only=False), np.bool_)
