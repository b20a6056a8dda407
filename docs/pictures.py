"""The drawn pictures of ``docs/images``, made anew by ``python docs/pictures.py``: SVG, without a library.

What a picture says is text here, so a change of words is a change of a line. Look at every picture before it
is committed: nothing here knows whether a text still fits its box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

IMAGES = Path(__file__).resolve().parent / "images"

_INK, _SOFT, _PAPER = "#1c2330", "#5d6778", "#ffffff"
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2f6fdb", "#c46a12", "#1f8a5b", "#b8305f", "#eef1f6"
_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass
class Picture:
    """A drawing of ``width`` by ``height`` units on white, which reads on a dark page too."""

    name: str
    title: str
    width: int
    height: int
    root: ET.Element = field(init=False)

    def __post_init__(self) -> None:
        size = {"viewBox": f"0 0 {self.width} {self.height}", "width": str(self.width)}
        look = {"font-family": _FONT, "font-size": "14", "fill": _INK, "role": "img"}
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **look})
        ET.SubElement(self.root, "title").text = self.title
        head = ET.SubElement(ET.SubElement(self.root, "defs"), "marker", _HEAD)
        ET.SubElement(head, "path", {"d": "M0 0 L10 5 L0 10 z", "fill": _SOFT})
        self.box(0, 0, self.width, self.height, fill=_PAPER, stroke="none")

    def box(self, x: float, y: float, width: float, height: float, **look: str) -> None:
        shape = {"fill": _GREY, "stroke": "#c3cad6", "rx": "6", **look}
        ET.SubElement(self.root, "rect", _numbers(x=x, y=y, width=width, height=height) | shape)

    def text(self, x: float, y: float, words: str, **look: str) -> None:
        """Write ``words``, a line for each line of them, the first at ``y``."""
        for number, line in enumerate(words.splitlines()):
            shape = {key.replace("_", "-"): value for key, value in look.items()}
            ET.SubElement(self.root, "text", _numbers(x=x, y=y + 18 * number) | shape).text = line

    def labelled(self, x: float, y: float, width: float, height: float, name: str, below: str) -> None:
        """Draw a box with its name in bold and a line or two below it, all in the middle."""
        self.box(x, y, width, height)
        middle = {"text_anchor": "middle"}
        self.text(x + width / 2, y + 24, name, font_weight="600", **middle)
        self.text(x + width / 2, y + 45, below, fill=_SOFT, font_size="12.5", **middle)

    def arrow(self, *points: tuple[float, float], color: str = _SOFT, dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        look = {"d": path, "fill": "none", "stroke": color, "stroke-width": "1.6", "marker-end": "url(#head)"}
        ET.SubElement(self.root, "path", look | ({"stroke-dasharray": "5 4"} if dashed else {}))

    def line(self, x1: float, y1: float, x2: float, y2: float, **look: str) -> None:
        shape = {"stroke": "#c3cad6", **{key.replace("_", "-"): value for key, value in look.items()}}
        ET.SubElement(self.root, "line", _numbers(x1=x1, y1=y1, x2=x2, y2=y2) | shape)

    def dot(self, x: float, y: float, color: str) -> None:
        ET.SubElement(self.root, "circle", _numbers(cx=x, cy=y, r=6) | {"fill": color})

    def write(self) -> None:
        # No failpoint: a picture of the documentation, for developers.
        (IMAGES / f"{self.name}.svg").write_text(ET.tostring(self.root, encoding="unicode") + "\n")


_HEAD = {
    "id": "head",
    "viewBox": "0 0 10 10",
    "refX": "9",
    "refY": "5",
    "markerWidth": "7",
    "markerHeight": "7",
    "orient": "auto-start-reverse",
}


def _numbers(**values: float) -> dict[str, str]:
    return {name: f"{value:g}" for name, value in values.items()}


def five() -> Picture:
    """The path of an event, and where each of the five concepts is on it."""
    drawn = Picture("concepts_five", "The path of an event, and the five concepts on it", 1000, 400)
    stages = (
        ("PostgreSQL", "the log (WAL)"),
        ("landing", "immutable batches,\neach with a manifest"),
        ("raw_cdc_staging", "every event,\nduplicates too"),
        ("deduped_events", "each accepted\nevent once"),
        ("dim_<table>", "current state:\na row for each key"),
    )
    width, gap, top = 164, 36, 130
    left = [18 + number * (width + gap) for number in range(len(stages))]
    for number, (name, below) in enumerate(stages):
        drawn.labelled(left[number], top, width, 84, name, below)
        if number:
            drawn.arrow((left[number] - gap + 3, top + 42), (left[number] - 3, top + 42))
    _concept(drawn, (left[1] - 90, 24), "watermark", "up to which time is it complete?", left[1] + 60, top)
    _concept(drawn, (left[2] + 70, 24), "dedupe key", "are two inputs the same event?", left[3] + 40, top)
    under = top + 84
    _concept(drawn, (left[1] - 60, 300), "cursor", "where to look next?", left[1] + 180, under)
    _concept(
        drawn, (left[2] + 40, 300), "idempotency key", "does writing it again change it?", left[3], under
    )
    _concept(drawn, (left[3] + 130, 300), "checkpoint", "where is that state kept?", left[4] + 60, under)
    drawn.text(
        18, 386, "The checkpoint is in the commit that it describes: data and state are written at once.",
        fill=_SOFT, font_size="12.5",
    )  # fmt: skip
    return drawn


def _concept(
    drawn: Picture, at: tuple[float, float], name: str, question: str, to_x: float, to_y: float
) -> None:
    x, y = at
    drawn.box(x, y, 230, 56, fill="#e7effc", stroke=_BLUE)
    drawn.text(x + 12, y + 23, name, font_weight="600", fill=_BLUE)
    drawn.text(x + 12, y + 43, question, font_size="12.5")
    starts_low = y < to_y
    begin = (min(max(to_x, x + 12), x + 218), y + 56 if starts_low else y)
    drawn.arrow(begin, (to_x, to_y - 3 if starts_low else to_y + 3), color=_BLUE)


def windows() -> Picture:
    """Three windows, the watermark, the allowed lateness, and an event that is late."""
    drawn = Picture("concepts_windows", "Windows, the watermark and a late event", 1000, 380)
    start, width, top, height = 60, 270, 92, 110
    names = ("10:00", "11:00", "12:00")
    states = ("closed", "closed", "open")
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        x = start + number * width
        fill = "#e8f4ee" if state == "closed" else "#fff4e3"
        drawn.box(x, top, width - 8, height, fill=fill)
        drawn.text(x + 12, top + 24, f"window {name}", font_weight="600")
        drawn.text(x + 12, top + 44, state, fill=_GREEN if state == "closed" else _ORANGE)
    for x in (100, 150, 210, 262, 350, 420, 470, 560, 640, 690, 745):
        drawn.dot(x, top + 84, _SOFT)
    drawn.arrow((start - 20, 232), (950, 232))
    drawn.text(950, 222, "time of commit", text_anchor="end", fill=_SOFT)
    for number in range(4):
        x = start + number * width - 4
        drawn.line(x, 226, x, 238, stroke=_SOFT)
        drawn.text(x, 254, f"{10 + number}:00", text_anchor="middle", font_size="12.5", fill=_SOFT)
    mark = 770
    drawn.line(mark, 60, mark, 232, stroke=_BLUE, stroke_width="2.5")
    drawn.text(mark + 8, 56, "watermark 12:38", fill=_BLUE, font_weight="600")
    drawn.text(mark + 8, 74, "complete up to here", fill=_BLUE, font_size="12.5")
    drawn.arrow((mark - 6, 70), (mark - 135, 70), color=_BLUE, dashed=True)
    drawn.text(mark - 68, 56, "allowed lateness", fill=_BLUE, font_size="12.5", text_anchor="middle")
    drawn.dot(180, 306, _RED)
    drawn.arrow((180, 298), (180, top + 92), color=_RED)
    drawn.text(
        198,
        300,
        "A file brings an event of 10:27 now. Its window is that of its commit, and is closed: it is late.\n"
        "A sensor replays this window alone. The replay gives the same rows, and the late event besides.",
    )
    drawn.text(
        start - 18,
        360,
        "A window closes once the watermark is past its end by the allowed lateness (here 30 minutes).",
        fill=_SOFT,
        font_size="12.5",
    )
    return drawn


def fold() -> Picture:
    """A key in two parts of its events, and the row that both orders of merging give."""
    drawn = Picture("concepts_fold", "The fold: for each column, the largest position wins", 1000, 400)
    columns = (("event", 110), ("title", 190), ("body", 150))
    parts = (
        (
            "one part of the events",
            (("1  create", "Printer", "text A"), ("6  update", "Printer, urgent", "not sent")),
        ),
        ("another part, at any time", (("4  update", "Printer, 2nd floor", "text B"),)),
    )
    for y, (name, events) in zip((40, 212), parts, strict=True):
        drawn.text(24, y - 8, name, font_weight="600")
        _rows(drawn, 24, y, columns, [tuple(each for each, _ in columns), *events])
    _rows(
        drawn,
        640,
        116,
        (("", 110), ("title", 190)),
        [("", "title"), ("value", "Printer, urgent"), ("from", "6")],
    )
    _rows(drawn, 640, 232, (("", 110), ("body", 190)), [("", "body"), ("value", "text B"), ("from", "4")])
    drawn.text(640, 100, "the row of key 42", font_weight="600")
    drawn.arrow((478, 100), (632, 150), color=_GREEN)
    drawn.arrow((478, 250), (632, 270), color=_GREEN)
    drawn.text(500, 196, "for each column:\nthe largest position\nthat carried it", fill=_GREEN)
    drawn.text(
        24,
        350,
        "Taking the largest is the same in any order, in any parts, and when a part comes twice.\n"
        "So windows can be folded one by one, a late event (4) overwrites no newer value (6),\n"
        "and what only it carried (text B) is not lost.",
    )
    return drawn


def _rows(
    drawn: Picture,
    x: float,
    y: float,
    columns: tuple[tuple[str, int], ...],
    rows: list[tuple[str, ...]],
) -> None:
    for number, row in enumerate(rows):
        at = x
        for (_, width), words in zip(columns, row, strict=True):
            drawn.box(at, y + 30 * number, width, 30, fill=_GREY if number == 0 else _PAPER, rx="0")
            look = {"font_weight": "600"} if number == 0 else {}
            color = _SOFT if words == "not sent" else _INK
            drawn.text(at + 10, y + 30 * number + 20, words, fill=color, **look)
            at += width


def main() -> None:
    """Write every picture."""
    for draw in (five, windows, fold):
        draw().write()


if __name__ == "__main__":
    main()
