"""The job ``review_<source>``: release or discard quarantined events from the UI, as the command does.

It records the decision and judges nothing: the sensor sees that the windows are stale and asks for them.
"""

from enum import Enum

import dagster as dg
from pydantic import Field

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.layers.event_ref import EventRef
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.deciding import decide


class Choice(Enum):
    """What can be decided of an event in quarantine."""

    release = "release"
    discard = "discard"


class ReviewConfig(dg.Config):
    """One decision on some events. All four are required: the ledger keeps who decided what, and why."""

    events: list[str] = Field(
        description="Ids as `omnisupport-ingest quarantine list` shows them, like "
        "1:0/16B3748:4#00ab34cd56ef7890."
    )
    decision: Choice = Field(description="release: accept the events. discard: leave them out for good.")
    reviewer: str = Field(description="Who decides.")
    reason: str = Field(description="Why.")


def build_review_job(source: str) -> dg.JobDefinition:
    """The job of ``source``. A run fails, and records nothing, if any of its events cannot be decided so."""

    @dg.op(
        name=f"decide_{source}",
        description="Checks the decision and records it in the review ledger, in one commit.",
        out=dg.Out(dg.Nothing),
    )
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
        description=f"Release or discard events in quarantine of {source}; the sensor then asks for their "
        "windows.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: source},
    )
    def review() -> None:
        decide_events()

    return review
