"""What assets and checks are given: the workspace, and Spark through dagster-pyspark."""

from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import session, session_conf


class SparkResource(LazyPySparkResource):
    """dagster-pyspark's lazy session, opened where the platform runs Spark.

    The choice between the warm Spark Connect server and a JVM in this process is made when a step
    first asks, not when definitions load: loading must neither need Java nor freeze an address.
    """

    workspace: dg.ResourceDependency[Workspace]

    def _init_session(self) -> None:
        # dagster-pyspark would build a session from its configuration alone; on Connect a process
        # must name the server in the builder, and which one is known only now.
        if self._spark_session is None:
            self._spark_session = session(self.workspace.settings)


def build_resources(workspace: Workspace) -> dict[str, Any]:
    """The resources of the code location; neither opens anything before it is used."""
    return {
        "workspace": workspace,
        "pyspark": SparkResource(spark_config=session_conf(workspace.settings), workspace=workspace),
    }
