"""The archive of ``doctor --archive``: what a bug report needs, without anything secret or personal.

It contains only what the program itself made: verdicts, counts, positions, versions. It has no line of a log,
no key, no value of a row, no secret setting. Paths below this user's folder begin with ``~``. As a second
guard, secrets of the settings are removed from every text before it is written.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import SecretStr

from omnisupport_ingest.cli.ledger import account_documents
from omnisupport_ingest.cli.opening import has_home, open_settings, open_workspace
from omnisupport_ingest.cli.status import status_document
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.recorded_runs import recorded
from omnisupport_ingest.settings import Settings

_HIDDEN = "(not shown)"
_OF_PEOPLE = frozenset({"by", "reason", "accepted", "paused", "epoch_reason"})
"""Fields of documents that hold what a person wrote, or who it was."""

_PASSWORD = re.compile(r"(?:password\s*=\s*'?|://[^:/@\s]*:)([^'@\s]+)", re.IGNORECASE)
_USER = re.compile(r"(?:://|\buser\s*=\s*'?)([^:/@\s']+)", re.IGNORECASE)
_ERROR_CLASS = re.compile(r"\b([A-Z][A-Za-z]*(?:Error|Exception))\b")
_PACKAGES = (
    "dagster",
    "pyspark",
    "deltalake",
    "duckdb",
    "pyarrow",
    "pandas",
    "psycopg2-binary",
    "click",
    "rich",
)


def write_archive(path: Path, findings: dict[str, Any]) -> None:
    """Write the ZIP file ``path`` in one step; only its owner can read it.

    ``findings``: the document of ``doctor``.
    """
    settings = open_settings()
    contents: dict[str, Any] = {
        "doctor.json": findings,
        "versions.json": _versions(),
        "settings.json": shown_settings(settings),
    }
    if has_home(settings):
        contents |= dict(_of_home(settings))
    hide = _Hiding(settings)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            reported = without_words(content)
            archive.writestr(name, hide(json.dumps(reported, indent=2, ensure_ascii=False, default=str)))
    # No failpoint: a file for people; the same command makes it again.
    replace(path, buffer.getvalue())


def without_words(content: Any) -> Any:
    """Return ``content`` without the words and names of people, at any depth."""
    if isinstance(content, dict):
        return {
            name: _HIDDEN if name in _OF_PEOPLE and value else without_words(value)
            for name, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return [without_words(each) for each in content]
    return content


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are set. Their values are included unless they are secret or may contain a
    person's name."""
    shown: dict[str, Any] = {}
    for name in sorted(settings.model_fields_set):
        value = getattr(settings, name)
        # A command line may contain a password.
        secret = isinstance(value, SecretStr) or name in ("alarm_command", "pii_keys")
        shown[name] = _HIDDEN if secret else value if isinstance(value, (int, float)) else str(value)
    return shown


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("omnisupport-ingest", *_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _of_home(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name, make in (("status.json", status_document), ("ledger.json", account_documents)):
        try:
            yield name, make()
        except IngestError as error:
            yield name, {"error": error.problem, "fix": error.fix}
    home = settings.home.absolute()
    known = recorded(home / "dagster", settings.dagster_pg_url, most=50)
    if known is not None:
        yield "runs.json", [asdict(each) for each in known.runs]
    yield "logs.json", {each.name: log_summary(each) for each in sorted((home / "logs").glob("*.log"))}
    try:
        contracts = open_workspace(settings).contracts.all
    except IngestError:
        return
    yield (
        "contracts.json",
        [
            {
                "source": each.source,
                "table": each.full_name,
                "version": each.version,
                "sha256": each.fingerprint,
            }
            for each in contracts
        ],
    )


def log_summary(path: Path) -> dict[str, Any]:
    """Return how long a log is, and which classes of errors it names; no other word of it."""
    lines, classes = 0, Counter[str]()
    with path.open(errors="replace") as log:
        for line in log:
            lines += 1
            classes.update(name for name in _ERROR_CLASS.findall(line) if name in _KNOWN_ERRORS)
    return {"lines": lines, "bytes": path.stat().st_size, "errors": dict(classes.most_common())}


def _subclasses(of: type[BaseException]) -> Iterator[str]:
    for each in of.__subclasses__():
        yield each.__name__
        yield from _subclasses(each)


_KNOWN_ERRORS = frozenset(_subclasses(BaseException))
"""The classes of errors that this process knows; a word of a row that looks like one does not count."""


class _Hiding:
    """Removes secrets, and the path of this user's folder, from a text."""

    def __init__(self, settings: Settings) -> None:
        secrets, users = set(), set()
        for name in type(settings).model_fields:
            value = getattr(settings, name)
            if isinstance(value, SecretStr):
                text = value.get_secret_value()
                secrets |= {
                    text,
                    *(part for secret in _PASSWORD.findall(text) for part in (secret, unquote(secret))),
                }
                users |= {name for secret in _USER.findall(text) for name in (secret, unquote(secret))}
        # A role may have the name of a person. The name may be any word, so it is removed only after ``user``
        # or ``role``.
        names = "|".join(map(re.escape, sorted(users, key=len, reverse=True)))
        self._user = re.compile(rf'(\b(?:user|role) (?:\\?")?)(?:{names})(?![\w.-])') if users else None
        self._secrets = sorted((each for each in secrets if each), key=len, reverse=True)
        self._folder = str(Path.home())

    def __call__(self, text: str) -> str:
        for each in self._secrets:
            text = text.replace(json.dumps(each)[1:-1], _HIDDEN).replace(each, _HIDDEN)
        if self._user is not None:
            text = self._user.sub(rf"\g<1>{_HIDDEN}", text)
        return text if self._folder == "/" else text.replace(self._folder, "~")
