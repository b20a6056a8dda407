"""What the site has besides ``docs/``: pages and tables of the repository that the pages link to."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "contracts/contract.schema.json",
    "reports/week03/late_arrival_decision_table.csv",
)
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that stand outside of ``docs/``."""
    for name in BESIDES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Have links across the border of ``docs/`` lead to where the site has the file."""
    here = PurePosixPath("docs", page.file.src_uri) if page.file.src_uri not in BESIDES else None
    at = here or PurePosixPath(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _joined(at.parent, link[2])
        if target is None:
            return link[0]
        if target in BESIDES and here is not None:
            depth = len(here.parent.parts) - 1
            return f"{link[1]}{'../' * depth}{target}"
        if here is None and target.startswith("docs/"):
            return f"{link[1]}{target.removeprefix('docs/')}"
        if target == "README.md":
            return f"{link[1]}index.md"
        return link[0]

    return _LINK.sub(moved, markdown)


def _joined(folder: PurePosixPath, link: str) -> str | None:
    """``link`` as a path from the repository's root, None if it is none of the repository."""
    if "://" in link:
        return None
    parts = list(folder.parts)
    for part in PurePosixPath(link).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
