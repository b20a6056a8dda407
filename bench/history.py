"""Make a home with a long past in minutes: landed and committed batches without the events themselves.

Manifests are written as files, as capture writes them. The index adds them as any that it missed, but gets
their content instead of parsing them. Windows are committed with their states and without data files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from omnisupport_ingest.cdc.table_ends import AppliedTableEnds
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.encoding import decode_manifest, encode_manifest
from omnisupport_ingest.landing.manifest import ArrivalFacts, DataFile, Manifest, StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.layers.events import raw
from omnisupport_ingest.layers.versions import RulesVersions, of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.settings import Settings

SOURCE = "desk"
START = datetime(2025, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)
_LSNS = 0x100
_WINDOWS_AT_ONCE = 1000

_CONTRACT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Notes",
    "description": "A table of two columns.",
    "type": "object",
    "required": ["id"],
    "additionalProperties": True,
    "properties": {
        "id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."},
        "title": {"type": ["string", "null"], "x-pg-type": "text", "description": "Title."},
    },
    "x-cdc": {
        "version": "1.0.0",
        "source": SOURCE,
        "schema": "public",
        "table": "notes",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": None},
        "lateness": {"allowed": "PT1H", "max": "P7D"},
        "pii": {},
    },
}


class History:
    """The home in ``folder``; windows of an hour hold ``per_window`` batches of one event each.

    ``others``: tables besides that nothing happens in.
    """

    def __init__(self, folder: Path, per_window: int, others: int = 0) -> None:
        self._settings = Settings(
            home=folder / "home",
            window="minutes:60",
            first_window=START,
            contracts_dir=folder / "contracts",
            _env_file=None,
        )
        self._settings.contracts_dir.mkdir(parents=True)
        for name in ("notes", *(f"other_{number:03}" for number in range(others))):
            policy = {**_CONTRACT["x-cdc"], "table": name}
            text = json.dumps({**_CONTRACT, "x-cdc": policy})
            (self._settings.contracts_dir / f"{name}.json").write_text(text)
        self.per_window = per_window
        self.batches = 0
        self._committed = 0
        self.workspace = self.opened()

    def opened(self) -> Workspace:
        """The home as a process finds it that has just started."""
        return Workspace.open(self._settings)

    @property
    def contract(self) -> TableContract:
        return self.workspace.contracts.of_source(SOURCE)[0]

    def window(self, number: int) -> str:
        """The key of window ``number``."""
        return f"{START + number * _HOUR:%Y-%m-%dT%H%M}"

    @property
    def clock(self) -> datetime:
        """The time of the newest batch."""
        return self._moment(self.batches - 1)

    @property
    def index_folder(self) -> Path:
        """Where the landing index is."""
        return self.workspace.landing(SOURCE).folder / "index"

    def grow(self, batches: int) -> None:
        """Let the past be ``batches`` long, all of it committed in every layer."""
        store = self.workspace.landing(SOURCE)
        if not self.batches:
            store.begin_epoch("made", None, now=START)
        folder = store.folder / "manifests"
        template = self._template()
        for number in range(self.batches, batches):
            text = self._text(template, number)
            (folder / f"{self._name(number)}.json").write_text(text)
        for number in (self.batches, batches - 1):
            file = folder / f"{self._name(number)}.json"
            assert decode_manifest(file.read_bytes(), file) == self._manifest(number)
        self.batches = batches
        with mock.patch.object(type(store), "_parse", lambda _, name: self._manifest(self._number(name))):
            again = self.opened().landing(SOURCE)
            assert again.landed().count == batches
            again.close()
        with mock.patch("os.fsync"):
            self._commit((batches - 1) // self.per_window + 1)
        self.workspace = self.opened()

    def seal(self) -> Manifest:
        """Land one batch more as capture does."""
        number, store = self.batches, self.workspace.landing(SOURCE)
        made = self._manifest(number)
        assert made.stream is not None and made.stream.last_commit_lsn is not None
        lsn, at = made.stream.last_commit_lsn.value, made.arrival.landed_at
        event = LandedEvent(
            1, lsn, 0, "c", at, number, lsn, "public", "notes", '["1"]', None, '{"id": "1"}', None, None, None
        )
        with BatchWriter(store, self.workspace.grid, 1, made.batch_id, clock=lambda: at) as writer:
            writer.add(event)
            landed = writer.seal(stream=made.stream)
        self.batches += 1
        return landed

    def _name(self, number: int) -> str:
        return stream_batch_id(1, Lsn(_LSNS * (number + 1)))

    def _number(self, name: str) -> int:
        return int(name[-16:], 16) // _LSNS - 1

    def _moment(self, number: int) -> datetime:
        window, place = divmod(number, self.per_window)
        return START + window * _HOUR + place * _HOUR / self.per_window

    def _manifest(self, number: int) -> Manifest:
        begin, end, at = Lsn(_LSNS * (number + 1)), Lsn(_LSNS * (number + 2)), self._moment(number)
        commit = Lsn(begin.value + 8)
        name, position = self._name(number), Position(1, commit, 0)
        window = self.window(number // self.per_window)
        tables = {"public.notes": 1}
        file = DataFile(
            f"data/{name}/{window}.parquet", window, 1, 4000, "0" * 64, position, position, True, tables
        )
        arrival = ArrivalFacts(at, at, at, at, at, 1)
        stream = StreamSpan(begin, end, commit, commit, number & 0xFFFF, at, at)
        return Manifest(name, SOURCE, 1, arrival, stream=stream, files=(file,), written_by="bench")

    def _template(self) -> str:
        """The text of a manifest with fields to be filled in: encoding each one takes far longer."""
        one = self._manifest(0)
        assert one.stream is not None
        text = encode_manifest(one).decode().replace("{", "{{").replace("}", "}}")
        fields = {
            "batch": one.batch_id,
            "window": one.files[0].window,
            "at": one.arrival.landed_at.isoformat(),
            "commit": str(one.stream.start_lsn),
            "begin": f'"{one.stream.previous_end_lsn}"',
            "end": f'"{one.stream.end_lsn}"',
            "xid": f'"last_xid": {one.stream.last_xid}',
        }
        for name, value in fields.items():
            text = text.replace(value, f"{{{name}}}")
        return text

    def _text(self, template: str, number: int) -> str:
        lsn = _LSNS * (number + 1)
        return template.format(
            batch=self._name(number),
            window=self.window(number // self.per_window),
            at=self._moment(number).isoformat(),
            commit=Lsn(lsn + 8),
            begin=f'"{Lsn(lsn)}"',
            end=f'"{Lsn(lsn + _LSNS)}"',
            xid=f'"last_xid": {number & 0xFFFF}',
        )

    def close_others(self, number: int) -> None:
        """Have the tables that nothing happens in hold window ``number`` as one that is closed."""
        workspace = self.workspace
        above, key = workspace.deduped(SOURCE).open().table_id, self.window(number)
        for contract in workspace.contracts.of_source(SOURCE)[1:]:
            _commit(workspace.net_changes(contract), {key: self._state(key, of_contract(contract), above)})

    def show_others(self) -> None:
        """Have the dimensions of the tables that nothing happens in show what their net changes hold."""
        for contract in self.workspace.contracts.of_source(SOURCE)[1:]:
            self._show(contract)

    def _show(self, contract: TableContract) -> None:
        folded = self.workspace.net_changes(contract).open()
        inputs = (f"version:{folded.version}",)
        shown = self._state(WHOLE_TABLE, of_contract(contract), folded.table_id, inputs)
        made_of = replace(shown.checkpoint, upstream_version=folded.version)
        shown = replace(shown, checkpoint=made_of, carried=AppliedTableEnds().to_text())
        _commit(self.workspace.dimension(contract), {WHOLE_TABLE: shown})

    def take_in(self, windows: Sequence[int], layers: int = 4) -> None:
        """Commit everything that has landed in ``windows`` to the first ``layers`` of raw, deduped events,
        net changes and dimension."""
        workspace, rules_in_force = self.workspace, RulesVersions(self.workspace, SOURCE)
        workspace.quarantine(SOURCE).open()
        deduped, net_changes = workspace.deduped(SOURCE), workspace.net_changes(self.contract)
        of_table = of_contract(self.contract)
        keys = [self.window(each) for each in windows]
        _commit(workspace.raw(SOURCE), {key: self._state(key, raw.VERSIONS, None) for key in keys})
        if layers > 1:
            raw_id = workspace.raw(SOURCE).open().table_id
            _commit(deduped, {key: self._state(key, rules_in_force.of(key), raw_id) for key in keys})
        if layers > 2:
            above = deduped.open().table_id
            _commit(net_changes, {key: self._state(key, of_table, above) for key in keys})
        if layers > 3:
            self._show(self.contract)

    def _commit(self, windows: int) -> None:
        for first in range(self._committed, windows, _WINDOWS_AT_ONCE):
            last = min(first + _WINDOWS_AT_ONCE, windows)
            self.take_in(range(first, last), layers=4 if last == windows else 3)
        self._committed = windows

    def _state(
        self,
        window: str,
        versions: tuple[str, ...],
        above: str | None,
        inputs: tuple[str, ...] = (),
    ) -> WindowState:
        held: tuple[str, ...] = ()
        if window:
            number = int((datetime.strptime(window, "%Y-%m-%dT%H%M").replace(tzinfo=UTC) - START) / _HOUR)
            first = number * self.per_window
            held = tuple(
                self._name(each) for each in range(first, min(first + self.per_window, self.batches))
            )
        closed = bool(window) and window < self.window((self.batches - 1) // self.per_window - 1)
        checkpoint = Checkpoint(
            *("layer", "table", SOURCE, window, "", None, "", window, held[-1] if held else None, len(held)),
            *(None, None, len(held), len(held), len(held), 0, 0, "", 1, None, "made", START, None),
            closed=closed,
        )
        taken = held if above is None else inputs
        return WindowState(
            generation=1, inputs=taken, upstream_table_id=above, checkpoint=checkpoint, batches=held,
            companions=(), versions=versions,
        )  # fmt: skip


def _commit(table: LakeTable, states: dict[str, WindowState]) -> None:
    snapshot = table.open()
    snapshot.commit([WindowChange(window, (), (), state, replaces=True) for window, state in states.items()])
