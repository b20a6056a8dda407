"""The page ``docs/errors.md``: every error that a person may meet, from the classes and their docstrings.

People may meet every subclass of ``IngestError``; classes that only control the program derive from
``Exception``. The first paragraph of a docstring says what has happened; the one that begins with ``Fix:``
says what to do. Pages of ``docs/`` that name an error are linked.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import omnisupport_ingest
from omnisupport_ingest.cli.errors import EXIT_CODES
from omnisupport_ingest.cli.reference_data import cell
from omnisupport_ingest.errors import IngestError

_HEAD = f"""\
# Errors

Every error, by where it comes from. This page is made by `python -m omnisupport_ingest.cli.reference`.

An error says what the problem is and how to fix it, and a command prints both. The name of the error stands
in `source status`, in the log of a run, in the tick of a sensor, and in what `omnisupport-ingest --debug`
prints. To find an error by its message, look in [recovery](recovery.md#bad-input); by what you see, in
[troubleshooting](troubleshooting.md).

The exit code is that of a command which the error ends; the [command line](cli.md#exit-codes) explains the
codes. In a run of Dagster the error fails the run instead, and in a service it stands in the service's log.
A problem that a single command may have is an `{IngestError.__name__}` without a name of its own
({IngestError.exit_code}: {EXIT_CODES[IngestError.exit_code].word}).
"""

_PARTS = (
    ("Commands", ("cli",)),
    ("Settings and the home", ("settings", "home", "storage", "visiting", "windows", "durable")),
    ("Contracts, sources and keys", ("contracts", "withdrawal")),
    ("Capture of PostgreSQL's log", ("sources.postgres",)),
    ("Embedded PostgreSQL", ("sources.postgres.embedded",)),
    ("Tables read by a cursor", ("sources.query",)),
    ("Kafka", ("sources.kafka",)),
    ("Files of Debezium", ("sources.debezium",)),
    ("Deliveries of files", ("sources.manifests",)),
    ("Landing", ("landing",)),
    ("Layers: raw, deduped, quarantine, dimensions", ("layers",)),
    ("Tables of the lake", ("lake",)),
    ("Reading, explaining and exporting", ("read",)),
    ("Decisions on quarantine, and erasure", ("review",)),
    ("Passes, and comparing with the source", ("verify", "equality")),
    ("Targets", ("targets",)),
    ("Java, Spark and services", ("runtime", "tracing")),
    ("Backfills of Dagster", ("defs",)),
    ("Demo and measuring", ("demo", "tuning")),
)
"""Origins of errors in words, and the packages or modules of each; the longest match counts."""

_LINKED = ("troubleshooting.md", "runbooks.md", "recovery.md", "faults.md")
"""Pages that say what to do about errors, in the order in which a reader should begin."""

_FIX = "Fix: "
_SECTION = re.compile(r"^#{2,3} (.+)$", flags=re.MULTILINE)
_NAMED = re.compile(r"`(\w+)`")


def errors() -> list[type[IngestError]]:
    """Return every error that a person may meet, by name. Imports every module of the program."""
    package = omnisupport_ingest.__name__
    for module in pkgutil.walk_packages(omnisupport_ingest.__path__, f"{package}."):
        importlib.import_module(module.name)
    found, left = list[type[IngestError]](), [IngestError]
    while left:
        subclasses = left.pop().__subclasses__()
        left += subclasses
        # Programs of other people, and tests, may have subclasses too.
        found += [each for each in subclasses if each.__module__.startswith(f"{package}.")]
    return sorted(found, key=lambda error: (error.__name__, error.__module__))


def described(error: type[IngestError]) -> tuple[str, str]:
    """Return what ``error`` means and what to do about it, from its docstring; empty texts if it does not
    say."""
    document = inspect.cleandoc(vars(error).get("__doc__") or "").replace("``", "`")
    paragraphs = [" ".join(each.split()) for each in document.split("\n\n")]
    fixes = [each.removeprefix(_FIX) for each in paragraphs if each.startswith(_FIX)]
    return paragraphs[0], fixes[0] if fixes else ""


def errors_page(docs: Path) -> str:
    """Return the whole of ``docs/errors.md``, with links to the pages in the folder ``docs``."""
    links = _sections_that_name(docs)
    rows = defaultdict[str, list[str]](list)
    for error in errors():
        rows[_part_of(error)].append(_row(error, links.get(error.__name__, [])))
    parts = [_HEAD]
    for title, modules in _PARTS:
        packages = ", ".join(f"`omnisupport_ingest/{each.replace('.', '/')}`" for each in modules)
        parts.append(
            f"## {title}\n\nFrom {packages}.\n\n"
            "| error | what it means | exit code | what to do |\n|---|---|---|---|\n"
            + "\n".join(rows.pop(title))
            + "\n"
        )
    return "\n".join(parts)


def _part_of(error: type[IngestError]) -> str:
    module = error.__module__.removeprefix(f"{omnisupport_ingest.__name__}.")
    known = {each: title for title, modules in _PARTS for each in modules}
    fitting = [each for each in known if f"{module}.".startswith(f"{each}.")]
    if not fitting:
        raise LookupError(f"No part of docs/errors.md is that of {module}: add one to _PARTS in {__name__}.")
    return known[max(fitting, key=len)]


def _row(error: type[IngestError], links: list[str]) -> str:
    meaning, fix = described(error)
    code = error.exit_code
    see = f" See {', '.join(links)}." if links else ""
    return f"| `{error.__name__}` | {cell(meaning)} | {code}: {EXIT_CODES[code].word} | {cell(fix)}{see} |"


def _sections_that_name(docs: Path) -> dict[str, list[str]]:
    """Return links to the sections of ``docs`` that name an error, by what they name."""
    from omnisupport_ingest.defs.docs_pages import anchor

    found = defaultdict[str, list[str]](list)
    for page in _LINKED:
        _, *parts = _SECTION.split((docs / page).read_text())
        for heading, text in zip(parts[::2], parts[1::2], strict=True):
            link = f"[{page.removesuffix('.md')}: {heading}]({page}#{anchor(heading)})"
            for name in dict.fromkeys(_NAMED.findall(text)):
                found[name].append(link)
    return found
