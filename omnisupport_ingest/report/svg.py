"""Draw charts as SVG text: lines, dots and bars over a time or a number, with axes and a legend.

There is no library and no script, so the page that holds the charts is one file that opens anywhere. Sizes
are in SVG user units; colours are the classes ``c0`` to ``c5``, which the page's style sheet defines. Each
mark has a ``<title>``, which browsers show under the pointer. ElementTree escapes all text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from xml.etree import ElementTree as ET

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 26, 54
_LEGEND_LINE = 15
_COLOURS = 6
_TIME_STEPS = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 7 * 86400, 30 * 86400)
"""Seconds between ticks of a time axis."""


class Marks(Enum):
    """How the points of a chart are drawn."""

    LINE = "line"
    DOTS = "dots"
    BARS = "bars"


@dataclass(frozen=True, slots=True)
class Series:
    """Points under one name, ascending in x: x in seconds since 1970 (UTC) or a number, y at least 0.

    ``apart``: points further apart in x are not joined by a line, because nothing is known between them;
    None: all are joined.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    apart: float | None = None

    def stretches(self) -> Iterator[list[tuple[float, float]]]:
        """Yield the points that one line joins."""
        stretch: list[tuple[float, float]] = []
        for point in self.points:
            if stretch and self.apart is not None and point[0] - stretch[-1][0] > self.apart:
                yield stretch
                stretch = []
            stretch.append(point)
        yield stretch


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its name, how a number on it is written, and whether it is logarithmic or a time.

    ``base``: 10 or 1024; ticks are round multiples of its powers.
    """

    name: str
    text: Callable[[float], str] = "{:g}".format
    log: bool = False
    time: bool = False
    base: int = 10


@dataclass(frozen=True, slots=True)
class Band:
    """A part of the x axis that is marked, with its name; the axis is long enough to show all of it."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps numbers from ``low`` to ``high`` to ``length`` units from ``start`` on; a negative length goes
    up."""

    low: float
    high: float
    start: float
    length: float
    log: bool

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + self.length * ((value - low) / (high - low) if high > low else 0.5)


def chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    marks: Marks = Marks.LINE,
    title: str = "",
    band: Band | None = None,
) -> str:
    """Return the chart as one ``<svg>`` element; an empty text if no series has a point."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    xs = [point[0] for each in drawn for point in each.points]
    top = max(point[1] for each in drawn for point in each.points) or 1.0
    xs += [band.low, band.high] if band is not None else []
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 30, high + 30
    across = _Scale(low if low > 0 or not x.log else 1, high, _LEFT, _WIDTH - _LEFT - _RIGHT, x.log)
    y_ticks = _ticks_of(y, top)
    up = _Scale(0, max(y_ticks[-1], top), _HEIGHT - _BOTTOM, -(_HEIGHT - _TOP - _BOTTOM), log=False)
    legend_positions = _legend_positions(drawn)
    height = _HEIGHT + int(legend_positions[-1][1])
    root = ET.Element(
        "svg", {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "aria-label": title, "class": "chart"}
    )
    plane = _Plane(root, across, up, x, y)
    if band is not None:
        _mark(plane, band)
    _axes(plane, y_ticks)
    for number, each in enumerate(drawn):
        _draw(plane, each, marks, number, len(drawn))
    _legend(root, drawn, legend_positions)
    return ET.tostring(root, encoding="unicode")


@dataclass(frozen=True, slots=True)
class _Plane:
    """The drawing area of a chart: its element, and its scales and axes."""

    root: ET.Element
    across: _Scale
    up: _Scale
    x: Axis
    y: Axis


def _mark(plane: _Plane, band: Band) -> None:
    left, right = plane.across.at(band.low), plane.across.at(band.high)
    box = {"x": left, "y": float(_TOP), "width": right - left, "height": plane.up.start - _TOP}
    ET.SubElement(plane.root, "rect", {n: f"{v:.1f}" for n, v in box.items()} | {"class": "band"})
    _text(plane.root, right, 10, band.name, "end", "name")


def _axes(plane: _Plane, y_ticks: Sequence[float]) -> None:
    root, across, up, x, y = plane.root, plane.across, plane.up, plane.x, plane.y
    right, bottom = across.start + across.length, up.start
    for value in y_ticks:
        at = up.at(value)
        _line(root, across.start, at, right, at, "grid")
        _text(root, across.start - 6, at + 4, y.text(value), "end")
    for value in _x_ticks(across, x):
        at = across.at(value)
        _line(root, at, bottom, at, bottom + 4, "axis")
        _text(root, at, bottom + 17, _time_text(value, across) if x.time else x.text(value), "middle")
    _line(root, across.start, bottom, right, bottom, "axis")
    _text(root, right, bottom + 32, x.name, "end", "name")
    _text(root, 4, 10, y.name, "start", "name")


