"""The report as one HTML page: numbers and charts of every source, readable without a server or a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from omnisupport_ingest.durable import replace
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.report import figures
from omnisupport_ingest.report.facts import MOST_BATCHES, Promise, SourceFacts, source_facts
from omnisupport_ingest.report.svg import Axis, Marks, Series, chart

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6778; --rule: #d9dee7; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf2; --soft: #9aa5b8; --rule: #333b4a; --paper: #14181f; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0; }
.grid + h3, table + h3 { margin-top: 2rem; }
p, figcaption { color: var(--soft); margin: .2rem 0 .8rem; max-width: 60rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; } .chart { width: 100%; height: auto; }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1rem 0 1.5rem; }
.facts div { min-width: 7rem; }
.facts b { display: block; font-size: 1.25rem; } .facts span { color: var(--soft); }
.problem { border-left: 4px solid #c0392b; padding-left: .8rem; color: var(--ink); }
table { border-collapse: collapse; } td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.tick { font-size: 11px; fill: var(--soft); } .name { font-size: 11px; fill: var(--ink); }
.grid-line, .chart .grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 1.6; }
.c0 { fill: #2f6fdb; } .c1 { fill: #d9822b; } .c2 { fill: #b8305f; }
.c3 { fill: #2c9a6b; } .c4 { fill: #7a58c9; } .c5 { fill: #8a94a6; }
.line.c0 { stroke: #2f6fdb; } .line.c1 { stroke: #d9822b; } .line.c2 { stroke: #b8305f; }
.line.c3 { stroke: #2c9a6b; } .line.c4 { stroke: #7a58c9; } .line.c5 { stroke: #8a94a6; }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5 { fill: none; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>omnisupport-ingest: {{ home }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>Ingest report</h1>
<p>Home {{ home }}, made {{ made }}. All times are UTC. Made from the manifests of landed batches, the
tables' Delta logs and the notes of comparisons alone; no value of a row is in it.</p>
{% if not sources %}<p>Nothing has landed yet.</p>{% endif %}
{% for source in sources %}
<h2>{{ source.name }}</h2>
{% if source.problem %}<p class="problem">{{ source.problem }}</p>{% endif %}
<div class="facts">
{% for label, value in source.facts %}<div><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}</div>
{% if source.left_out %}<p>Of the newest {{ source.shown }} batches; {{ source.left_out }} landed earlier.</p>
{% endif %}
<div class="grid">
{% for figure in source.figures %}<figure>
<h3>{{ figure.title }}</h3>
<figcaption>{{ figure.caption }}</figcaption>
{% if figure.svg %}{{ figure.svg }}{% else %}<p>{{ figure.empty }}</p>{% endif %}
</figure>
{% endfor %}</div>
<h3>Service levels</h3>
<p>Of what people read, when this page was made. A replay of old windows makes no table fresher.</p>
<table><tr><th>table</th><th>service level</th><th class="n">behind</th><th class="n">allowed</th>
<th>and its source</th></tr>
{% for name, kept, lag, allowed, verified in source.promises %}<tr><td>{{ name }}</td><td>{{ kept }}</td>
<td class="n">{{ lag }}</td><td class="n">{{ allowed }}</td><td>{{ verified }}</td></tr>
{% endfor %}</table>
<h3>Tables</h3>
<table><tr><th>table</th><th class="n">rows</th><th class="n">size</th><th class="n">commits</th></tr>
{% for name, rows, size, commits in source.tables %}<tr><td>{{ name }}</td><td class="n">{{ rows }}</td>
<td class="n">{{ size }}</td><td class="n">{{ commits }}</td></tr>
{% endfor %}</table>
{% endfor %}
</body>
</html>
"""


FILE_NAME = "report.html"
"""Name of the page's file in a home."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart with its words. ``empty``: what it means if the chart has no data."""

    title: str
    caption: str
    svg: Markup
    empty: str


