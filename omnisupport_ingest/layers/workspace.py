"""Where the layers work: the landing of each source, and the tables of the lake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from omnisupport_ingest.cdc.envelope import QUARANTINE_BY, QUARANTINE_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.history import history_type
from omnisupport_ingest.cdc.stored import stored_type
from omnisupport_ingest.contracts.databases import FilesSeen, database_of, files_seen
from omnisupport_ingest.contracts.decision_table import (
    DecisionTable,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.in_force import contracts_in_force, decisions_in_force, in_force
from omnisupport_ingest.contracts.kept import Documents, Stamp, documents_stamp, keep, usable
from omnisupport_ingest.contracts.load import Contracts, TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.contracts.pii_keys import HashKeys, keys_in_force
from omnisupport_ingest.contracts.pii_policies import HASH, TOKENIZE
from omnisupport_ingest.contracts.protection import Secrets, has_policy
from omnisupport_ingest.contracts.sources import SourceDefinition, sources_folder, sources_in_force
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.contracts.token_map import FILE as TOKENS
from omnisupport_ingest.contracts.token_map import TokenMap
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.key_files import KeyOrder
from omnisupport_ingest.lake.ledger import Ledger
from omnisupport_ingest.lake.looks import Looks
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.ledgers import ERASURE_TYPE, POLICY_TYPE, REVIEW_TYPE, retention_ledger
from omnisupport_ingest.layers.survey_cache import SurveyCache
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.windows import WindowGrid

_loading = threading.Lock()
"""Held while changed documents are read: sensors of many threads find a change at the same time."""


@dataclass(frozen=True)
class Workspace:
    """One home with the contracts and decisions that apply to it.

    Hands out its landing stores and lake tables.
    """

    settings: Settings
    home: Home
    contracts: Contracts
    decisions: DecisionTable = field(default_factory=lambda: load_decision_table(default_decision_table()))
    documents: Documents | None = field(default=None, repr=False, compare=False)
    """The documents from which contracts and decisions were read; None if these were given."""
    looks: Looks | None = field(default=None, repr=False, compare=False)
    """The versions of tables that the present work has found, reused until it ends (``looking_once``); None:
    the newest version is looked up at each use."""
    _during: dict[str, Workspace] = field(default_factory=dict, init=False, repr=False, compare=False)
    _later: dict[Stamp, Workspace] = field(default_factory=dict, init=False, repr=False, compare=False)
    _seen: dict[str, SurveyCache[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _inputs: dict[str, tuple[FilesSeen, tuple[str, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _landings: dict[str, LandingStore] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tables: dict[str, tuple[TableContract, LakeTable]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _looked: dict[str, LakeTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The tables of ``_tables`` with the looks of this workspace."""

    @classmethod
    def open(cls, settings: Settings) -> Workspace:
        """Open the home, its contracts and its decision table. Raises ``IngestError`` if one is wrong."""
        return cls.of(Documents.named(settings))

    @classmethod
    def of(cls, documents: Documents) -> Workspace:
        """Open the home with ``documents``. Raises ``IngestError`` if one is wrong."""
        settings = documents.settings
        contracts, decisions = contracts_in_force(settings), decisions_in_force(settings)
        home = Home.open(
            settings.home, settings.window_size, first=settings.first_window, storage=settings.storage
        )
        if not storage_of(home.landing).is_local:
            # Which keys are in force is known once the landed records have been brought here.
            contracts = contracts_in_force(settings)
        return cls(settings, home, contracts, decisions, documents)

    def current(self) -> Workspace:
        """Return this home with its documents as they are now (``kept.usable``), and with the columns that
        contracts have learned; itself if nothing has changed.

        For long-running processes: a run that begins now uses the same documents. Until they change again,
        the same object is returned.
        """
        if self.documents is None:
            return self
        files = self.documents.files or self.settings
        now = documents_stamp(files)
        if now == self.documents.stamp:
            return self
        with _loading:
            found = self._later.get(now)
            if found is None:
                documents = usable(files)
                keep(documents)
                found = Workspace.of(documents)
                self._later.clear()
                self._later[now] = found
            return found

    def merging_at_once(self) -> Workspace:
        """Return this home with every contract's delay of merges ignored."""
        contracts = Contracts(tuple(each.merged_at_once for each in self.contracts))
        return replace(self, contracts=contracts)

    def looking_once(self, during: str) -> Workspace:
        """Return this home with each table looked at once, within the stretch of work called ``during``.

        Calls with the same name return the same object, so the steps of a run share what they have seen. A
        call with another name ends that.
        """
        opened = self._during.get(during)
        if opened is None:
            opened = copy(self)
            object.__setattr__(opened, "looks", Looks())
            object.__setattr__(opened, "_looked", {})
            self._during.clear()
            self._during[during] = opened
        return opened

    def definition(self, source: str) -> SourceDefinition:
        """Return the definition of ``source``, read from its file. Raises ``ContractError`` if one is wrong,
        ``SourceUnknown``."""
        return sources_in_force(self.settings, self.contracts).find(source)

    @property
    def grid(self) -> WindowGrid:
        return self.home.grid

    def landing(self, source: str) -> LandingStore:
        """Return the landing of ``source``; always the same store, so that a manifest is parsed once."""
        if source not in self._landings:
            self._landings[source] = LandingStore(self.home.landing, source)
        return self._landings[source]

    def inputs(self, source: str) -> tuple[str, ...]:
        """Return the sources that share the database of ``source``, itself included.

        A source that is added counts at once, even in running processes, so that all close the same windows.
        """
        folder = sources_folder(self.settings)
        seen, known = files_seen(folder, in_force(self.settings).contracts), self._inputs.get(source)
        if known is None or known[0] != seen:
            again = partial(contracts_in_force, self.settings)
            try:
                database = database_of(folder, self.contracts, source, contracts_again=again)
            except IngestError:
                # The added source is wrong or half written, so it is no input yet.
                if known is None:
                    raise
                return known[1]
            known = self._inputs[source] = seen, database.names if database is not None else (source,)
        return known[1]

    def closing_watermark(self, source: str) -> datetime | None:
        """Return the watermark that closes windows of ``source``: the lowest of its ``inputs``; None if one
        has none.

        Read it before looking at what has landed: what lands meanwhile is above it.
        """
        marks = self.input_watermarks(source).values()
        known = [each for each in marks if each is not None]
        return min(known) if len(known) == len(marks) else None

    def input_watermarks(self, source: str) -> dict[str, datetime | None]:
        """Return the watermark of each of the ``inputs`` of ``source``, by name.

        It is None for another input whose landing cannot be read. That keeps windows open, but holds no
        events back. Work on that input itself reports what is wrong with it.
        """
        return {each: self._watermark(each, own=each == source) for each in self.inputs(source)}

    def _watermark(self, source: str, *, own: bool) -> datetime | None:
        try:
            return self.landing(source).landed().watermark
        except (IngestError, OSError):
            if own:
                raise
            return None

    def seen(self, source: str) -> SurveyCache[Any]:
        """Return the findings of the last look for pending windows of ``source``; always the same object."""
        if source not in self._seen:
            self._seen[source] = SurveyCache(self.home.lake / source / "noted" / "windows.sqlite")
        return self._seen[source]

    @property
    def tokens(self) -> TokenMap:
        """The map of tokens. It lies outside of landing and lake."""
        return TokenMap(self.home.path / TOKENS)

    def secrets(self, contracts: Iterable[TableContract]) -> Secrets:
        """Return what the policies of ``contracts`` need: keys if one hashes; the map, created if missing, if
        one has tokens. Raises ``PiiKeyMissing``, naming the missing secret."""
        every = list(contracts)
        tokens = self.tokens if has_policy(every, TOKENIZE) else None
        if tokens is not None:
            tokens.make()
        keys = keys_in_force(self.settings.pii_keys) if has_policy(every, HASH) else HashKeys()
        return Secrets(keys, tokens, self.subjects if self.subjects.made else None)

    @property
    def subjects(self) -> SubjectKeys:
        """The keys of subjects. They lie outside of landing and lake."""
        return SubjectKeys(self.home.path / SUBJECT_KEYS)

    def raw(self, source: str) -> LakeTable:
        return self._table(
            TableSpec(
                path=f"{source}/raw_cdc_staging",
                schema=RAW_TYPE,
                partition_by=("window",),
                description=f"Every event that landed from {source}, duplicates included, payload untouched.",
            )
        )

    def deduped(self, source: str) -> LakeTable:
        return self._table(
            TableSpec(
                path=f"{source}/deduped_events",
                schema=RAW_TYPE,
                partition_by=("window", "source_table"),
                description=f"The distinct accepted events of {source}.",
            )
        )

    def quarantine(self, source: str) -> LakeTable:
        return self._table(
            TableSpec(
                path=f"{source}/quarantine",
                schema=QUARANTINE_TYPE,
                partition_by=QUARANTINE_BY,
                description=f"Events of {source} that were not accepted, each with its reason.",
            )
        )

    def net_changes(self, contract: TableContract) -> LakeTable:
        return self._of_contract(
            contract,
            f"{contract.source}/net_changes/{contract.name}",
            lambda path: TableSpec(
                path=path,
                schema=folded_type(contract),
                partition_by=("window",),
                description=f"Net change of {contract.full_name} per window: one folded row per key touched.",
                personal=contract.personal,
            ),
        )

    def dimension(self, contract: TableContract) -> LakeTable:
        return self._of_contract(
            contract,
            f"{contract.source}/dim_{contract.name}",
            lambda path: TableSpec(
                path=path,
                schema=stored_type(contract),
                partition_by=(),
                description=f"Current state of {contract.full_name}, soft-deleted rows included.",
                deletion_vectors=contract.deletion_vectors,
                personal=contract.personal,
                ordered_by=order_of(contract).column,
            ),
        )

    def history(self, contract: TableContract) -> LakeTable:
        # In a folder of its own: a table may be called ``tickets_history`` at the source.
        return self._of_contract(
            contract,
            f"{contract.source}/history/dim_{contract.name}_history",
            lambda path: TableSpec(
                path=path,
                schema=history_type(contract),
                partition_by=(),
                description=f"Every version of every row of {contract.full_name} (SCD type 2).",
                personal=contract.personal,
                ordered_by=order_of(contract).column,
            ),
        )

    def reviews(self, source: str) -> Ledger:
        """What people decided on quarantined events of ``source``. Not one of ``tables``: no run of a window
        makes it, so no replay can restore it."""
        return Ledger(
            self.home.lake,
            TableSpec(
                path=f"{source}/review_ledger",
                schema=REVIEW_TYPE,
                partition_by=(),
                description=f"Who released or discarded which quarantined event of {source}, when and why.",
            ),
            self.looks,
        )

    def erasures(self, source: str) -> Ledger:
        """The rows of ``source`` that people had erased. Not one of ``tables``, like ``reviews``."""
        return Ledger(
            self.home.lake,
            TableSpec(
                path=f"{source}/erasure_ledger",
                schema=ERASURE_TYPE,
                partition_by=(),
                description=f"Who had the values of which row of {source} erased, when, why and how far.",
            ),
            self.looks,
        )

    def removals(self, source: str) -> Ledger:
        """What retention removed from ``source``. Not one of ``tables``, like ``reviews``."""
        return replace(retention_ledger(self.home.lake, source), looks=self.looks)

    def policies(self, source: str) -> Ledger:
        """The policies of contracts that judged sealed windows of ``source``. Not one of ``tables``, like
        ``reviews``."""
        return Ledger(
            self.home.lake,
            TableSpec(
                path=f"{source}/policy_ledger",
                schema=POLICY_TYPE,
                partition_by=(),
                description=f"The policies for personal data that sealed windows of {source} had.",
            ),
            self.looks,
        )

    def tables(self) -> Iterator[LakeTable]:
        """Yield every table of the lake, existing or not, by source and in the order of the data flow."""
        for source in self.contracts.sources():
            yield self.raw(source)
            yield self.deduped(source)
            yield self.quarantine(source)
            for contract in self.contracts.of_source(source):
                yield from self.tables_of(contract)

    def windowed_tables(self, source: str) -> Iterator[LakeTable]:
        """The tables of ``source`` whose content belongs to windows; not quarantine."""
        yield self.raw(source)
        yield self.deduped(source)
        for contract in self.contracts.of_source(source):
            yield self.net_changes(contract)

    def tables_of(self, contract: TableContract) -> tuple[LakeTable, ...]:
        """The tables that hold rows of ``contract`` alone, with its columns, in the order the data takes."""
        return self.net_changes(contract), self.dimension(contract), self.history(contract)

    def _of_contract(self, contract: TableContract, path: str, spec: Callable[[str], TableSpec]) -> LakeTable:
        """Return the table at ``path``; the same object while it is requested for the same contract."""
        known = self._tables.get(path)
        if known is None or known[0] is not contract:
            known = self._tables[path] = contract, LakeTable(self.home.lake, spec(path))
        if self.looks is None:
            return known[1]
        # Workspaces of one home share the open tables, each with its own looks.
        looked = self._looked.get(path)
        if looked is None or looked.spec is not known[1].spec:
            looked = self._looked[path] = replace(known[1], looks=self.looks)
        return looked

    def _table(self, spec: TableSpec) -> LakeTable:
        return LakeTable(self.home.lake, spec, self.looks)


_WHOLE_NUMBERS = frozenset({Kind.SHORT, Kind.INTEGER, Kind.LONG})


def order_of(contract: TableContract) -> KeyOrder:
    """Return the order of a table's files: by key if the key is one whole number, else by the key's text."""
    columns = {column.name: column for column in contract.columns}
    if len(contract.key) == 1 and columns[contract.key[0]].type.kind in _WHOLE_NUMBERS:
        return KeyOrder(contract.key[0], whole_numbers=True, personal=contract.personal)
    return KeyOrder("_cdc_key", whole_numbers=False, personal=contract.personal)
