"""Why the content of a replayed window differs from before.

A replay changes nothing, or the change is explained: the checkpoint of a replaced window keeps its previous
content hash and, where that differs, how many keys have another state and what changed in their events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.plan import Upstream
from omnisupport_ingest.layers.versions import changes

LATE_EVENTS, NEW_EVENTS, EVENTS_GONE = "late events", "new events", "events gone"
UPSTREAM = "another layer above"
UNEXPLAINED = "unexplained"
"""Reason if nothing known about the window changed, and yet its content did: never expected."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a window held before it is rebuilt, and what is known to have changed in its inputs.

    ``keys_changed`` counts the keys with another state. It is called only if the content may differ; None for
    a layer without keys. ``unseen``: reasons among ``by`` that change rows of later layers, but not
    the content hash of this one. (An erased event in quarantine keeps its hash, because the hash is its
    name.)
    """

    content_hash: str
    by: tuple[str, ...]
    keys_changed: Callable[[], int] | None = None
    unseen: tuple[str, ...] = ()

    def explain(self, content_hash: str) -> tuple[int | None, tuple[str, ...]]:
        """The number of changed keys, and the reasons, given the window's new ``content_hash``."""
        if content_hash == self.content_hash and not self.unseen:
            return None, ()
        keys = self.keys_changed() if self.keys_changed is not None else None
        if content_hash == self.content_hash:
            return keys or None, self.unseen
        return keys, self.by or (UNEXPLAINED,)


def reasons(
    before: WindowState,
    upstream: Upstream,
    batches: Collection[str],
    late: Collection[str],
    above: WindowState | None = None,
) -> tuple[str, ...]:
    """Return what differs between the former inputs of a window and its inputs now.

    ``batches``: the batches that the window will hold. ``late``: those of them whose events landed after it
    was closed. ``above``: the window's state in the layer above; its reasons count too if its files changed.
    """
    found = list(changes(before.versions, upstream.versions))
    new = set(batches) - set(before.batches)
    if new & set(late):
        found.append(LATE_EVENTS)
    if new - set(late):
        found.append(NEW_EVENTS)
    if set(before.batches) - set(batches):
        found.append(EVENTS_GONE)
    if above is not None and upstream.units != frozenset(before.inputs):
        found += above.checkpoint.changed_by
    if before.upstream_table_id != upstream.table_id:
        found.append(UPSTREAM)
    return tuple(dict.fromkeys(found))


def changed(before: DataFrame, after: DataFrame, windows: Sequence[str], state: Sequence[str]) -> DataFrame:
    """Return the keys (``_cdc_key``) that have another state, once per window: ``window`` and ``key``.

    ``before`` and ``after``: rows of the ``windows``. ``state``: the columns that make up a row's state, its
    key among them. Rows without a key (truncates, snapshot ends) count as the one key ``""``.
    """
    columns = [F.col("window"), *(F.col(name) for name in state)]
    old, new = (each.where(F.col("window").isin(*windows)).select(*columns) for each in (before, after))
    differing = old.exceptAll(new).unionByName(new.exceptAll(old))
    return differing.select("window", F.coalesce(F.col("_cdc_key"), F.lit("")).alias("key")).distinct()
