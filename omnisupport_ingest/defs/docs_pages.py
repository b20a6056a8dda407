"""The documentation, as the UI's webserver shows it below ``/omnisupport``.

The pages are the Markdown files of the program, so they fit the running version and need no network. Their
paths are those of the repository, so links between pages work as they do there.
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.defs.keys import DOCUMENTATION

BESIDES = frozenset(
    {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "LICENSE",
        "contracts/contract.schema.json",
        "reports/week03/late_arrival_decision_table.csv",
    }
)
"""Targets of links to files outside of ``docs/``."""

_SHOWN_AS = {".png": "image/png", ".svg": "image/svg+xml"}
_FIRST = "docs/index.md"
_TAB = re.compile(r'=== "(.+)"')

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
nav { font-size: .9rem; padding: .4rem 0; border-bottom: 1px solid #8886; }
pre, code { font: .88em/1.45 ui-monospace, monospace; background: #8882; border-radius: 4px; }
code { padding: .1em .3em; } pre { padding: .8em 1em; overflow-x: auto; }
pre code { background: none; padding: 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid #8886; padding: .35em .6em; text-align: left; vertical-align: top; }
img { max-width: 100%; background: #fff; }
:target { outline: 2px solid #4f6bed; outline-offset: 4px; }
"""


def routes() -> list[Route]:
    """Return the routes of the documentation, which come before those of the UI."""
    return [
        Route(DOCUMENTATION, lambda _: RedirectResponse(f"{DOCUMENTATION}/{_FIRST}")),
        # Not the first page of the repository: the documentation has its own.
        Route(f"{DOCUMENTATION}/README.md", lambda _: RedirectResponse(f"{DOCUMENTATION}/{_FIRST}")),
        Route(f"{DOCUMENTATION}/{{path:path}}", _answer),
    ]


def _answer(request: Request) -> Response:
    name = str(request.path_params["path"]) or _FIRST
    file = _file(name)
    if file is None:
        return PlainTextResponse(f"The documentation has no page {name}.\n", status_code=404)
    if file.suffix in _SHOWN_AS:
        return FileResponse(file, media_type=_SHOWN_AS[file.suffix])
    if file.suffix != ".md":
        return PlainTextResponse(file.read_text(encoding="utf-8"))
    return HTMLResponse(page_html(name, file.read_text(encoding="utf-8")))


def _file(name: str) -> Path | None:
    """Return the file of the program for the address ``name``; None for any other address."""
    if name in _pages() or name in BESIDES:
        file = program_file(name)
        return file if file.is_file() else None
    return None


@cache
def _pages() -> frozenset[str]:
    """Return the names of all pages, pictures and notebooks of ``docs/``; no other file there is served."""
    folder = program_file("docs")
    found = (each for each in folder.rglob("*") if each.suffix in {".md", ".ipynb", *_SHOWN_AS})
    return frozenset(f"docs/{each.relative_to(folder).as_posix()}" for each in found)


def page_html(name: str, text: str) -> str:
    """Return the page ``name`` with the Markdown ``text`` as one HTML document."""
    body = str(_markdown().render(_without_tabs(text)))
    title = html.escape(next(iter(re.findall(r"^# (.+)$", text, flags=re.MULTILINE)), name))
    up = "../" * (len(PurePosixPath(name).parts) - 1)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>"
        f'<nav><a href="{up}{_FIRST}">All pages</a> · <a href="/">Dagster UI</a></nav>'
        f"{body}</body></html>"
    )


def _without_tabs(text: str) -> str:
    """Return ``text`` with the tabs of the site (``=== "Name"`` over an indented block) below one another."""
    lines, inside = [], False
    for line in text.splitlines():
        if (tab := _TAB.fullmatch(line)) is not None:
            inside = True
            lines.append(f"**{tab[1]}**")
        elif inside and (line.startswith("    ") or not line):
            lines.append(line[4:])
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as the site and the repository's own pages have it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"\s", "-", plain)


@cache
def _markdown() -> MarkdownIt:
    # HTML in a page is shown as text: no page needs it.
    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.add_render_rule("heading_open", _heading)
    return made


def _heading(_renderer: object, tokens: Any, index: int, _options: object, _env: object) -> str:
    return f'<{tokens[index].tag} id="{html.escape(anchor(tokens[index + 1].content))}">'