def _draw(plane: _Plane, series: Series, marks: Marks, number: int, of: int) -> None:
    """Draw a series. It is the series ``number`` of ``of``: this decides where its bars stand beside the
    others."""
    root, across, up, colour = plane.root, plane.across, plane.up, f"c{number % _COLOURS}"
    for stretch in series.stretches() if marks is Marks.LINE else ():
        path = " ".join(f"{across.at(a):.1f},{up.at(b):.1f}" for a, b in stretch)
        ET.SubElement(root, "polyline", {"points": path, "class": f"line {colour}"})
    width = min(18.0, max(1.5, across.length / max(len(series.points), 1) / of * 0.7))
    for a, b in series.points:
        when = f"{datetime.fromtimestamp(a, UTC):%Y-%m-%d %H:%M:%S} UTC" if plane.x.time else plane.x.text(a)
        if marks is Marks.BARS:
            if not b:
                continue
            left = across.at(a) + width * (number - of / 2)
            box = {"x": left, "y": up.at(b), "width": width, "height": up.start - up.at(b)}
            mark = ET.SubElement(root, "rect", {n: f"{v:.1f}" for n, v in box.items()} | {"class": colour})
        else:
            radius = "2.5" if marks is Marks.DOTS else "1.8"
            at = {"cx": f"{across.at(a):.1f}", "cy": f"{up.at(b):.1f}", "r": radius}
            mark = ET.SubElement(root, "circle", at | {"class": colour})
        ET.SubElement(mark, "title").text = f"{series.name}, {when}: {plane.y.text(b)}"


def _legend_positions(series: Sequence[Series]) -> list[tuple[float, float]]:
    """Return, for each name in the legend, its x, and its y below the first line."""
    positions, at, below = [], float(_LEFT), 0.0
    for each in series:
        width = 13 + 6.2 * len(each.name) + 16
        if at > _LEFT and at + width > _WIDTH:
            at, below = float(_LEFT), below + _LEGEND_LINE
        positions.append((at, below))
        at += width
    return positions


def _legend(root: ET.Element, series: Sequence[Series], positions: Sequence[tuple[float, float]]) -> None:
    for number, (each, (at, below)) in enumerate(zip(series, positions, strict=True)):
        box = {"x": f"{at:.0f}", "y": f"{_HEIGHT - 12 + below:.0f}", "width": "9", "height": "9"}
        ET.SubElement(root, "rect", box | {"class": f"c{number % _COLOURS}"})
        _text(root, at + 13, _HEIGHT - 4 + below, each.name, "start")


def _ticks_of(axis: Axis, top: float) -> list[float]:
    """Return round numbers from 0 to at least ``top``."""
    unit = 1.0
    while axis.base != 10 and top / unit >= axis.base:
        unit *= axis.base
    return [each * unit for each in _steps(0, top / unit)]


def _x_ticks(across: _Scale, x: Axis) -> list[float]:
    if x.log:
        powers = range(math.floor(math.log10(across.low)), math.ceil(math.log10(across.high)) + 1)
        values = [10.0**power * factor for power in powers for factor in (1, 2, 5)]
        return [each for each in values if across.low <= each <= across.high]
    if not x.time:
        return [each for each in _steps(across.low, across.high) if across.low <= each <= across.high]
    span = across.high - across.low
    step = next((each for each in _TIME_STEPS if span / each <= 8), _TIME_STEPS[-1])
    first = math.ceil(across.low / step) * step
    return [float(first + step * number) for number in range(int((across.high - first) // step) + 1)]


def _time_text(value: float, across: _Scale) -> str:
    span = across.high - across.low
    form = "%H:%M:%S" if span < 300 else "%H:%M" if span < 2 * 86400 else "%b %d"
    return f"{datetime.fromtimestamp(value, UTC):{form}}"


def _steps(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to at least ``high``."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return list(_upward(math.floor(low / step) * step, high, step))


def _upward(value: float, high: float, step: float) -> Iterator[float]:
    yield value
    number = 1
    while value + (number - 1) * step < high:
        yield value + number * step
        number += 1


def _line(root: ET.Element, x1: float, y1: float, x2: float, y2: float, of_class: str) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ET.SubElement(root, "line", {name: f"{value:.1f}" for name, value in ends.items()} | {"class": of_class})


def _text(root: ET.Element, x: float, y: float, text: str, anchor: str, of_class: str = "tick") -> None:
    at = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": of_class}
    ET.SubElement(root, "text", at).text = text