def collect(workspace: Workspace, *, most: int = MOST_BATCHES) -> list[SourceFacts]:
    """Return the facts of every source of which anything has landed. ``most``: batches to read of each."""
    facts = (source_facts(workspace, source, most=most) for source in workspace.contracts.sources())
    return [each for each in facts if each is not None]


def document(home: str, sources: Sequence[SourceFacts]) -> dict[str, Any]:
    """Return the numbers of the page as JSON values; seconds with three decimals."""
    return {"home": home, "sources": [_source_document(each) for each in sources]}


def html(home: str, sources: Sequence[SourceFacts], *, made: datetime | None = None) -> str:
    """Return the page as HTML. ``home``: the name of the home in its title."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    moment = made or datetime.now(UTC)
    return environment.from_string(_PAGE).render(
        home=home,
        made=f"{moment:%Y-%m-%d %H:%M:%S} UTC",
        # This is our own text; no word of it comes from outside.
        style=Markup(_STYLE),  # noqa: S704
        sources=[_source(each) for each in sources],
    )


def write(workspace: Workspace, path: Path, sources: Sequence[SourceFacts]) -> int:
    """Write the page to ``path`` in one step, readable by its owner only. Return its size in bytes."""
    content = html(str(workspace.home.path), sources).encode()
    # No failpoint: a page for people; the same command makes it again.
    replace(path, content)
    return len(content)


def _source_document(facts: SourceFacts) -> dict[str, Any]:
    latencies = {
        "commit_to_landing": figures.to_landing(facts),
        "commit_to_dimension": figures.to_dimension(facts),
    }
    runs = figures.runs(facts)
    return {
        "source": facts.source,
        "problem": facts.problem,
        "batches": len(facts.batches),
        "batches_left_out": facts.left_out,
        "events": sum(each.events for each in facts.batches),
        **{
            f"{name}_seconds": {
                f"p{rank}": None if (value := figures.percentile(of_kind, rank)) is None else round(value, 3)
                for rank in figures.PERCENTILES
            }
            for name, of_kind in latencies.items()
        },
        "duplicates": sum(each.duplicates for each in facts.windows),
        "late": sum(each.late for each in facts.windows),
        "withheld": facts.out_of_range + sum(each.withheld for each in facts.windows),
        "out_of_range": facts.out_of_range,
        "tables": [
            {"table": each.name, "rows": each.rows, "bytes": each.commits[-1].size if each.commits else 0}
            for each in facts.tables
        ],
        "service_levels": [
            {
                "table": each.table,
                "by_contract": each.level.by_contract,
                "kept": each.level.kept,
                "lag_seconds": each.level.lag,
                "allowed_lag_seconds": each.level.within,
                "verified": each.verified,
            }
            for each in facts.promises
        ],
        "runs": len(runs),
        "bytes_written": sum(each.written for each in runs),
    }


def _source(facts: SourceFacts) -> dict[str, Any]:
    return {
        "name": facts.source,
        "problem": facts.problem,
        "facts": list(_facts(_source_document(facts))),
        "left_out": f"{facts.left_out:,}" if facts.left_out else "",
        "shown": f"{len(facts.batches):,}",
        "figures": list(_figures(facts)),
        "promises": [_promised(each) for each in facts.promises],
        "tables": [
            (
                each.name,
                f"{each.rows:,}",
                _bytes(float(each.commits[-1].size if each.commits else 0)),
                f"{len(each.commits):,}",
            )
            for each in facts.tables
        ],
    }


def _promised(promise: Promise) -> tuple[str, str, str, str, str]:
    level = promise.level
    kept = "nothing to tell yet" if level.kept is None else "kept" if level.kept else "BROKEN"
    whose = "" if level.by_contract else " (default)"
    return (
        promise.table,
        f"{kept}{whose}",
        "" if level.lag is None else _seconds(level.lag),
        _seconds(level.within),
        promise.verified or "never compared by checksums",
    )


def _facts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "batches", f"{document['batches']:,}"
    yield "events landed", f"{document['events']:,}"
    for name, label in (
        ("commit_to_landing", "commit to landing"),
        ("commit_to_dimension", "commit to dimension"),
    ):
        seconds = document[f"{name}_seconds"]
        if seconds["p50"] is not None:
            yield f"{label}, p50 / p95 / p99", " / ".join(_seconds(each) for each in seconds.values())
    for name in ("duplicates", "late", "withheld"):
        yield f"{name} events" if name != "duplicates" else name, f"{document[name]:,}"
    if document["out_of_range"]:
        yield "of them in no window, by their time", f"{document['out_of_range']:,}"
    yield "runs", f"{document['runs']:,}"
    yield "written by them", _bytes(float(document["bytes_written"]))


def _figures(facts: SourceFacts) -> Iterator[Figure]:
    when, seconds = Axis("time", time=True), Axis("seconds", _seconds)
    size, count = Axis("size", _bytes, base=1024), Axis("events", "{:,.0f}".format)
    times, written = figures.cost_of_runs(facts)
    drawn: list[tuple[str, str, Sequence[Series], Axis, Axis, Marks, str]] = [
        (
            "Freshness: commit to dimension",
            "How old a change was when people could read it: from its commit at the source to the version of "
            "its dimension that showed it first.",
            figures.percentiles_over_time(figures.to_dimension(facts)),
            when,
            seconds,
            Marks.LINE,
            "No change of the stream is in a dimension yet.",
        ),
        (
            "Commit to landing",
            "From the commit at the source to the durable batch.",
            figures.percentiles_over_time(figures.to_landing(facts)),
            when,
            seconds,
            Marks.LINE,
            "No change of the stream has landed.",
        ),
        (
            "Lag of landing",
            "How far the watermark was behind the clock as each batch landed.",
            figures.lag(facts),
            when,
            seconds,
            Marks.DOTS,
            "Landing has no watermark: nothing of a stream has landed.",
        ),
        (
            "Batch size against latency",
            "Each dot is a batch of the stream: its events, and the time from its first commit until it was "
            "durable, and until every dimension that it changes had shown it.",
            figures.size_and_latency(facts),
            Axis("events in the batch", "{:,.0f}".format, log=True),
            seconds,
            Marks.DOTS,
            "No batch of the stream has events.",
        ),
        (
            "Events by table",
            "Changes that landed. Rows of snapshots are left out, unless nothing else has landed.",
            figures.events_by_table(facts),
            when,
            count,
            Marks.LINE,
            "Nothing has landed.",
        ),
        (
            "Duplicates, late and withheld events",
            "By the window of the commit time. Duplicates are dropped, late events replay their window, "
            "withheld ones are in quarantine.",
            figures.faults_by_window(facts),
            when,
            count,
            Marks.BARS,
            "None in any window.",
        ),
        (
            "Growth of tables",
            "Bytes of the files that the newest version holds; replaced ones stay until they are swept.",
            figures.growth(facts),
            when,
            size,
            Marks.LINE,
            "The lake has no table of this source yet.",
        ),
        (
            "Cost of runs: time",
            "Seconds from a run's first commit to its last, the least that it took.",
            times,
            when,
            seconds,
            Marks.DOTS,
            "No run has committed.",
        ),
        (
            "Cost of runs: writing",
            "Bytes of all files that a run wrote, over all its tables.",
            written,
            when,
            size,
            Marks.DOTS,
            "No run has committed.",
        ),
    ]
    for title, caption, series, x, y, marks, empty in drawn:
        # What ElementTree wrote is escaped already.
        yield Figure(title, caption, Markup(chart(series, x, y, marks, title)), empty)  # noqa: S704


def _seconds(value: float) -> str:
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * length:
            return f"{value / length:.3g} {unit}"
    return f"{value:.3g} s"


def _bytes(value: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GB"
