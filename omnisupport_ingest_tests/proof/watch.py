"""What runs do to the windows of a home: which are closed, folded, or made again for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace

Place = tuple[str, str]
"""A table's path, and a window."""


@dataclass(frozen=True)
class _Above:
    """What a window was last made from, as far as it can change."""

    generation: int
    batches: tuple[str, ...]
    versions: tuple[str, ...]
    companions: tuple[str, ...]

    @classmethod
    def of(cls, state: WindowState) -> _Above:
        return cls(state.generation, state.batches, state.versions, state.companions)


class Watch:
    """Looks at the states of a source's windows after each run.

    ``vain``: windows that a run made again though nothing above them had changed, in words. A
    window whose files were folded above is one of those: folding changes no row.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._states: Mapping[Place, WindowState] = {}
        self._made_from: dict[Place, _Above] = {}
        self.vain: list[str] = []
        self.closed = 0
        self.folded = 0
        self.replayed_closed = 0
        self.replayed_folded = 0

    def closed_windows(self, workspace: Workspace) -> frozenset[str]:
        """Those whose deduped events were closed when last looked at."""
        path = workspace.deduped(self._source).spec.path
        return frozenset(
            window for (table, window), each in self._states.items() if table == path and each.closed
        )

    def folded_windows(self, workspace: Workspace) -> frozenset[str]:
        """Those whose raw or deduped files were folded when last looked at."""
        paths = {workspace.raw(self._source).spec.path, workspace.deduped(self._source).spec.path}
        return frozenset(
            window
            for (table, window), each in self._states.items()
            if table in paths and each.closed and each.compacted_units
        )

    def forget(self) -> None:
        """The lake was deleted."""
        self._states, self._made_from = {}, {}

    def replays(self, workspace: Workspace, windows: Iterable[str]) -> None:
        """Before ``windows`` are replayed."""
        asked = set(windows)
        self.replayed_closed += len(asked & self.closed_windows(workspace))
        self.replayed_folded += len(asked & self.folded_windows(workspace))

    def look(self, workspace: Workspace, *, replayed: bool) -> None:
        """After a run, or several at once. ``replayed``: it was to make windows again."""
        states = self._read(workspace)
        for place, state in states.items():
            before = self._states.get(place)
            if before == state:
                continue
            self.closed += state.closed and not (before is not None and before.closed)
            self.folded += bool(state.compacted_units) and (
                before is None or state.compacted_units != before.compacted_units
            )
            above = self._above(workspace, place, states)
            if before is not None and not replayed and self._in_vain(place, before, state, above):
                self.vain.append(f"{' '.join(place)}: made again as generation {state.generation}")
            if above is not None:
                self._made_from[place] = above
        self._states = states

    def _in_vain(self, place: Place, before: WindowState, state: WindowState, above: _Above | None) -> bool:
        same = before.batches == state.batches and before.versions == state.versions
        return same and above == self._made_from.get(place) and state.generation > before.generation

    def _above(
        self, workspace: Workspace, place: Place, states: Mapping[Place, WindowState]
    ) -> _Above | None:
        raw, deduped = workspace.raw(self._source).spec.path, workspace.deduped(self._source).spec.path
        if place[0] == raw:
            return None
        found = states.get((raw if place[0] == deduped else deduped, place[1]))
        return None if found is None else _Above.of(found)

    def _read(self, workspace: Workspace) -> dict[Place, WindowState]:
        found = {}
        for table in _watched(workspace, self._source):
            if table.exists:
                snapshot = table.open()
                for window in snapshot.windows():
                    state = snapshot.state(window)
                    if state is not None:
                        found[table.spec.path, window] = state
        return found


def _watched(workspace: Workspace, source: str) -> Iterator[LakeTable]:
    yield workspace.raw(source)
    yield workspace.deduped(source)
    for contract in workspace.contracts.of_source(source):
        yield workspace.net_changes(contract)
