"""All layers of everything that has landed from the support desk, in a process that tests kill.

``python -m omnisupport_ingest_tests.recovery.desk_layers`` reads its settings from the environment, as
every process of the platform does, and dies where ``OMNISUPPORT_FAILPOINT`` says.
"""

from __future__ import annotations

from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.recovery.pipeline import run_layers


def main() -> None:
    settings = Settings(_env_file=None)
    workspace = Workspace.open(settings)
    if windows := pending_windows(workspace, settings.source).windows:
        run_layers(workspace, session(settings), windows, settings.source)


if __name__ == "__main__":
    main()
