"""Having rows and subjects erased in a home: which of them may be, and what is gone, by the oracle's words.

A row that has ended may be erased, under the key that it had last. Gone are the events of that key back to
where another row left it, and those of the keys that the row had before, back likewise.

A subject may be erased by any of its rows, if no image of that row is of another one.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.erasing import ErasureRefused
from omnisupport_ingest.review.subject_erasure import SubjectErased
from omnisupport_ingest_tests.oracle.model import Event, Key, Position, TableShape
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.expected import Expected, is_whole
from omnisupport_ingest_tests.proof.landed import Subject, own_subject
from omnisupport_ingest_tests.proof.platform import Platform
from omnisupport_ingest_tests.proof.policies import KEYS, Secrets
from omnisupport_ingest_tests.proof.privacy import Sought, texts_of
from omnisupport_ingest_tests.proof.subjects import Left, readable_now

Span = tuple[Position | None, Position]
"""Events above the first position (null: from the first event on) and up to the second one."""

_AT_ONCE = 6
"""Rows of one table that are asked for in one step."""

_TRIES = 8
"""Rows of a table that are looked at until the subject of one may be erased."""

_LARGEST = 0.4
"""A subject with a greater share of its table's images is not erased: too little would be left to prove."""

_WAITING, _LEFT_OVER, _BY_OTHER_KEYS, _CELLS = (
    "windows that wait to be judged",
    "files that no table names",
    "images of its rows that are of another subject",
    "cells that can be read",
)
"""What a certificate says that remains."""


@dataclass(frozen=True)
class Asked:
    """A row that was asked for: its table and key, and what was erased of it by key, nothing if refused."""

    table: str
    key: Key
    spans: frozenset[tuple[Key, Span]]


def erase_some(rng: Random, platform: Platform, expected: Expected) -> tuple[list[Asked], list[Difference]]:
    """Ask for some rows of each table, most of them ended ones; what was done and what should not have been.

    Everything that landed is taken in, and ``expected`` is what the layers hold.
    """
    asked, wrong = [], []
    for shape in expected.shapes:
        rows = expected.state(shape)
        ended = sorted(key for key, row in rows.items() if row.ended)
        living = sorted(rows.keys() - set(ended))
        chosen = rng.sample(ended, min(_AT_ONCE, len(ended))) + rng.sample(living, min(1, len(living)))
        for key in chosen:
            one, differs = _ask(platform, expected, shape, key)
            asked.append(one)
            wrong += differs
    return asked, wrong


def _ask(
    platform: Platform, expected: Expected, shape: TableShape, key: Key
) -> tuple[Asked, list[Difference]]:
    events = [event for _, event in expected.events(shape.name)]
    of_lane = [event for event in events if _is_near(event, key)]
    where, lane = f"erasing {shape.name}", int(key[0])
    try:
        done = platform.erase(shape.name, key_text(key))
    except ErasureRefused as refused:
        # Where something is in quarantine, whether the row has ended may be in doubt.
        plain = not any(event.quarantined for event in of_lane)
        if plain and expected.state(shape)[key].ended and not _has_left(of_lane, key):
            return Asked(shape.name, key, frozenset()), [
                Difference(where, str(key), str(refused), "erased, for the row has ended", lane)
            ]
        return Asked(shape.name, key, frozenset()), []
    if not expected.state(shape)[key].ended:
        return Asked(shape.name, key, frozenset()), [
            Difference(where, str(key), "erased", "refused, for the row has not ended", lane)
        ]
    spans = frozenset(_spans(of_lane, key))
    found = {(each.key_hash, (each.span.after, each.span.through)) for each in (*done.before, *done.recorded)}
    due = {(sha256(key_text(name).encode()).hexdigest(), span) for name, span in spans}
    if found != due:
        return Asked(shape.name, key, spans), [
            Difference(where, f"what is erased of {key}", found, sorted(spans, key=repr), lane)
        ]
    return Asked(shape.name, key, spans), []


def key_text(key: Key) -> str:
    return json.dumps(list(key), separators=(",", ":"))


