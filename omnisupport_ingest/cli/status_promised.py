"""The part of ``status`` about promises of tables: service levels, and since when they equal their source.

The words are those of the checks ``fresh`` and ``equal_to_source``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.json_values import to_plain

if TYPE_CHECKING:
    from omnisupport_ingest.read.overview import TableOverview


def promised_document(table: TableOverview) -> dict[str, Any]:
    """Return service level and last comparison of a dimension; None where there is none."""
    from omnisupport_ingest.read.freshness import verified_in_words

    level = table.level
    return {
        "service_level": None
        if level is None
        else {
            "by_contract": level.by_contract,
            "kept": level.kept,
            "allowed_lag_seconds": level.within,
            "lag_seconds": level.lag,
            "verified_within_seconds": level.verified_within,
            "verified_seconds_ago": level.verified_ago,
            "broken": list(level.broken),
        },
        "verified": None
        if table.verified is None
        else {
            "state": table.verified.state,
            "differs": table.verified.differs,
            "checked_at": to_plain(table.verified.checked_at),
            "through": to_plain(table.verified.through),
            "in_words": verified_in_words(table.verified, datetime.now(UTC)),
        },
    }


def promised_facts(source: str, tables: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield lines for people: service levels that contracts set, and the results of comparisons."""
    promised = [each for each in tables if (level := each.get("service_level")) and level["by_contract"]]
    broken = [each for each in promised if each["service_level"]["broken"]]
    if promised:
        kept = render.counted(len(promised) - len(broken), "service level")
        yield "promised", f"{kept} kept, {len(broken)} broken"
    for each in broken:
        yield "broken", f"{table_name(source, each)}: {'; '.join(each['service_level']['broken'])}"
    checked = [each for each in tables if each.get("verified")]
    through = [each for each in checked if each["verified"]["through"]]
    if through:
        oldest = min(through, key=lambda each: str(each["verified"]["through"]["at"]))
        others = f", {len(through)} tables; the oldest" if len(through) > 1 else ""
        in_words = oldest["verified"]["in_words"]
        yield "verified", f"{table_name(source, oldest)}{others}: {in_words}"
    for each in checked:
        if each["verified"]["differs"]:
            yield (
                "differs",
                f"{table_name(source, each)}: {each['verified']['in_words']} (verify {source} --repair)",
            )


def promises_broken(document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield a warning for each broken service level and each table that differs: its kind, its text, and the
    command that helps."""
    for source in document["sources"]:
        for table in source.get("tables", ()):
            name, of = table_name(source["source"], table), source["source"]
            level, verified = table.get("service_level"), table.get("verified")
            if level and level["by_contract"] and level["broken"]:
                yield f"level {of}.{name}", f"the service level of {name} is broken", f"status --source {of}"
            if verified and verified["differs"]:
                yield f"differs {of}.{name}", f"{name} differs from its source", f"verify {of} --repair"


def table_name(source: str, table: dict[str, Any]) -> str:
    return str(table["table"]).removeprefix(f"{source}/")
