"""Compares source and dimensions: an asset check of every dimension, its job, and a schedule that is off.

The check queries the source, so no run that makes tables makes it. It fails if a key differs at two
successive LSNs. A table that cannot be compared now, for example under heavy traffic, has no new result, and
its last one counts for another hour. After that the check warns.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, log_settings
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.costly_checks import leaves_out
from omnisupport_ingest.defs.hourly import one_run
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.equality.checking import Checked, CheckOptions, check_source, not_comparable
from omnisupport_ingest.equality.standing import protected_key
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.freshness import in_words, verified_in_words
from omnisupport_ingest.read.verified import (
    EQUAL,
    NOT_COMPARABLE,
    PART_EQUAL,
    Verified,
    write_verified,
)
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, SourceUnavailable

CHECK = "equal_to_source"

STALE_AFTER = timedelta(hours=1)
"""How long it may be impossible to compare a table before the check warns."""

_DEFAULT_MINUTES = 5
"""Interval of the schedule if a person turns it on without setting OMNISUPPORT_VERIFY_MINUTES."""

_KEYS_SHOWN = 20


def build_equality(
    settings: Settings, definition: SourceDefinition, contracts: Sequence[TableContract]
) -> dg.Definitions:
    """Return checks, job and schedule of a captured source, for the tables that can be compared at all."""
    contracts = [each for each in contracts if not protected_key(each)]
    if not contracts:
        return dg.Definitions()
    checks = _checks(definition, contracts)
    job = dg.define_asset_job(
        _job_name(definition.name),
        selection=dg.AssetSelection.checks(checks),
        description=f"Compares the dimensions of {definition.name} with their source at one LSN, by "
        "checksums of key ranges.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: definition.name, BESIDE_TAG: BESIDE},
    )
    return dg.Definitions(
        asset_checks=[checks], jobs=[job], schedules=[_schedule(settings, definition.name, job.name)]
    )


def _job_name(source: str) -> str:
    return f"verify_{source}"


def _checks(definition: SourceDefinition, contracts: Sequence[TableContract]) -> dg.AssetChecksDefinition:
    by_asset = {keys.dimension_key(contract): contract for contract in contracts}

    @dg.multi_asset_check(
        name=f"equal_{definition.name}",
        specs=[
            dg.AssetCheckSpec(
                CHECK,
                asset=asset,
                description="Whether the dimension has the rows of its source at one LSN, by counts and "
                "checksums of key ranges that both sides work out.",
            )
            for asset in by_asset
        ],
        can_subset=True,
    )
    @unquoted
    def equal_to_source(
        context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
    ) -> Iterator[dg.AssetCheckResult]:
        if leaves_out(context, f"It asks the source: {_job_name(definition.name)} compares."):
            return
        chosen = [by_asset[key.asset_key] for key in context.selected_asset_check_keys]
        for checked in _checked(workspace, definition, chosen):
            context.log.info(f"{checked.contract.name}: {checked.note.state}: {checked.note.why}.")
            result = _result(checked, datetime.now(UTC))
            if result is not None:
                yield result

    return equal_to_source


def _checked(
    workspace: Workspace, definition: SourceDefinition, contracts: Sequence[TableContract]
) -> list[Checked]:
    own = Workspace.open(log_settings(workspace.settings, definition))
    names = tuple(contract.name for contract in contracts)
    try:
        return check_source(own, CheckOptions(names, own.settings.verify_rows))
    except SourceUnavailable as error:
        why = f"the source does not answer: {error.problem}"
    except PreflightFailed as error:
        # For example, no slot is free: that is no fault of the tables, and may soon be over.
        why = f"the source is not set up for it: {error.problem}"
    found = [not_comparable(own, each, why) for each in contracts]
    for each in found:
        write_verified(own.home, each.contract, each.note)
    return found


def _result(checked: Checked, now: datetime) -> dg.AssetCheckResult | None:
    """Return the result of a check; None if the table was not compared and that is no reason to warn yet."""
    note, contract = checked.note, checked.contract
    through = note.through
    if note.state == NOT_COMPARABLE and not _waits_long(note, contract, now):
        return None
    metadata: dict[str, dg.MetadataValue] = {
        "state": dg.MetadataValue.text(note.state),
        "rows_compared": dg.MetadataValue.int(note.rows),
        "rows_read_at_source": dg.MetadataValue.int(note.read),
        "keys_changed_since_left_out": dg.MetadataValue.int(note.left_out),
        "keys_differing": dg.MetadataValue.int(note.differing),
        "seconds": dg.MetadataValue.float(note.seconds),
    }
    if through is not None:
        metadata["verified_through_lsn"] = dg.MetadataValue.text(f"{through.lsn} of epoch {through.epoch}")
        metadata["verified_through"] = dg.MetadataValue.timestamp(through.at)
    personal = any(contract.column(name).personal for name in contract.key)
    if checked.differing is not None and checked.differing.keys and not personal:
        shown = [", ".join(key) for key in checked.differing.keys[:_KEYS_SHOWN]]
        metadata["keys"] = dg.MetadataValue.json(shown)
    return dg.AssetCheckResult(
        asset_key=keys.dimension_key(contract),
        check_name=CHECK,
        passed=note.state in (EQUAL, PART_EQUAL) and not note.differs,
        severity=dg.AssetCheckSeverity.ERROR if note.differs else dg.AssetCheckSeverity.WARN,
        description=_description(note, contract, now),
        metadata=metadata,
    )


def _waits_long(note: Verified, contract: TableContract, now: datetime) -> bool:
    # With a delayed merge a table cannot be compared until the merge is due.
    waits = contract.delayed_merge.max_age if contract.delayed_merge is not None else timedelta(0)
    return note.waits_since is not None and now - note.waits_since > STALE_AFTER + waits


def _description(note: Verified, contract: TableContract, now: datetime) -> str:
    known = f"{_capital(verified_in_words(note, now) or note.why)}."
    if note.differs:
        return f"{known} Read them again: omnisupport-ingest verify {contract.source} --repair"
    if note.state == NOT_COMPARABLE and note.waits_since is not None:
        return (
            f"Not compared with the source for {in_words((now - note.waits_since).total_seconds())}. {known}"
        )
    return known


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _schedule(settings: Settings, source: str, job: str) -> dg.ScheduleDefinition:
    minutes = settings.verify_minutes or _DEFAULT_MINUTES
    on = dg.DefaultScheduleStatus.RUNNING
    off = dg.DefaultScheduleStatus.STOPPED

    @dg.schedule(
        name=f"verify_{source}_often",
        job_name=job,
        cron_schedule="0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
        default_status=off if settings.verify_minutes is None else on,
        description=f"Compares the dimensions of {source} with their source every {minutes} minutes. Off "
        "until OMNISUPPORT_VERIFY_MINUTES is set, or somebody turns it on.",
    )
    def verify_often(
        context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.RunRequest | dg.SkipReason:
        return one_run(context, workspace, source, job)

    return verify_often
