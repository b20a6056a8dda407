"""The page ``docs/reference.md``: contracts, source definitions, tables, checks and metadata, from the code.

It is made from the published JSON Schemas, the specifications of the tables, and the definitions that Dagster
loads, with the contracts of the program.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.foreign import parse_json
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    import dagster as dg

    from omnisupport_ingest.lake.table_spec import TableSpec
    from omnisupport_ingest.layers.workspace import Workspace

_HEAD = """\
# Reference

What stands in contracts and source definitions, in the tables of the lake, in Dagster's checks and in its
metadata. This page is made by `python -m omnisupport_ingest.cli.reference`. The [command line](cli.md),
[settings](settings.md) and [metrics](metrics.md) have pages of their own; [contracts](contracts.md) explains
the contracts with examples.
"""

_SCHEMAS = (
    ("Contracts", "contracts/contract.schema.json", "One file for a table, in the folder of contracts."),
    (
        "Source definitions",
        "contracts/source.schema.json",
        "One file for a source; the one that the settings name needs none.",
    ),
)

_SOURCE = "support_desk"
"""The source that is shown: its checks, and the one of its tables that has the most columns."""


def reference_page() -> str:
    """Return the whole of ``docs/reference.md``."""
    parts = [_HEAD]
    for title, schema, says in _SCHEMAS:
        parts.append(f"## {title}\n\n{says} An unknown member is refused.\n\n{_members(schema)}")
    # No failpoint: a folder of this call alone.
    with tempfile.TemporaryDirectory() as folder:
        workspace = _shipped(Path(folder))
        parts += [_tables(workspace), _checks(workspace)]
    parts.append(_metadata())
    return "\n".join(parts)


def _shipped(folder: Path) -> Workspace:
    """Return a new home in ``folder`` with the contracts of the program."""
    from omnisupport_ingest.layers.workspace import Workspace

    settings = Settings(home=folder / "home", _env_file=None)
    home = Home.open(settings.home, settings.window_size)
    return Workspace(settings, home, load_contracts(program_file("contracts/data")))


# --- contracts and source definitions ----------------------------------------------------------------------


def _members(schema: str) -> str:
    document = parse_json(program_file(schema).read_bytes())
    rows = [
        f"| `{path}` | {_values(node)} | {'yes' if required else ''} | {cell(_meaning(node))} |"
        for path, node, required in _below("", document, document)
    ]
    return "| member | values | required | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _meaning(node: Any) -> str:
    """Return what the member means: its title, else its description, which errors show as the fix."""
    return str(node.get("title") or node.get("description", ""))


def _below(path: str, node: Any, document: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield each member below ``node``, in the order of the schema, with references resolved."""
    wanted = set(node.get("required", ()))
    members = dict(node.get("properties", {}))
    if isinstance(node.get("additionalProperties"), dict):
        members["NAME"] = node["additionalProperties"]
    for name, member in members.items():
        if name in ("$schema", "$comment"):
            continue
        found = _resolved(member, document)
        at = f"{path}.{name}" if path else name
        yield at, found, name in wanted
        yield from _below(at, found, document)
        items = found.get("items")
        if isinstance(items, dict):
            yield from _below(f"{at}[]", _resolved(items, document), document)
        for choice in found.get("oneOf", ()) or found.get("anyOf", ()):
            yield from _below(at, _resolved(choice, document), document)


def _resolved(node: Any, document: Any) -> Any:
    """Return ``node`` merged with the definition that it refers to; its own members win."""
    if "$ref" not in node:
        return node
    name = node["$ref"].rpartition("/")[2]
    return {**document["$defs"][name], **{key: value for key, value in node.items() if key != "$ref"}}


def _values(node: Any) -> str:
    if "const" in node:
        return f"`{_json(node['const'])}`"
    if "enum" in node:
        return ", ".join(f"`{_json(each)}`" for each in node["enum"])
    kind = node.get("type", "")
    kinds = kind if isinstance(kind, list) else [kind]
    if not kind:
        kinds = [each.get("type", "text") for each in node.get("oneOf", ()) or node.get("anyOf", ())]
    words = " or ".join(dict.fromkeys(str(each) for each in kinds if each))
    low, high = node.get("minimum"), node.get("maximum")
    return words + (f", {low} to {high}" if low is not None and high is not None else "")


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- tables ------------------------------------------------------------------------------------------------


def _tables(workspace: Workspace) -> str:
    contract = max(workspace.contracts.of_source(_SOURCE), key=lambda each: len(each.columns))
    own = set(contract.column_names)
    specs = (
        workspace.raw(_SOURCE).spec,
        workspace.quarantine(_SOURCE).spec,
        workspace.dimension(contract).spec,
        workspace.history(contract).spec,
    )
    parts = [
        f"## Tables and columns\n\nThe tables that people read, here of the source `{_SOURCE}` and its\n"
        f"table `{contract.name}`. `deduped_events` has the columns of `raw_cdc_staging`; a dimension and a\n"
        "history have those of their contract besides.\n"
    ]
    parts += [_columns(spec, own) for spec in specs]
    return "\n".join(parts)


def _columns(spec: TableSpec, own: set[str]) -> str:
    from omnisupport_ingest.cdc.column_descriptions import column_descriptions

    meaning = column_descriptions(spec.schema.names)
    partitioned = ", ".join(f"`{each}`" for each in spec.partition_by) or "nothing"
    head = f"### {spec.path}\n\n{spec.description} Partitioned by {partitioned}.\n\n"
    rows = [
        f"| `{field.name}` | `{cell(field.dataType.simpleString())}` | {cell(meaning[field.name])} |"
        for field in spec.schema.fields
        if field.name not in own
    ]
    return head + "| column | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


# --- checks and metadata -----------------------------------------------------------------------------------


def _checks(workspace: Workspace) -> str:
    from omnisupport_ingest.definitions import build_definitions

    definitions = build_definitions(workspace)
    found: dict[str, tuple[str, set[str]]] = {}
    on: Mapping[str, set[str]] = defaultdict(set)
    for check in definitions.asset_checks or ():
        for spec in check.check_specs:
            if spec.asset_key.path[0] == _SOURCE:
                on[spec.name].add(_layer(spec.asset_key))
                found[spec.name] = (spec.description or "", on[spec.name])
    rows = [
        f"| `{name}` | {', '.join(sorted(layers))} | {cell(says)} |" for name, (says, layers) in found.items()
    ]
    return (
        "## Checks\n\nThose of a captured source; a contract may ask for `references_kept`,\n"
        "`volume_expected` and `not_quiet` besides ([quality](contracts.md#quality)). None blocks a run.\n\n"
        "| check | of | what it checks |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _layer(key: dg.AssetKey) -> str:
    if key.path[1] == "history":
        return "history"
    return "dimension" if key.path[-1].startswith("dim_") else key.path[-1]


def _metadata() -> str:
    from omnisupport_ingest.defs.metadata import MEANINGS

    rows = [f"| `{name}` | {cell(meaning)} |" for name, meaning in MEANINGS.items()]
    return (
        "## Metadata of materializations\n\n"
        "Numbers are drawn on the page of an asset: Overview, Metadata, Plots.\n\n"
        "| entry | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def cell(text: str) -> str:
    """Return ``text`` for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
