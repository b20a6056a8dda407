"""The settings of a demo: which home, domain, contracts and decision table it has, wherever it is run.

The contracts of a domain come with the program. A checkout has them in the working folder too, where people
edit them, so the demo takes them from there if one names the domain. Other contracts of the working folder
are for somebody's own tables: the demo leaves them alone, and their decision table with them, and takes those
of the program.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.render import say_err, some
from omnisupport_ingest.contracts.decision_table import load_decision_table
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import InForce, of_new_home, recorded
from omnisupport_ingest.contracts.load import has_contract_of, load_contracts
from omnisupport_ingest.demo.domains import DEFAULT, DOMAINS, domain_called, home_of
from omnisupport_ingest.home import Home, HomeMismatch
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from omnisupport_ingest.demo.domain import Domain

WINDOW = "minutes:1"
"""Window size of a home that the demo makes; the workload reaches at least two windows."""

DECISIONS = "reports/week03/late_arrival_decision_table.csv"

_USUAL_CONTRACTS = Path("contracts/data")

_OF_DEMOS = ".omnisupport-"
"""How the name of a home begins that is for a demo alone."""


def home_overrides(domain: str | None) -> dict[str, Any]:
    """Return the setting for the home of ``domain``; empty without a domain, or if the environment names a
    home."""
    if domain is None or "home" in Settings().model_fields_set:
        return {}
    return {"home": home_of(domain_called(domain))}


def new_home_overrides(settings: Settings) -> dict[str, Any]:
    """Return settings that are fixed when a home is made, unless the environment sets them: window size and
    first window.

    Nothing in the demo's database is older than its home, and windows before it would look like a gap in the
    UI.
    """
    wanted = {"window": WINDOW, "first_window": datetime.now(UTC)}
    return {name: value for name, value in wanted.items() if name not in settings.model_fields_set}


def settings_of(domain: str | None) -> dict[str, Any]:
    """Return the settings of a demo of ``domain``; None: of the domain of the home, else of the settings.

    Raises ``HomeMismatch`` if the home has another domain, or only tables that are of no demo, and what
    ``settings_of_new_home`` raises if it has none yet.
    """
    overrides = home_overrides(domain)
    settings = Settings(**overrides)
    record = recorded(settings)
    if record is None:
        return settings_of_new_home(domain)
    _require_tables(record, settings)
    if domain is None:
        return overrides
    chosen, has = domain_called(domain), record.source or DEFAULT.name
    if has != chosen.name:
        raise HomeMismatch(
            f"The home {_folder(settings)} has the source {has}, and --domain is {chosen.name}: a home keeps "
            "its domain.",
            fix=f"Unset OMNISUPPORT_HOME, or set it to another folder: {chosen.name} gets a home of its own. "
            f"Or leave --domain out, to go on with {has}.",
        )
    return overrides | {"source": chosen.name}


def settings_of_new_home(domain: str | None) -> dict[str, Any]:
    """Return the settings of a demo of ``domain`` whose home is made now; None: of that of the settings.

    Raises ``IngestError`` if its contracts or its decision table cannot be read, and a usage error if
    ``contracts_dir`` is set to contracts of other tables.
    """
    overrides = home_overrides(domain)
    settings = Settings(**overrides)
    chosen = DOMAINS.get(settings.source) if domain is None else domain_called(domain)
    if chosen is not None:
        overrides |= {} if domain is None else {"source": chosen.name}
        overrides |= _documents(chosen, settings)
    # Tables of a person's own on the embedded server have their contracts where other commands look.
    has = of_new_home(Settings(**overrides))
    load_decision_table(has.decision_table)
    contracts = load_contracts(has.contracts)
    if chosen is not None and not contracts.of_source(chosen.name):
        raise click.UsageError(
            f"OMNISUPPORT_CONTRACTS_DIR is {settings.contracts_dir}, which has no table of {chosen.name}. "
            "Unset it for the demo, which has contracts of its own."
        )
    return overrides


def require_of_a_demo(home: Home) -> None:
    """Raise ``HomeMismatch`` if a source has landed in ``home`` that no demo has."""
    # Who looks at a source makes its folders.
    landed = {
        each.parent.parent.name
        for part in ("manifests", "epochs")
        for each in home.landing.glob(f"*/{part}/*")
    }
    others = sorted(landed - set(DOMAINS))
    if others:
        raise HomeMismatch(
            f"{home.path} has batches of {some(others)}, which no demo made, and --fresh removes the whole "
            "home. Nothing was removed.",
            fix="Give the demo a folder of its own by OMNISUPPORT_HOME. Or, if everything in this home may "
            "go: omnisupport-ingest clean",
        )


def _require_tables(record: InForce, settings: Settings) -> None:
    """Raise ``HomeMismatch`` if the home has contracts, and none of the domain that it would get."""
    has = record.source or DEFAULT.name
    others = sorted({each.partition(":")[0] for each in record.tables})
    if has in DOMAINS and others and has not in others:
        raise HomeMismatch(
            f"The home {_folder(settings)} has tables of {some(others)}, and none of {has}: it is no home of "
            "a demo.",
            fix="Give the demo a folder of its own by OMNISUPPORT_HOME.",
        )


def _documents(domain: Domain[Any], settings: Settings) -> dict[str, Any]:
    """Return the settings for contracts and decision table of a new home of ``domain``, and say so if the
    working folder has others."""
    if settings.contracts_dir is not None:
        return {}
    here = Path(domain.contracts)
    if has_contract_of(here, domain.name):
        return {"contracts_dir": here}
    own = {"contracts_dir": program_file(domain.contracts)}
    said = (
        f"{_USUAL_CONTRACTS} has no table of {domain.name}: the demo takes its own contracts, from "
        f"{own['contracts_dir']}."
    )
    if settings.decision_table is None and any(_USUAL_CONTRACTS.glob("*.json")):
        own["decision_table"] = program_file(DECISIONS)
        if Path(DECISIONS).is_file():
            said += f" It takes its own decision table: {DECISIONS} of this folder is for your tables."
    if not settings.home.name.startswith(_OF_DEMOS):
        said += (
            f" {settings.home} becomes its home. If that is to be for your tables: Ctrl-C, then "
            f"`omnisupport-ingest clean`, then `OMNISUPPORT_HOME={_OF_DEMOS}demo omnisupport-ingest demo`."
        )
    if _USUAL_CONTRACTS.is_dir():
        say_err(said)
    return own


def _folder(settings: Settings) -> Path:
    return settings.home.absolute()