def _is_near(event: Event, key: Key) -> bool:
    """Whether an event is of the history that a key is of, or about all of them."""
    return event.key[0] == key[0] if event.key is not None else event.reaches(key)


def _spans(events: Iterable[Event], key: Key) -> set[tuple[Key, Span]]:
    """By key, what of it belongs to the row that ended under ``key``."""
    events = list(events)
    left = {(each.moved_from, each.at.below()) for each in events if each.moved_from is not None}
    found: set[tuple[Key, Span]] = set()
    ends = {(key, _end(events, key))}
    while ends:
        name, end = ends.pop()
        above = max((at for old, at in left if old == name and at < end), default=None)
        found.add((name, (above, end)))
        came = (
            each
            for each in events
            if each.moved_from is not None
            and each.key == name
            and each.at <= end
            and not (above is not None and each.at <= above)
        )
        ends |= {
            (each.moved_from, each.at.below())
            for each in came
            if each.moved_from is not None
            and not any(n == each.moved_from and span[1] == each.at.below() for n, span in found)
        }
    return found


def _end(events: Iterable[Event], key: Key) -> Position:
    """Where the row of ``key`` ended: by the last event of the key, or by what ended it with others."""
    events = list(events)
    last = max((each for each in events if each.key == key), key=lambda each: each.at)
    if last.op == "d":
        return last.at
    return min(each.at for each in events if each.key is None and not each.quarantined and each.at > last.at)


def _has_left(events: Iterable[Event], key: Key) -> bool:
    """Whether what stood under ``key`` last is a row that has another key since."""
    events = list(events)
    left = max((each.at.below() for each in events if each.moved_from == key), default=None)
    return left is not None and not any(
        each.key == key and each.op in "cru" and each.at > left for each in events
    )


@dataclass(frozen=True)
class AskedSubject:
    """A subject that was asked for by the row ``key`` of ``table``, by all its names, and how many ``images``
    its key had encrypted then."""

    table: str
    key: Key
    subjects: frozenset[Subject]
    images: int


def erase_subjects(
    rng: Random, platform: Platform, left: Left
) -> tuple[list[AskedSubject], list[Difference]]:
    """Have one subject of each table erased whose contract says encrypted; what was done, and what should not
    have been.

    ``left``: what there is. All of it is taken in.
    """
    asked, wrong = list[AskedSubject](), list[Difference]()
    gone = {*left.erased}
    for table, each in sorted(left.terms.items()):
        if each.subject is not None:
            one, differs = _erase_one(rng, platform, left, table, gone)
            wrong += differs
            asked += one
            gone |= {subject for each in one for subject in each.subjects}
    return asked, wrong


def _erase_one(
    rng: Random, platform: Platform, left: Left, table: str, erased: Collection[Subject]
) -> tuple[list[AskedSubject], list[Difference]]:
    landed = left.landed
    images, plain = [*landed.encrypted_images()], [*landed.plain_images(left.terms)]
    of_table = [(each.event.key, subject) for each, subject in images if each.event.table == table]
    of_row: dict[Key, set[Subject]] = defaultdict(set)
    for key, subject in of_table:
        if is_whole(key) and key is not None:
            of_row[key].add(subject)
    readable = readable_now(table, left.terms.get(table))
    for each, subject, image in plain:
        if each.event.table != table or each.event.key not in of_row:
            continue
        if image is None or any(text is not None for name, text in image.items() if name not in readable):
            of_row[each.event.key].add(subject)
    rows = sorted(key for key, subjects in of_row.items() if subjects.isdisjoint(erased))
    where = f"erasing a subject of {table}"
    for key in rng.sample(rows, min(_TRIES, len(rows))):
        subjects, lane = frozenset({*of_row[key], own_subject(table, key)}), int(key[0])
        if sum(subject in subjects for _, subject in of_table) > _LARGEST * len(of_table):
            continue
        refuses = len(of_row[key] - {own_subject(table, key)}) > 1
        try:
            done = platform.erase_subject(table, key_text(key))
        except ErasureRefused as refused:
            if refuses:
                continue
            return [], [Difference(where, str(key), str(refused), "erased, for it has one subject", lane)]
        theirs = [each for each, subject in images if subject in subjects]
        found = done.images, done.windows, _certificate(done)["keys"]["destroyed_now"]
        in_plain = {each.window for each, subject, _ in plain if subject in subjects}
        windows = tuple(sorted({each.window for each in theirs} | in_plain))
        due = len(theirs), windows, landed.keys_made(subjects)
        if refuses or found != due:
            expected = "refused, for it has several subjects" if refuses else due
            return [], [Difference(where, f"images, windows and keys of {key}", found, expected, lane)]
        return [AskedSubject(table, key, subjects, len(theirs))], []
    return [], []


