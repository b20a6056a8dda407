"""``python -m omnisupport_ingest_tests.explore``: what the pinned tests never try, for so many seconds.

The tests draw the same examples every time, so that they are the same for everyone. This draws fresh ones:
first the property tests that need no server and no Spark, in an order drawn by lot, then the proof
(``proof``) with histories that nobody has seen. What fails is printed with the command that runs it again.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
_MOST = 2**31
_FEWEST_SECONDS = 5.0
_DRAWS = re.compile(r"^(from|import) hypothesis\b", re.MULTILINE)


def main() -> int:
    """Exit code 0: nothing was found. 1: something was, and how to run it again is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m omnisupport_ingest_tests.explore",
        description="Property tests and the proof with fresh seeds. Half of the time is for the property "
        "tests; the proof then begins homes until it is over, one at least.",
    )
    parser.add_argument("--seconds", type=float, default=60, help="for how long (60)")
    parser.add_argument("--seeds", type=int, default=6, help="histories in a home of the proof (6)")
    parser.add_argument("--landings", type=int, default=2, help="at how many times something lands there (2)")
    parser.add_argument("--seed", type=int, help="that all others are drawn from (a fresh one)")
    parser.add_argument("--without-proof", action="store_true", help="the property tests alone")
    asked = parser.parse_args()
    seed = secrets.randbelow(_MOST) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    rng, began = Random(seed), time.monotonic()
    for_properties = asked.seconds * (1 if asked.without_proof else 0.5)
    found = False
    while not found and (left := began + for_properties - time.monotonic()) > _FEWEST_SECONDS:
        found = _fails(_properties(rng), left)
    if not asked.without_proof:
        left = max(1.0, began + asked.seconds - time.monotonic())
        found |= _fails(_proof(rng, asked.seeds, asked.landings, left), None)
    print(f"{time.monotonic() - began:.0f} s, {'something was found' if found else 'nothing was found'}")
    return 1 if found else 0


def property_files() -> list[str]:
    """The test files that have property tests, from the folder above this package."""
    paths = sorted(HERE.rglob("test_*.py"))
    return [str(path.relative_to(HERE.parent)) for path in paths if _DRAWS.search(path.read_text())]


def _properties(rng: Random) -> list[str]:
    files = property_files()
    rng.shuffle(files)
    profile = ["--explore", "--hypothesis-profile=explore", f"--hypothesis-seed={rng.randrange(_MOST)}"]
    return ["-m", "pytest", "-x", "-q", "-p", "no:xdist", *profile, *files]


def _proof(rng: Random, seeds: int, landings: int, seconds: float) -> list[str]:
    drawn = ["--start", str(rng.randrange(_MOST)), "--seeds", str(seeds), "--lanes", str(seeds)]
    more = ["--short", "--landings", str(landings), "--seconds", f"{seconds:.0f}", "--until-one-fails"]
    return ["-m", "omnisupport_ingest_tests.proof", *drawn, *more]


def _fails(arguments: list[str], seconds: float | None) -> bool:
    """Run Python so for ``seconds`` at the most (null: to its end); whether it failed until then."""
    command = shlex.join(["python", *arguments])
    print(f"\n{command}", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=HERE.parent, env=os.environ | {"TZ": "UTC"}, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        print("  its time is over; nothing had failed", flush=True)
        return False
    if done.returncode == 0:
        return False
    print(f"  code {done.returncode}. Again: {command}", file=sys.stderr, flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
