"""What is left of what landed once subjects are erased, in the oracle's words.

Worked out from the batches and the contracts by which they landed: an image is of the subject that it names,
else of its row. Once that subject's key is destroyed, what landed readable is left, and every other column
that the contract has by now and that may be NULL reads as NULL. Such an image is judged without these. Copies
at its position are compared by what is readable now, or by no image at all where the erased one does not show
all of that. An image that landed plain is judged as it landed; then what is readable now is kept of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from omnisupport_ingest_tests.oracle.judging import Delivery
from omnisupport_ingest_tests.oracle.model import Event, Image, Key
from omnisupport_ingest_tests.proof.landed import Copy, Landed, Subject, plain_of
from omnisupport_ingest_tests.proof.privacy import Sought
from omnisupport_ingest_tests.proof.tables import KEY, SHAPES, Terms

_BY_CONTENT, _BY_SHOWN, _BY_BARE = 0, 1, 2
"""By what the copies at a position are compared; the highest that one of them says."""


class Left:
    """All of ``landed`` that may be taken, as it is where the subjects ``erased`` have no key any more.

    ``terms``: the contracts that are in force.
    """

    def __init__(self, landed: Landed, erased: Collection[Subject], terms: Mapping[str, Terms]) -> None:
        self.landed, self.erased, self.terms = landed, frozenset(erased), terms
        self.copies: Mapping[int, Copy] = landed.copies

    @cached_property
    def deliveries(self) -> list[Delivery]:
        if not self.erased:
            return self.landed.taken
        places: dict[object, list[tuple[Delivery, _Left]]] = defaultdict(list)
        for each in self.landed.taken:
            left = _Left.of(each, self.copies[each.number], self.erased, self.terms.get(each.event.table))
            places[each.window, each.event.at, each.event.identity].append((each, left))
        found = []
        for here in places.values():
            by = max(left.compared_by for _, left in here)
            found += [self._emptied(left.delivery(each, self.copies[each.number], by)) for each, left in here]
        return found

    def _emptied(self, delivery: Delivery) -> Delivery:
        """The delivery with those images named that landed plain and are of an erased subject."""
        landed = delivery.landed or delivery
        of = plain_of(landed, self.copies[landed.number], self.terms)
        now = readable_now(landed.event.table, self.terms.get(landed.event.table))
        gone = tuple((name, now) for name, subject in of.items() if subject in self.erased)
        return replace(delivery, of_erased=gone) if gone else delivery

    @cached_property
    def lost_values(self) -> dict[str, Sought]:
        """By table, the values of erased subjects, and those that can be read of others, or of them."""
        found: dict[str, Sought] = defaultdict(Sought)
        for each in self.deliveries:
            of_table = found[each.event.table]
            of_table.shown.update(_values(each))
            if each.landed is not None:
                of_table.hidden.update(_values(each.landed))
        # What is held back by a gap is in landing, readable or not.
        taken = {each.number for each in self.landed.taken} if found else set()
        for each in self.landed.deliveries if self.erased else ():
            if each.number not in taken:
                found[each.event.table].shown.update(_values(each))
        return dict(found) if any(each.hidden for each in found.values()) else {}

    def shows(self, subjects: Collection[Subject]) -> bool:
        """Whether a personal value of a row of ``subjects`` can be read, as it landed plain or by another's
        key."""
        rows = {
            (each.event.table, each.event.key)
            for each, subject in self.landed.encrypted_images()
            if subject in subjects
        }
        for each in self.deliveries:
            terms = self.terms.get(each.event.table)
            if terms is None:
                continue
            for _, image, key in _images(each.event):
                row = _row(image, key)
                theirs = (each.event.table, row.get(terms.subject or "") or "") in subjects
                theirs |= (each.event.table, each.event.key) in rows
                if theirs and any(row[name] is not None for name in row.keys() & terms.policies.keys()):
                    return True
        return False


@dataclass(frozen=True)
class _Left:
    """What is left of a copy.

    ``gone``: its images whose key is destroyed. ``kept``: the event as it is stored; ``judged``: as rules see
    it. ``shown``: of each image the columns that land readable by now. ``compared_by``: how copies at its
    position are compared, as far as this one says.
    """

    gone: frozenset[str]
    kept: Event
    judged: Event
    shown: tuple[object, ...]
    compared_by: int

    @classmethod
    def of(cls, delivery: Delivery, copy: Copy, erased: Collection[Subject], terms: Terms | None) -> _Left:
        event = delivery.event
        gone = frozenset(name for name, subject in copy.whose.items() if subject in erased)
        kept = judged = event
        shown, compared_by = [], _BY_CONTENT
        now = readable_now(event.table, terms)
        for name, image, key in _images(event):
            read = image
            if name == "after" and delivery.unreadable is not None:
                read, key = {}, None
            row = None if read is None else _row(read, key)
            if name in gone and row is not None:
                head = {column: text for column, text in row.items() if column in (copy.readable or ())}
                columns = {column: text for column, text in head.items() if column not in KEY}
                unsent = event.unchanged if name == "after" else frozenset[str]()
                nulls: Image = dict.fromkeys(_null_once_erased(event.table, terms) - head.keys() - unsent)
                judged = _with(judged, name, columns)
                kept = _with(kept, name, nulls | columns)
                lacks = now - head.keys() - event.unchanged
                compared_by = max(compared_by, _BY_BARE if lacks else _BY_SHOWN)
                row = head
            shown.append(None if row is None else frozenset((n, row[n]) for n in row.keys() & now))
        return cls(gone, kept, judged, tuple(shown), compared_by)

    def delivery(self, landed: Delivery, copy: Copy, compared_by: int) -> Delivery:
        if compared_by == _BY_CONTENT:
            return landed
        event = landed.event
        told = (event.op, event.table, event.key, event.unchanged, event.moved_from, event.source_ts)
        shown = self.shown if compared_by == _BY_SHOWN else ()
        whole = "after" in self.gone and landed.unreadable is not None
        return replace(
            landed,
            event=self.kept,
            judged=self.judged,
            unreadable=None if whole else landed.unreadable,
            was_unreadable=whole,
            same=(compared_by, *told, *shown),
            landed=landed,
            # Of copies that are judged alike one stands for the others, whatever form it landed in.
            order=() if copy.file_row is None else (copy.landed_at, copy.batch_id, copy.file_row),
        )


def _images(event: Event) -> Iterator[tuple[str, Image | None, Key | None]]:
    """Each row image of an event, with its name and the key that stands in it."""
    yield "before", event.before, event.moved_from or event.key
    yield "after", event.after, event.key


def _row(image: Image | None, key: Key | None) -> Image:
    """A row image with the columns of the key."""
    return {**dict(zip(KEY, key or (), strict=False)), **(image or {})}


def _with(event: Event, name: str, image: Image) -> Event:
    return replace(event, before=image) if name == "before" else replace(event, after=image)


def readable_now(table: str, terms: Terms | None) -> frozenset[str]:
    """The columns of a table that land as they are by today's contract, or would if it said encrypted."""
    for shape in SHAPES:
        if shape.name == table and terms is not None:
            plain = {name for name in terms.source_of(shape).columns if name not in terms.policies}
            found_by = {terms.subject, shape.soft_delete_column} if terms.subject else set[str | None]()
            return frozenset(name for name in (*KEY, *plain, *found_by) if name is not None)
    return frozenset()


def _null_once_erased(table: str, terms: Terms | None) -> frozenset[str]:
    for shape in SHAPES:
        if shape.name == table and terms is not None:
            return frozenset(terms.source_of(shape).columns) - {shape.soft_delete_column or ""}
    return frozenset()


def _values(delivery: Delivery) -> Iterator[str]:
    event = delivery.event
    yield from (part for key in (event.key, event.moved_from) for part in key or () if part is not None)
    if delivery.unreadable is not None:
        yield delivery.unreadable
    for image in (event.before, event.after):
        yield from (text for text in (image or {}).values() if text is not None)
