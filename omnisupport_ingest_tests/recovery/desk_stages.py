"""All stages of everything that has landed from the support desk, in a process that tests kill.

``python -m omnisupport_ingest_tests.recovery.desk_stages`` reads its settings from the environment, as
every process of the platform does, and dies where ``OMNISUPPORT_FAILPOINT`` says.
"""

from __future__ import annotations

from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.stages.pending import pending_windows
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest_tests.recovery.pipeline import run_stages


def main() -> None:
    settings = Settings(_env_file=None)
    workspace = Workspace.open(settings)
    if windows := pending_windows(workspace, settings.source).windows:
        run_stages(workspace, session(settings), windows, settings.source)


if __name__ == "__main__":
    main()
