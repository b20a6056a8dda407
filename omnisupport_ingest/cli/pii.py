"""``pii``: the policies for personal data: what they are, what they might be, and finding a value again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.ordinary import IMAGE_OPS
from omnisupport_ingest.cli.opening import home_if_any, open_settings, open_workspace
from omnisupport_ingest.cli.render import Commands, counted
from omnisupport_ingest.contracts.at_rest import encrypted_columns
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import TableContract, table_named
from omnisupport_ingest.contracts.pii_keys import SETTING, PiiKeyMissing, keys_in_force, named_keys
from omnisupport_ingest.contracts.pii_scan import TO_DECIDE, Proposal
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.tail import last_events
from omnisupport_ingest.layers.removed import Present, Removed
from omnisupport_ingest.storage import has_landed

if TYPE_CHECKING:
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.read.former_policies import FormerPolicy
    from omnisupport_ingest.settings import Settings

_of_source = click.option("--source", metavar="NAME", help="Tables of this source alone.  [default: all]")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class UnknownToken(IngestError):
    """The map of tokens has no such token, or no token for such a value.

    Fix: Copy the token whole, as the lake shows it, or write the value as PostgreSQL prints it.
    """


@dataclass(frozen=True, slots=True)
class _Landed:
    """The landed batches of a source whose data still exists."""

    store: LandingStore
    batches: Sequence[Manifest]


@click.group(cls=Commands)
def pii() -> None:
    """Show and propose policies for personal data; look up hashes and tokens."""


@pii.command()
@_of_source
@_as_json
def show(source: str | None, as_json: bool) -> None:
    """Say which columns hold personal data, with the policy of each and how it lands, and which keys are in
    force.

    Columns of which sealed windows have values by another policy are named, too. A key counts as there if its
    secret can be read; no secret is shown.

    \b
    Example:
      omnisupport-ingest pii show --source support_desk

    Exit code: 0 done, 2 usage or settings.
    """
    settings = open_settings()
    named = named_keys(settings.pii_keys)
    try:
        problem = None
        keys_in_force(settings.pii_keys)
    except PiiKeyMissing as missing:
        problem = missing.problem if named else None
    columns = [
        {
            "table": f"{contract.source}.{contract.name}",
            "column": column.name,
            "policy": column.pii,
            "mask": column.mask.form if column.mask else None,
            "note": column.pii_note,
            "at_rest": "encrypted" if column.name in encrypted_columns(contract) else "plain",
        }
        for contract in _contracts(settings, source)
        for column in contract.source_columns
        if column.personal
    ]
    former = _former_policies(settings, source)
    if as_json:
        keys = [{"id": key.id, "from": key.how, "current": key is named[0]} for key in named]
        sealed = [asdict(each) for each in former]
        shown = {"columns": columns, "sealed": sealed, "keys": keys, "problem": problem}
        click.echo(json.dumps(shown, indent=2))
        return
    for each in columns:
        how = f" ({each['mask']})" if each["mask"] else ""
        lands = "; lands encrypted" if each["at_rest"] == "encrypted" else ""
        click.echo(f"{each['table']}.{each['column']}: {each['policy']}{how}{lands}. {each['note']}")
    if not columns:
        click.echo("No contract marks a column as personal data.")
    for one in former:
        click.echo(one.sentence)
    for key in named:
        click.echo(
            f"Key {key.id}, from {key.how} {key.name}{', current' if key is named[0] else ', former'}."
        )
    if not named:
        needed = any(each["policy"] == "hash" for each in columns)
        click.echo(f"{SETTING} names no key{'' if needed else '; no policy needs one'}.")
    if problem:
        click.echo(problem)


@pii.command()
@_of_source
@click.option("--table", metavar="TABLE", help="This table alone, `orders` or `shop.orders`.")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Look at the values of the last N landed events of each table.",
)
@_as_json
def scan(source: str | None, table: str | None, rows: int, as_json: bool) -> None:
    """Propose policies for columns that seem to hold personal data.

    Looks at names and types of the contracts' columns, and at values that have landed: e-mail addresses,
    phone and card numbers, IBANs, IP addresses, names of people. No value is printed, and nothing is changed:
    a proposal is for you to decide on, in x-cdc.pii of the contract. Columns that seem harmless may not be.

    \b
    Examples:
      omnisupport-ingest pii scan --table customers
      omnisupport-ingest pii scan --json

    Exit code: 0 done, whatever was found; 1 a batch is damaged, 2 usage or settings, 3 the home does not fit.
    """
    settings = open_settings()
    contracts = _contracts(settings, source)
    if table is not None:
        contracts = [table_named(table, contracts)]
    landed = {each: _landed(settings, each) for each in {contract.source for contract in contracts}}
    scanned = [(contract, _scanned(landed[contract.source], contract, rows)) for contract in contracts]
    if as_json:
        click.echo(json.dumps({"tables": [_document(*each) for each in scanned]}, indent=2))
        return
    for contract, (looked_at, proposals) in scanned:
        click.echo(f"{contract.source}.{contract.name}, {counted(looked_at, 'landed event')} looked at:")
        for each in proposals:
            done = _decided(contract, each.column)
            click.echo(f"  {each.column}: {each.what}, {each.why}. Proposed: {each.policy_text}{done}.")
        if not proposals:
            click.echo("  nothing that seems personal")


@pii.command(name="hash")
@click.argument("value")
def hash_value(value: str) -> None:
    """Print the hash of VALUE by every key in force, the current one first: what to look for in the lake.

    VALUE is the text as PostgreSQL prints it; `-` reads it from standard input, which leaves it out of the
    history of the shell.

    \b
    Example:
      printf %s ada@example.org | omnisupport-ingest pii hash -

    Exit code: 0 done, 2 usage or settings, or no key.
    """
    text = _argument(value)
    for key in keys_in_force(open_settings().pii_keys).all:
        click.echo(key.hash_of(text))


@pii.command()
@click.argument("value")
def token(value: str) -> None:
    """Print the token that stands for VALUE (`-`: read from standard input). Creates no new token.

    \b
    Example:
      printf %s ada@example.org | omnisupport-ingest pii token -

    Exit code: 0 done, 1 it has no token, 2 usage or settings, 3 no home or the map is damaged.
    """
    known_token = open_workspace().tokens.token_of(_argument(value))
    if known_token is None:
        raise UnknownToken("That value has no token.", fix="Write it as PostgreSQL prints it.")
    click.echo(known_token)


@pii.command()
@click.argument("token")
def lookup(token: str) -> None:
    """Print the value that TOKEN stands for. Whoever may read the map in the home may do so.

    \b
    Example:
      omnisupport-ingest pii lookup tok_5f0c9b0e8d1a4c3f9e7a6b5d4c3b2a19

    Exit code: 0 done, 1 no such token, 2 usage or settings, 3 no home or the map is damaged.
    """
    click.echo(_value_of(open_workspace(), token))


@pii.command()
@click.argument("token")
def forget(token: str) -> None:
    """Remove TOKEN and its value from the map: its value can no longer be looked up.

    The token stays in the lake, wherever the value was, without a meaning. While landing or
    raw_cdc_staging have the value, a replay gives it another token.

    \b
    Example:
      omnisupport-ingest pii forget tok_5f0c9b0e8d1a4c3f9e7a6b5d4c3b2a19

    Exit code: 0 done, 1 no such token, 2 usage or settings, 3 no home or the map is damaged.
    """
    workspace = open_workspace()
    if not workspace.tokens.forget(token):
        raise _unknown()
    click.echo("Forgotten.")


def _former_policies(settings: Settings, source: str | None) -> list[FormerPolicy]:
    """Return the columns of which sealed windows have values by other policies; none without a home."""
    if home_if_any(settings) is None:
        return []
    # Slow to load, and without a home of no use.
    from omnisupport_ingest.read.former_policies import former_policies

    workspace = open_workspace(settings)
    sources = workspace.contracts.sources() if source is None else (source,)
    return [each for name in sources for each in former_policies(workspace, name)]


def _policy_of(contract: TableContract, name: str) -> str:
    """Return the policy of the contract for its column ``name``."""
    return next(column.pii for column in contract.source_columns if column.name == name)


def _decided(contract: TableContract, name: str) -> str:
    """Return what a person has decided for the column ``name``, to be added to a proposal; empty if
    nothing."""
    (column,) = (each for each in contract.source_columns if each.name == name)
    if column.pii != "keep":
        return f"; it has {column.pii}"
    undecided = not column.pii_note or column.pii_note.startswith(TO_DECIDE)
    return "" if undecided else f"; it has keep: {column.pii_note.rstrip('.')}"


def _contracts(settings: Settings, source: str | None) -> list[TableContract]:
    contracts = contracts_in_force(settings)
    of_source = [each for each in contracts if source in (None, each.source)]
    if not of_source:
        raise click.UsageError(
            f"{source!r} is no source with a contract. Those are: {', '.join(contracts.sources())}."
        )
    return of_source


def _scanned(landed: _Landed | None, contract: TableContract, rows: int) -> tuple[int, Sequence[Proposal]]:
    """Return how many landed events were examined, and the proposals."""
    from omnisupport_ingest.contracts.pii_scan import sampled, scan

    images = [] if landed is None else list(_images(landed, contract, rows))
    return len(images), scan(contract.source_columns, contract.key, sampled(images))


def _landed(settings: Settings, source: str) -> _Landed | None:
    """Return the batches of ``source`` whose data still exists; None if nothing can have landed yet."""
    home = home_if_any(settings)
    if home is None or not has_landed(home.path, source):
        # Looking makes no folder.
        return None
    store = LandingStore(home.landing, source)
    present = Present(store, Removed.in_lake(home.lake, source))
    return _Landed(store, list(filter(present.has_all, store.manifests())))


def _images(landed: _Landed, contract: TableContract, rows: int) -> Iterator[dict[str, Any]]:
    """Yield row images of the last landed events of ``contract``."""
    images = last_events(landed.store, landed.batches, rows, operations=IMAGE_OPS, table=contract.full_name)
    for _, event in images:
        image = read_image(event.after)
        if image is not None:
            yield image


def _document(contract: TableContract, scanned: tuple[int, Sequence[Proposal]]) -> dict[str, Any]:
    looked_at, proposals = scanned
    return {
        "table": f"{contract.source}.{contract.name}",
        "events": looked_at,
        "proposals": [
            {**asdict(each), "has_policy": _policy_of(contract, each.column)} for each in proposals
        ],
    }


def _argument(value: str) -> str:
    return sys.stdin.read().removesuffix("\n") if value == "-" else value


def _value_of(workspace: Workspace, token: str) -> str:
    value = workspace.tokens.value_of(token)
    if value is None:
        raise _unknown()
    return value


def _unknown() -> UnknownToken:
    return UnknownToken(
        "The map of tokens has no such token.",
        fix="Copy it whole, as it stands in the lake: tok_ and 32 digits.",
    )
