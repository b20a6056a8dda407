"""The demo databases that come with the program. The demo takes their names; no other module knows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnisupport_ingest.demo.domain import Domain
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import Settings

DOMAINS: Mapping[str, Domain[Any]] = {each.name: each for each in (SUPPORT_DESK, SOCIAL)}

DEFAULT: Domain[Any] = SUPPORT_DESK
"""The domain of a home for which no other was named."""


class DomainUnknown(IngestError):
    """No domain of the demo has the name.

    Fix: Name one of those that the message lists.
    """

    exit_code = 2


def domain_called(name: str) -> Domain[Any]:
    """Return the domain ``name``. Raises ``DomainUnknown``, which lists the existing ones."""
    if name not in DOMAINS:
        raise DomainUnknown(
            f"There is no domain {name!r} to demonstrate.", fix=f"Name one of: {', '.join(DOMAINS)}."
        )
    return DOMAINS[name]


def home_of(domain: Domain[Any]) -> Path:
    """Return the default home of ``domain``; each domain has its own."""
    usual: Path = Settings.model_fields["home"].default
    return usual if domain is DEFAULT else usual.with_name(f"{usual.name}-{domain.name}")


def embedded_domain(settings: Settings) -> Domain[Any]:
    """Return the domain that the embedded server of ``settings`` holds: the one with the name of the
    source.
    """
    return DOMAINS.get(settings.source, DEFAULT)
