"""One capture that follows, alone in its process: ``python -m bench.followed DSN HOME CONTRACTS SECONDS``.

SECONDS: the age at which a batch is cut. Prints a JSON document when the stream is followed, then one for
each batch of it with rows as soon as that is durable and confirmed: ``at``, in seconds since 1970, and
``rows``. Ends at SIGTERM, with ``cpu_seconds`` since the stream was followed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pydantic import SecretStr

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.capture import Capture


def main() -> None:
    dsn, folder, contracts, seconds = sys.argv[1:]
    stop, followed_at = threading.Event(), list[float]()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = Settings(
        _env_file=None, home=Path(folder), source_dsn=SecretStr(dsn), batch_max_seconds=float(seconds)
    )

    def landed(batch: Manifest) -> None:
        at = time.time()
        if batch.stream is None:
            return
        if not followed_at:
            # The first batch of the stream is an idle stretch: nothing has been written yet.
            followed_at.append(_cpu())
            _say({"followed": at})
        if batch.rows:
            _say({"at": at, "rows": batch.rows})

    home = Home.open(settings.home, settings.window_size)
    Capture(settings, home, load_contracts(Path(contracts)), landed).run(None, stop)
    _say({"cpu_seconds": _cpu() - followed_at[0]})


def _cpu() -> float:
    return sum(os.times()[:2])


def _say(document: dict[str, float]) -> None:
    print(json.dumps(document), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
