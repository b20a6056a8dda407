"""One measured capture, alone in its process: ``python -m bench.captured DSN HOME UNTIL CONTRACTS``.

Prints one JSON document: ``seconds`` from opening the first connection to the last batch confirmed
(the start of Python and imports excluded), ``cpu_seconds``, ``peak_mb``, ``rows`` and ``batches``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from pydantic import SecretStr

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.capture import capture_once
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity


def main() -> None:
    dsn, folder, until, contracts_folder = sys.argv[1:]
    settings = Settings(_env_file=None, home=Path(folder), source_dsn=SecretStr(dsn))
    home = Home.open(settings.home, settings.window_size)
    contracts = load_contracts(Path(contracts_folder))
    # A run may go on in a copy of a home, whose slot is a copy too.
    HomeIdentity(home).adopt({})
    # And whose index of landing has to be made again, as it is valid only where it was made.
    LandingStore(home.landing, settings.source).windows()
    landed: list[Manifest] = []
    began, cpu = time.monotonic(), sum(os.times()[:4])
    capture_once(settings, home, contracts, Lsn.parse(until), landed.append)
    seen = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": sum(os.times()[:4]) - cpu,
        "peak_mb": _peak_bytes() / 1e6,
        "rows": sum(batch.rows for batch in landed),
        "batches": len(landed),
    }
    print(json.dumps(seen))  # noqa: T201


def _peak_bytes() -> int:
    """The most memory this process ever had resident."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage would count the parent too, as it was when this process was forked.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