def complete(platform: Platform, asked: AskedSubject, left: Left) -> tuple[bool, list[Difference]]:
    """Give the command again, now that nothing is pending; whether all of it is done then, and what is not as
    it must be."""
    done = platform.erase_subject(asked.table, key_text(asked.key))
    if _WAITING in {each["what"] for each in done.remains}:
        # The command found images in windows that had none of the subject when it was given before.
        platform.catch_up()
        platform.make_histories()
        done = platform.erase_subject(asked.table, key_text(asked.key))
    state, lane = _certificate(done)["state"], int(asked.key[0])
    remains = {each["what"]: each["where"][:2] for each in done.remains}
    states = {"incomplete" if _BY_OTHER_KEYS in remains else "complete"}
    if left.shows(asked.subjects):
        # What landed plain can be read in landing still, and by another's key above it.
        states |= {"incomplete", "pending"}
    if _LEFT_OVER in remains:
        # Runs that lost against others left them; the sweep deletes them later.
        states = {"pending"}
    where, wrong = f"the certificate of a subject of {asked.table}", []
    if state not in states or done.complete != (state == "complete"):
        wrong += [Difference(where, str(asked.key), (state, remains), sorted(states), lane)]
    most = sum(subject in asked.subjects for _, subject in left.landed.encrypted_images())
    if not asked.images <= done.images <= most:
        wrong += [Difference(where, f"images of {asked.key}", done.images, (asked.images, most), lane)]
    return state != "pending" or _CELLS not in remains, wrong


def in_the_home(workspace: Workspace, lost: Mapping[str, Sought]) -> Iterator[Difference]:
    """The files of the home, of whatever version, that show a value of erased subjects that no other has.

    Of a value its hashes and its token are looked for, too: policies leave these in layers above raw. But for
    the map of tokens, which an erasure leaves as it is, and files that a certificate names as left over.
    """
    hidden = {text for each in lost.values() for text in each.hidden}
    shown = {text for each in lost.values() for text in each.shown}
    values, forms = Sought(hidden, shown), _forms(hidden - shown, workspace.tokens.path)
    home, named = workspace.home.path, {workspace.tokens.path}
    for file in (home / "certificates").glob("*.json"):
        for each in json.loads(file.read_text())["remains"]:
            named |= {home / path for path in each["where"] if each["what"] == _LEFT_OVER}
    for file in sorted(each for each in home.rglob("*") if each.is_file()):
        if any(file.name.startswith(each.name) for each in named):
            continue
        texts = [*texts_of(file)]
        found = values.found_in(texts) | (forms.intersection(texts) if file.suffix == ".parquet" else set())
        found |= {form for form in forms if file.suffix != ".parquet" and form in texts[0]}
        if found:
            name = str(file.relative_to(home))
            yield Difference(name, "values of erased subjects", sorted(found)[:3], [])


def _forms(values: Collection[str], tokens: Path) -> set[str]:
    """The hashes of ``values`` by each key, and their tokens in the map ``tokens``."""
    found = {Secrets(key).hash_of(text) for key in KEYS for text in values}
    if tokens.exists():
        with closing(sqlite3.connect(tokens)) as base:
            found |= {
                token for value, token in base.execute("SELECT value, token FROM tokens") if value in values
            }
    return found


def _certificate(done: SubjectErased) -> dict[str, Any]:
    assert done.certificate is not None, "an erasure has one"
    found: dict[str, Any] = json.loads(Path(done.certificate).read_text())
    return found
