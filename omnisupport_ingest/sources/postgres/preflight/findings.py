"""Findings of a preflight, each with its severity and the SQL that repairs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, SlotInUse


class Severity(StrEnum):
    """How serious a finding is; the worst comes first."""

    BLOCKS = "blocks"
    """Capture would fail, or would capture something other than the table."""
    WARNS = "warns"
    """Capture works, but this may stop it later."""
    NOTES = "notes"
    """Worth knowing; nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the source. ``fix``: SQL, or an instruction; empty for most notes.

    ``raises``: the class of the error if only findings with this class block. ``table``: the contract's name,
    if the finding concerns only one table, so that the others can be captured. ``column``: the column that
    the contract names, if the table lacks it or has it with another type.
    """

    check: str
    problem: str
    fix: str
    severity: Severity = Severity.BLOCKS
    raises: type[IngestError] = PreflightFailed
    table: str | None = None
    column: str | None = None


def taken_slot(check: str, error: IngestError) -> Finding:
    """Return the finding for a slot that somebody else uses or has created."""
    return Finding(check, error.problem, error.fix, raises=SlotInUse)


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that block capture."""
    return [each for each in findings if each.severity is Severity.BLOCKS]


def require_ready(findings: Iterable[Finding]) -> None:
    """Raise one error with every blocking finding and every fix, if there are blocking findings.

    Raises ``PreflightFailed``, or the class in ``Finding.raises`` if all blocking findings share it.
    """
    problems = blocking(findings)
    if not problems:
        return
    kinds = {each.raises for each in problems}
    kind = kinds.pop() if len(kinds) == 1 else PreflightFailed
    raise kind(
        "The source is not ready for capture:\n" + "\n".join(f"- {each.problem}" for each in problems),
        fix="\n" + "\n".join(dict.fromkeys(f"  {each.fix}" for each in problems)),
    )
