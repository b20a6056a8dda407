"""The decision table: the action for each scenario of late, repeated, disordered or wrong events.

It is a CSV file that people edit, and the code acts by it. A table with an unknown word is refused at the
start, so that no decision is silently ignored.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.contracts.documents import MAX_DOCUMENT_BYTES, program_file
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, read_file, shortened

LATE, TOO_LATE = "late_arrival", "too_late_arrival"
DUPLICATE_WRITE, DUPLICATE_POSITION = "duplicate_event", "duplicate_position"
COLLISION, OUT_OF_ORDER, OLDER_EPOCH = "collision", "out_of_order_event", "older_epoch"
MALFORMED, ROW_RULE, OUT_OF_RANGE_TIME = "malformed_image", "row_rule", "out_of_range"
BATCH_REJECTED, SCHEMA_MISMATCH = "batch_rejected", "schema_mismatch"
DISCARDED_EVENT = "discarded_event"
CRASH_AFTER_EMIT, STREAM_GAP = "crash_after_emit", "stream_gap"
CONTRACT_CHANGE, REVIEW_DECISION, MANUAL_BACKFILL = "contract_change", "review_decision", "manual_backfill"

QUARANTINE, ACCEPT, STOP, DEDUPE = "quarantine", "accept", "stop", "dedupe"
REPLAY_WINDOW, INGEST, WAIT, REFUSE = "replay_window", "ingest", "wait", "refuse"
REPLAY_AND_DEDUPE, HOLD_BACK = "replay_and_dedupe", "hold_back"

COLUMNS = ("scenario", "detected_by", "default_action", "needs_manual_review", "notes")

_FILE = "reports/week03/late_arrival_decision_table.csv"


class DecisionTableRefused(IngestError):
    """The decision table is missing, cannot be read, or has a row or an action that cannot be carried out.

    Fix: Correct the line that the message names, or set ``OMNISUPPORT_DECISION_TABLE`` to another file.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class DetectedScenario:
    """A scenario that was found, and the name of the detector that found it."""

    scenario: str
    detector: str


@dataclass(frozen=True, slots=True)
class Detector:
    """A mechanism that finds scenarios, by its name in the table.

    The code that detects a scenario calls ``found``; a row of the quarantine, a checkpoint and metadata take
    the name of the detector from its result.
    """

    name: str

    def found(self, scenario: str) -> DetectedScenario:
        """Return the finding of ``scenario`` by this detector. Raises ``ValueError`` if another detector
        finds it."""
        if SCENARIOS[scenario].detector != self.name:
            raise ValueError(f"{scenario} is found by {SCENARIOS[scenario].detector}, not by {self.name}")
        return DetectedScenario(scenario, self.name)


WATERMARK_GAP, MAX_LATENESS = Detector("watermark_gap"), Detector("max_lateness")
IDEMPOTENCY_KEY, DEDUPE_KEY = Detector("idempotency_key"), Detector("dedupe_key")
SEQUENCE_OR_TS, EPOCH, ENVELOPE = Detector("sequence_or_ts"), Detector("epoch"), Detector("envelope")
CONTRACT, WINDOW = Detector("contract"), Detector("window")
RECOVERY_LSN, CHAIN_LSN = Detector("recovery_lsn"), Detector("chain_lsn")
CONTRACT_VERSION, REVIEW_LEDGER = Detector("contract_version"), Detector("review_ledger")
OPERATOR = Detector("operator")


@dataclass(frozen=True, slots=True)
class Scenario:
    """The detector of a scenario (``by``), and the actions that may be chosen for it, the default first."""

    by: Detector
    actions: tuple[str, ...]

    @property
    def detector(self) -> str:
        return self.by.name


SCENARIOS: Mapping[str, Scenario] = {
    LATE: Scenario(WATERMARK_GAP, (REPLAY_WINDOW, INGEST, QUARANTINE)),
    TOO_LATE: Scenario(MAX_LATENESS, (QUARANTINE, REPLAY_WINDOW)),
    DUPLICATE_WRITE: Scenario(IDEMPOTENCY_KEY, (DEDUPE, REPLAY_WINDOW)),
    DUPLICATE_POSITION: Scenario(DEDUPE_KEY, (DEDUPE, QUARANTINE)),
    COLLISION: Scenario(DEDUPE_KEY, (QUARANTINE, STOP)),
    OUT_OF_ORDER: Scenario(SEQUENCE_OR_TS, (QUARANTINE, ACCEPT, STOP)),
    OLDER_EPOCH: Scenario(EPOCH, (QUARANTINE, ACCEPT, STOP)),
    MALFORMED: Scenario(ENVELOPE, (QUARANTINE, STOP)),
    SCHEMA_MISMATCH: Scenario(CONTRACT, (QUARANTINE, STOP)),
    ROW_RULE: Scenario(CONTRACT, (QUARANTINE, STOP)),
    BATCH_REJECTED: Scenario(CONTRACT, (QUARANTINE, STOP)),
    OUT_OF_RANGE_TIME: Scenario(WINDOW, (QUARANTINE, STOP)),
    DISCARDED_EVENT: Scenario(REVIEW_LEDGER, (QUARANTINE,)),
    CRASH_AFTER_EMIT: Scenario(RECOVERY_LSN, (REPLAY_AND_DEDUPE, STOP)),
    STREAM_GAP: Scenario(CHAIN_LSN, (HOLD_BACK, STOP)),
    CONTRACT_CHANGE: Scenario(CONTRACT_VERSION, (REPLAY_WINDOW, WAIT)),
    REVIEW_DECISION: Scenario(REVIEW_LEDGER, (REPLAY_WINDOW, WAIT)),
    MANUAL_BACKFILL: Scenario(OPERATOR, (REPLAY_WINDOW, REFUSE)),
}
"""Every scenario."""

