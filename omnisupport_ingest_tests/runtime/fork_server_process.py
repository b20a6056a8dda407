"""A fork server whose children note what happens to them in files, for tests that end its processes.

``python -m … FOLDER``: listens at ``FOLDER/server.sock`` while ``FOLDER/stale`` is not there. A child appends
to ``FOLDER/told`` who it is and what it was asked; asked to ``wait`` it then waits for ``FOLDER/go``, asked
to ``fail`` it raises. Stopped with ``FOLDER/hurry`` there at its start, it soon interrupts what still runs.
With ``FOLDER/anew`` it removes ``stale`` and runs itself anew where it would have ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omnisupport_ingest.runtime.fork_server import Duties, ForkServer
from omnisupport_ingest_tests.waiting import until


def tell(folder: Path, text: str) -> None:
    with (folder / "told").open("a") as file:
        file.write(f"{text}\n")


def main(folder: Path) -> int:
    def work(request: str) -> int:
        tell(folder, f"{request} {os.getpid()} {os.getppid()} {os.getsid(0)}")
        if request == "wait":
            until((folder / "go").exists)
            tell(folder, "waited")
        if request == "fail":
            raise RuntimeError("as asked")
        return 0

    def interrupt() -> None:
        tell(folder, "interrupted")
        (folder / "go").touch()

    duties = Duties(
        is_current=lambda: not (folder / "stale").exists(),
        work=work,
        after_failure=lambda: tell(folder, "cleaned"),
        interrupt=interrupt,
        patience=0.2 if (folder / "hurry").exists() else 600,
    )
    if not ForkServer(folder / "server.sock", duties).serve():
        return 0
    if (folder / "anew").exists():
        (folder / "stale").unlink()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 3


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
