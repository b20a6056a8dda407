"""Every layer of what has landed in a home, as a program: on which Spark it runs, its settings say."""

from __future__ import annotations

from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.recovery.pipeline import run_layers

SOURCE = "support_desk"


def main() -> None:
    settings = Settings(_env_file=None)
    workspace = Workspace.open(settings)
    run_layers(workspace, classic_session(settings), workspace.landing(SOURCE).windows(), SOURCE)


if __name__ == "__main__":
    main()