JUDGED = (
    OUT_OF_RANGE_TIME,
    COLLISION,
    OLDER_EPOCH,
    MALFORMED,
    SCHEMA_MISMATCH,
    ROW_RULE,
    BATCH_REJECTED,
    OUT_OF_ORDER,
    TOO_LATE,
    LATE,
    DISCARDED_EVENT,
    DUPLICATE_POSITION,
)
"""Scenarios of single events, by precedence: an event has one verdict."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of the table."""

    scenario: str
    action: str
    needs_manual_review: bool
    notes: str = ""

    @property
    def detected_by(self) -> str:
        return SCENARIOS[self.scenario].detector


@dataclass(frozen=True)
class DecisionTable:
    """One decision for every scenario. ``path`` is the file it was read from."""

    decisions: Mapping[str, Decision]
    path: str = ""

    def action(self, scenario: str) -> str:
        return self.decisions[scenario].action

    def needs_review(self, scenario: str) -> bool:
        return self.decisions[scenario].needs_manual_review

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows on which verdicts of events depend; if it changes, events are judged again."""
        judged = [
            [name, self.decisions[name].action, self.decisions[name].needs_manual_review] for name in JUDGED
        ]
        return hashlib.sha256(json.dumps(judged).encode()).hexdigest()


def default_decision_table() -> Path:
    """Return the table of the working folder if it exists, else the packaged one."""
    here = Path(_FILE)
    return here if here.is_file() else program_file(_FILE)


def load_decision_table(path: Path) -> DecisionTable:
    """Read and check the table. Raises ``DecisionTableRefused``, which names the line, what is wrong and
    the fix."""
    try:
        text = read_file(path, limit=MAX_DOCUMENT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, Unreadable) as problem:
        raise DecisionTableRefused(
            f"The decision table {path} cannot be read: {problem}.",
            fix="Set OMNISUPPORT_DECISION_TABLE to the file, as UTF-8 text.",
        ) from None
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DecisionTableRefused(
                f"{path}, line 1: the columns are {_cut(', '.join(reader.fieldnames or ()) or 'missing')}.",
                fix=f"Let the first line be: {','.join(COLUMNS)}",
            )
        found: dict[str, Decision] = {}
        for row in reader:
            decision = _decision(path, reader.line_num, row)
            if decision.scenario in found:
                raise _refused(
                    path, reader.line_num, f"{decision.scenario} has a row already", "Keep one of the two."
                )
            found[decision.scenario] = decision
    except csv.Error as problem:
        # DictReader has not counted the line that could not be read.
        line = reader.reader.line_num
        raise _refused(path, line, str(problem), "Write it as CSV, quoted as needed.") from None
    missing = [name for name in SCENARIOS if name not in found]
    if missing:
        name = missing[0]
        known = SCENARIOS[name]
        raise DecisionTableRefused(
            f"{path} has no row for {_listed(missing)}.",
            fix=f"Add a row such as: {name},{known.detector},{known.actions[0]},false,",
        )
    return DecisionTable(found, str(path))


def _decision(path: Path, line: int, row: Mapping[str | None, str | None]) -> Decision:
    cells = [(row.get(name) or "").strip() for name in COLUMNS]
    scenario, detector, action, review, notes = cells
    if None in row:
        raise _refused(path, line, "it has more cells than columns", "Quote notes that hold a comma.")
    if scenario not in SCENARIOS:
        raise _refused(
            path, line, f"scenario {shortened(scenario)} is not known", f"Use {_listed(SCENARIOS)}."
        )
    known = SCENARIOS[scenario]
    if detector != known.detector:
        raise _refused(
            path,
            line,
            f"detected_by {shortened(detector)} is not what finds {scenario}",
            f"Write {known.detector}: how a scenario is found is not a choice.",
        )
    if action not in known.actions:
        raise _refused(
            path,
            line,
            f"default_action {shortened(action)} cannot be done for {scenario}",
            f"Use {_listed(known.actions)}.",
        )
    if review.lower() not in ("true", "false"):
        raise _refused(path, line, f"needs_manual_review is {shortened(review)}", "Use true or false.")
    return Decision(scenario, action, review.lower() == "true", notes)


def _refused(path: Path, line: int, problem: str, fix: str) -> DecisionTableRefused:
    return DecisionTableRefused(f"{path}, line {line}: {problem}.", fix=fix)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
