"""A million changes a second, ten terabytes of dimensions, a year: worked out from measured unit costs.

``scale.toml`` holds the assumptions, ``scale_model`` the queues. ``--write`` puts them into docs/scale.md; a
test holds that page against what this prints. Nothing here measures anything.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from bench.scale_model import Deployment, Simulated, UnitCosts, simulate

ASSUMPTIONS = Path(__file__).parent / "scale.toml"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"

_BEGINS, _ENDS = "<!-- python -m bench.scale --write -->", "<!-- end -->"
_SECONDS_OF_A_YEAR = 365 * 86_400
_MILLION = 1e6


@dataclass(frozen=True)
class Assumptions:
    """What ``scale.toml`` says. ``sources``: of each unit cost, where it comes from, and what it is."""

    costs: UnitCosts
    sources: dict[str, tuple[str, str]]
    deployments: tuple[Deployment, ...]


def read_assumptions(path: Path) -> Assumptions:
    """Read a file like ``scale.toml``; ``click.ClickException`` names what is wrong, and where."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise click.ClickException(f"{path} cannot be read: {problem}. Correct it.") from None
    given = _table(path, "unit_costs", document.get("unit_costs"), UnitCosts)
    values = {
        name: _number(path, f"unit_costs.{name}.value", each.get("value")) for name, each in given.items()
    }
    sources = {name: (str(each.get("from")), str(each.get("what"))) for name, each in given.items()}
    deployments = []
    for number, each in enumerate(document.get("deployment", ()), start=1):
        at = f"deployment {number}"
        table = _table(path, at, each, Deployment)
        numbers = {
            name: _number(path, f"{at}.{name}", value) for name, value in table.items() if name != "name"
        }
        for name in ("slots", "servers", "cores", "changes_per_second", "rows_per_file", "row_bytes"):
            if numbers[name] <= 0:
                raise click.ClickException(f"{path}: {at}.{name} is {numbers[name]:g}. Write more than 0.")
        deployments.append(Deployment(name=str(table["name"]), **numbers))
    return Assumptions(UnitCosts(**values), sources, tuple(deployments))


def _table(path: Path, at: str, found: Any, form: type) -> dict[str, Any]:
    known = {each.name for each in fields(form)}
    if not isinstance(found, dict) or found.keys() != known:
        wrong = sorted(known ^ (found.keys() if isinstance(found, dict) else set()))
        raise click.ClickException(
            f"{path}: {at} has not just the members it needs: {', '.join(wrong)} is missing or too much. "
            f"It has: {', '.join(sorted(known))}."
        )
    return found


def _number(path: Path, at: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise click.ClickException(f"{path}: {at} is {value!r}. Write a number, 0 or more.")
    return value


def tables(assumptions: Assumptions, *, seconds: int = 14_400) -> str:
    """The tables of the page, as Markdown."""
    simulated = [
        (each, simulate(each, assumptions.costs, seconds=seconds)) for each in assumptions.deployments
    ]
    queues = [
        "| deployment | before capture, at most | waiting, mean | lag at the median | 95 % within | queues |",
        _rule(6),
    ]
    queues += [_queue(*each) for each in simulated]
    cores = [
        "| deployment | server, decoding | capture | layers and runs | dimensions | compaction | has |",
        _rule(7),
    ]
    cores += [_cores(*each, assumptions.costs) for each in simulated]
    year = [
        "| deployment | changes | landing | raw | net changes | history | batches | puts | compaction |",
        _rule(9),
    ]
    year += [_year(each, assumptions.costs) for each, _ in simulated]
    unit = ["| unit cost | value | from | what |", _rule(4)]
    unit += [
        f"| `{name}` | {getattr(assumptions.costs, name):,g} | {source} | {what} |"
        for name, (source, what) in assumptions.sources.items()
    ]
    parts = (
        ("Queues and lag, of each slot:", queues),
        ("Cores in use, at the mean, of all slots together:", cores),
        ("A year of it:", year),
        ("What it is worked out from:", unit),
    )
    return "\n\n".join(f"{title}\n\n" + "\n".join(lines) for title, lines in parts)


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _queue(deployment: Deployment, found: Simulated) -> str:
    lag = f"{_time(found.lag_p50)} | {_time(found.lag_p95)} | stand"
    if found.growth:
        lag = f"without end | without end | grow by {_count(found.growth)} changes a second"
    waiting = "more and more" if found.growth else _count(found.waiting)
    return f"| {deployment.name} | {_count(found.capture_waiting)} | {waiting} | {lag} |"


def _cores(deployment: Deployment, found: Simulated, costs: UnitCosts) -> str:
    of_all = {part: spent * deployment.slots for part, spent in found.cpu.items()}
    server, beside = (
        deployment.changes_per_second / deployment.servers,
        deployment.slots / deployment.servers - 1,
    )
    decoding = (
        server * (costs.server_cpu_per_million + beside * costs.server_cpu_per_million_of_others) / _MILLION
    )
    return (
        f"| {deployment.name} | {decoding:.2f} | {of_all['capture']:.1f} | "
        f"{of_all['layers'] + of_all['runs'] + of_all['planning']:.1f} | {of_all['dimensions']:.1f} | "
        f"{of_all['compaction']:.1f} | {deployment.slots} slots of {deployment.cores:g} |"
    )


def _year(deployment: Deployment, costs: UnitCosts) -> str:
    changes = deployment.changes_per_second * _SECONDS_OF_A_YEAR
    daily = deployment.changes_per_second * 86_400 / _MILLION
    batches = deployment.slots * _SECONDS_OF_A_YEAR
    compacting = changes / _MILLION * costs.compaction_cpu_per_million / 3600
    return (
        f"| {deployment.name} | {_count(changes)} | "
        f"{_bytes(daily * deployment.landing_days * costs.landing_mb_per_million * _MILLION)} | "
        f"{_bytes(daily * deployment.raw_days * costs.raw_mb_per_million * _MILLION)} | "
        f"{_bytes(changes * costs.net_changes_mb_per_million)} | "
        f"{_bytes(changes * costs.history_bytes_per_version)} | {_count(batches)} | "
        f"{_count(batches * costs.requests_per_batch)} | {_count(compacting)} core hours |"
    )


def _count(value: float) -> str:
    for size, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{round(value):,}"


def _bytes(value: float) -> str:
    for size, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value / 1e6:.3g} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def with_tables(page: str, text: str) -> str:
    """``page`` with ``text`` between its marks; ``click.ClickException`` if they are not there once."""
    pattern = re.compile(f"{re.escape(_BEGINS)}.*?{re.escape(_ENDS)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise click.ClickException(f"The page must have {_BEGINS} and {_ENDS} once. Put them back.")
    return pattern.sub(lambda _: f"{_BEGINS}\n\n{text}\n\n{_ENDS}", page)


@click.command()
@click.option(
    "--assumptions", type=click.Path(path_type=Path), default=ASSUMPTIONS, help="Another file of them."
)
@click.option("--seconds", default=14_400, show_default=True, help="Seconds that are simulated.")
@click.option("--write", is_flag=True, help="Put the tables into docs/scale.md.")
def main(assumptions: Path, seconds: int, write: bool) -> None:
    """Simulate the deployments of the assumptions, and print what they come to."""
    text = tables(read_assumptions(assumptions), seconds=seconds)
    if write:
        # No failpoint: a page of the documentation.
        PAGE.write_text(with_tables(PAGE.read_text(), text))
    else:
        click.echo(text)


if __name__ == "__main__":
    main()
