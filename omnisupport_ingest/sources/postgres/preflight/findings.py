"""Findings of a preflight, each with its severity and the SQL that repairs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, SlotInUse


class Severity(StrEnum):
    """How much a finding matters, the worst first."""

    BLOCKS = "blocks"
    """Capture would fail, or would capture something else than the table."""
    WARNS = "warns"
    """Capture works, and may be stopped by it later."""
    NOTES = "notes"
    """Worth knowing; nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the source. ``fix`` is SQL, or what to do besides SQL; empty for most notes.

    ``raises``: the error that is raised if only findings of this kind block. ``table``: the contract's name,
    if the finding is about one table alone, so that the others can be captured. ``column``: the column that
    the contract names and the table does not have, or has with another type.
    """

    check: str
    problem: str
    fix: str
    severity: Severity = Severity.BLOCKS
    raises: type[IngestError] = PreflightFailed
    table: str | None = None
    column: str | None = None


def taken_slot(check: str, error: IngestError) -> Finding:
    """Return the finding for a slot that somebody else has."""
    return Finding(check, error.problem, error.fix, raises=SlotInUse)


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that block capture."""
    return [each for each in findings if each.severity is Severity.BLOCKS]


def require_ready(findings: Iterable[Finding]) -> None:
    """Raise one error with every blocking finding and every fix, if there are any.

    ``PreflightFailed``, or ``SlotInUse`` if nothing but the slot blocks.
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
