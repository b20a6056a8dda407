"""Draw what was measured, as SVG or PNG: latency against the age and the size of a batch.

The SVG uses the charts of the report, so it needs no library for plots and opens in a browser. The PNG is
drawn by matplotlib, the extra ``png``. Both x axes cover the range that the literature recommends, which is
marked.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.report.svg import Axis, Band, Series, chart
from omnisupport_ingest.tuning.points import LITERATURE_ROWS, LITERATURE_SECONDS, Percentiles, Point

_STYLE = """
svg { font: 12px system-ui, sans-serif; color: #1c2330; background: #fff; }
.tick { font-size: 11px; fill: #5d6778; } .name { font-size: 11px; fill: #1c2330; }
.chart { overflow: visible; }
.heading { font-size: 13px; font-weight: 600; fill: #1c2330; }
.grid { stroke: #d9dee7; } .axis { stroke: #5d6778; } .band { fill: #8a94a6; opacity: .18; }
.line { stroke-width: 1.6; }
.c0 { fill: #2f6fdb; } .c1 { fill: #d9822b; } .c2 { fill: #b8305f; }
.c3 { fill: #2c9a6b; } .c4 { fill: #7a58c9; } .c5 { fill: #8a94a6; }
.line.c0 { stroke: #2f6fdb; } .line.c1 { stroke: #d9822b; } .line.c2 { stroke: #b8305f; }
.line.c3 { stroke: #2c9a6b; } .line.c4 { stroke: #7a58c9; } .line.c5 { stroke: #8a94a6; }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5 { fill: none; }
"""

_GAP = 34
"""Height of the heading of a chart, in SVG user units."""

_MARGIN = 24
"""Width at the right for the end of an axis's last number, in SVG user units."""

_Y = Axis("latency, seconds", "{:g} s".format)


_DPI = 120


class NoPlots(IngestError):
    """``tune`` is to draw a PNG, and matplotlib is not installed.

    Fix: Install the extra ``omnisupport-ingest[png]``, or name a file that ends with ``.svg``.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class _Chart:
    """A chart of the curve: latency over ``x``."""

    heading: str
    series: list[Series]
    x: Axis
    band: Band


def drawn(points: Sequence[Point]) -> str:
    """Return the SVG of two charts: by the age that cuts a batch, and by the events of a batch."""
    return _stacked(
        [(each.heading, chart(each.series, each.x, _Y, band=each.band)) for each in _charts(points)]
    )


def require_plots() -> None:
    """Raise ``NoPlots`` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots(
            "The curve as PNG needs matplotlib, which is not installed.",
            fix='Install it: pip install "omnisupport-ingest[png]". Or name a file that ends with .svg.',
        ) from None


def picture(points: Sequence[Point]) -> bytes:
    """Return the PNG of the same two charts. Raises ``NoPlots`` if matplotlib is not installed."""
    require_plots()
    from matplotlib.figure import Figure

    charts = _charts(points)
    figure = Figure(figsize=(8, 4 * len(charts)), layout="constrained")
    for axes, each in zip(figure.subplots(len(charts)), charts, strict=True):
        axes.set_title(each.heading, fontsize="medium")
        axes.set_xlabel(each.x.name)
        axes.set_ylabel(_Y.name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _, text=each.x.text: text(value))
        axes.axvspan(each.band.low, each.band.high, color="0.9", label=each.band.name)
        for series in each.series:
            if series.points:
                axes.plot(*zip(*series.points, strict=True), marker="o", markersize=3, label=series.name)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.4)
        axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DPI)
    return image.getvalue()


def _charts(points: Sequence[Point]) -> list[_Chart]:
    return [
        _Chart(
            "Latency against OMNISUPPORT_BATCH_MAX_SECONDS",
            _by_age([each for each in points if not each.setting.by_size]),
            Axis("age at which a batch is cut, seconds", log=True),
            Band("literature: 1 to 5 minutes", *LITERATURE_SECONDS),
        ),
        _Chart(
            f"Latency against the size of a batch, commit to {points[0].end}",
            _by_size(points),
            Axis("events in a batch, mean", "{:,.0f}".format, log=True),
            Band("literature: 50,000 to 100,000 rows", *LITERATURE_ROWS),
        ),
    ]


def _by_age(points: Sequence[Point]) -> list[Series]:
    at = [each.setting.seconds for each in points]
    series = _percentiles("commit to durable batch", at, [each.landing for each in points])
    far = [each.dimension for each in points if each.dimension is not None]
    return series + (_percentiles("commit to dimension", at, far) if len(far) == len(at) else [])


def _by_size(points: Sequence[Point]) -> list[Series]:
    series = []
    for label, by_size in (("cut by age", False), ("cut by size", True)):
        ordered = sorted(
            (each for each in points if each.setting.by_size is by_size),
            key=lambda each: each.events_per_batch,
        )
        at = [each.events_per_batch for each in ordered]
        series += _percentiles(label, at, [each.latency for each in ordered])
    return series


def _percentiles(label: str, at: Sequence[float], percentiles: Sequence[Percentiles]) -> list[Series]:
    """Return a line for each of three percentiles, at the x values ``at``."""
    return [
        Series(f"{label}, {rank}", tuple(zip(at, (getattr(each, rank) for each in percentiles), strict=True)))
        for rank in ("p50", "p95", "p99")
    ]


def _stacked(charts: Sequence[tuple[str, str]]) -> str:
    """Return one SVG of all charts, each below its heading."""
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
    ET.SubElement(root, "style").text = _STYLE
    y, width = 0, 0
    for heading, text in charts:
        # This is our own text, made a moment ago.
        part = ET.fromstring(text)  # noqa: S314
        _, _, across, down = (int(each) for each in part.get("viewBox", "").split())
        ET.SubElement(root, "text", {"x": "4", "y": str(y + 20), "class": "heading"}).text = heading
        part.attrib |= {"y": str(y + _GAP), "width": str(across), "height": str(down)}
        part.attrib["aria-label"] = heading
        root.append(part)
        y, width = y + _GAP + down, max(width, across)
    width += _MARGIN
    root.attrib |= {"viewBox": f"0 0 {width} {y}", "width": str(width), "height": str(y)}
    return ET.tostring(root, encoding="unicode") + "\n"
