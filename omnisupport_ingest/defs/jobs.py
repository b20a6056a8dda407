"""Jobs: ``ingest_<source>`` takes new batches through every layer, ``replay_<source>`` rebuilds windows,
``audit_<source>`` runs every check.

A run is one process, so it opens Spark once. A run over a range of windows updates each dimension once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import dagster as dg

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.hourly import hourly_schedule
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG


def table_keys(contracts: Contracts, source: str) -> list[dg.AssetKey]:
    """Return the tables of ``source`` in the order in which data flows through them."""
    of_source = contracts.of_source(source)
    return [
        keys.raw_key(source),
        keys.deduped_key(source),
        *(keys.dimension_key(contract) for contract in of_source),
    ]


@dataclass(frozen=True, slots=True)
class JobContent:
    """The ``assets`` that a job of ``source`` makes, and its ``checks``."""

    source: str
    assets: frozenset[dg.AssetKey]
    checks: frozenset[dg.AssetCheckKey]

    @classmethod
    def of_job(cls, source: str, job: dg.JobDefinition) -> JobContent:
        graph = job.asset_layer.asset_graph
        return cls(source, frozenset(graph.materializable_asset_keys), frozenset(graph.asset_check_keys))

    @classmethod
    def of_ingest(
        cls, contracts: Contracts, source: str, log_checks: Sequence[dg.AssetChecksDefinition]
    ) -> JobContent:
        """Return the content of the ingest job that ``build_jobs`` builds from the same arguments."""
        checks = frozenset(key for each in log_checks for key in each.check_keys)
        return cls(source, frozenset(table_keys(contracts, source)), checks)

    def visiting(self, tables: Collection[str]) -> JobContent:
        """Return the content without dimensions, and their checks, of tables that are not in ``tables``.

        Nothing is left out if one of ``tables`` is not in it: a contract was added after these definitions
        were loaded, and the run, which loads them again, may have it.
        """
        visited = set(keys.paths_to_tables(self.source, tables))
        if not visited <= self.assets:
            return self
        idle = self.assets - visited
        return JobContent(
            self.source,
            frozenset(visited),
            frozenset(key for key in self.checks if key.asset_key not in idle),
        )


def build_jobs(
    contracts: Contracts,
    source: str,
    *,
    log_checks: Sequence[dg.AssetChecksDefinition],
    audit_checks: Sequence[dg.AssetChecksDefinition],
) -> dg.Definitions:
    """Return the jobs of ``source``, and the hourly schedule of its audit.

    Checks that only read logs run with every ingest. Checks that read rows or query the server run only in
    the audit, so that a small batch does not pay for them; ``costly_checks`` sees to that in other runs.
    """
    tables = dg.AssetSelection.assets(*table_keys(contracts, source)).without_checks()
    ingest = dg.define_asset_job(
        keys.ingest_job_name(source),
        selection=tables | dg.AssetSelection.checks(*log_checks),
        description=f"New batches of {source}, from landing to the dimensions.",
        executor_def=run_executor,
        tags={keys.TAKE_NEW_TAG: "true", keys.SOURCE_TAG: source},
    )
    replay = dg.define_asset_job(
        keys.replay_job_name(source),
        selection=tables,
        description=f"Rebuilds windows of {source} through every layer, from what has landed. The forward "
        f"cursor does not move. Say why in the tag {keys.REASON_TAG}.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: source},
    )
    audit = dg.define_asset_job(
        keys.audit_job_name(source),
        selection=dg.AssetSelection.checks(*log_checks, *audit_checks),
        description=f"Every check of {source}: the logs, the rows of the dimensions, the server.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: source, BESIDE_TAG: BESIDE},
    )
    hourly = hourly_schedule(
        source, audit.name, 5, f"Runs every check of {source} at minute 5 of every hour."
    )
    return dg.Definitions(jobs=[ingest, replay, audit], schedules=[hourly])
