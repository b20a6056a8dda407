"""The job ``review_<source>``: releases or discards quarantined events from the UI, as the command does.

It only records the decision; the sensor then finds the windows stale and requests runs of them.
"""

from enum import Enum

import dagster as dg
from pydantic import Field

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.runtime.dagster_home import BESIDE_TAG, REVIEW


class Choice(Enum):
    """A decision on an event in quarantine."""

    release = "release"
    discard = "discard"


class ReviewConfig(dg.Config):
    """One decision on some events. All fields are required: the ledger keeps who decided what, and why."""

    events: list[str] = Field(
        description="Ids as `omnisupport-ingest quarantine list` shows them, like "
        "1:0/16B3748:4#00ab34cd56ef7890."
    )
    decision: Choice = Field(description="release: accept the events. discard: leave them out for good.")
    reviewer: str = Field(description="Who decides.")
    reason: str = Field(description="Why.")


def build_review_job(source: str) -> dg.JobDefinition:
    """Return the job of ``source``. A run fails and records nothing if the decision is not allowed for one of
    its events."""

    @dg.op(
        name=f"decide_{source}",
        description="Checks the decision and records it in the review ledger, in one commit.",
        out=dg.Out(dg.Nothing),
    )
    @unquoted
    def decide_events(
        context: dg.OpExecutionContext, config: ReviewConfig, workspace: dg.ResourceParam[Workspace]
    ) -> None:
        decided = decide(
            workspace,
            source,
            config.decision.value,
            [EventRef.parse(each) for each in config.events],
            reviewer=config.reviewer,
            why=config.reason,
        )
        context.add_output_metadata(
            {
                "recorded": dg.MetadataValue.int(len(decided.recorded)),
                "decided_before": dg.MetadataValue.int(len(decided.unchanged)),
                "still_open_at_the_same_positions": dg.MetadataValue.text(
                    ", ".join(str(each.event) for each in decided.beside) or "none"
                ),
                "stale_windows": dg.MetadataValue.text(", ".join(decided.windows) or "none"),
            }
        )

    @dg.job(
        name=keys.review_job_name(source),
        description=f"Release or discard events in quarantine of {source}; the sensor then requests runs of "
        "their windows.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: source, BESIDE_TAG: REVIEW},
    )
    def review() -> None:
        decide_events()

    return review
