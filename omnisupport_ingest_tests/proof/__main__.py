"""``python -m omnisupport_ingest_tests.proof``: so many seeds, home by home."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from pyspark.sql import SparkSession

from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.jvm import start_for_small_work
from omnisupport_ingest_tests.proof.run import ProofFailed, prove
from omnisupport_ingest_tests.proof.short import Part, short
from omnisupport_ingest_tests.proof.story import STAGES, Story, draw
from omnisupport_ingest_tests.proof.tally import LEFT_OPEN, Tally
from omnisupport_ingest_tests.proof.ways import LANES as WAY_LANES
from omnisupport_ingest_tests.proof.ways import WAYS, prove_ways
from omnisupport_ingest_tests.storage.s3_server import in_a_bucket

LANES = 100
"""Histories that share a home, by default: many in one Spark job, few enough to read what failed."""


def main() -> int:
    """Exit code 0: nothing differs. 1: something does, and how to run that home again is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m omnisupport_ingest_tests.proof",
        description="Random histories by random schedules through the production layers, every layer "
        "compared with the oracle. Seeds that share a home are proved together.",
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many histories (200)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"histories per home ({LANES})")
    parser.add_argument("--landings", type=int, help="at how many times something lands (5 to 8, by lot)")
    parser.add_argument("--seconds", type=float, help="go on with the next seeds until so many are over")
    parser.add_argument(
        "--short",
        action="store_true",
        help="each home does a part of what it could, by lot; a way in, for one",
    )
    parser.add_argument("--steps", action="store_true", help="print every step")
    parser.add_argument("--until-one-fails", action="store_true", help="stop at the first home that fails")
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=WAYS,
        metavar="WAY",
        help=f"bring the first {WAY_LANES} histories of each home in by every way, or by these alone: "
        f"{', '.join(WAYS)}",
    )
    parser.add_argument(
        "--bucket", action="store_true", help="keep landing and lake of each home in a bucket of an S3 server"
    )
    parser.add_argument("--keep", type=Path, help="run in this folder and keep what failed there")
    asked = parser.parse_args()
    began, seen, failed = time.monotonic(), Tally(), 0
    with (
        tempfile.TemporaryDirectory(prefix="omnisupport-proof-") as temporary,
        in_a_bucket() if asked.bucket else nullcontext(),
    ):
        root = (asked.keep or Path(temporary)).absolute()
        os.environ.setdefault("TZ", "UTC")
        start_for_small_work()
        spark = classic_session(Settings(home=root / "spark", spark_driver_memory="1g", _env_file=None))
        # Thousands of small plans: finding better ones on the way takes longer than it saves.
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        spark.conf.set("spark.sql.shuffle.partitions", "2")
        for seeds in _homes(asked.start, asked.seeds, asked.lanes, began, asked.seconds):
            started, tally = time.monotonic(), Tally()
            try:
                _prove(seeds, root, spark, asked, tally)
            except Exception as error:
                print(f"  fails; {time.monotonic() - started:.0f} s", flush=True)
                print(_failure(error, seeds, asked), file=sys.stderr, flush=True)
                failed += 1
                if asked.until_one_fails:
                    break
            else:
                print(f"  as the oracle says; {time.monotonic() - started:.0f} s", flush=True)
            finally:
                seen.add(tally)
    print(_summary(seen, time.monotonic() - began))
    if seen.too_many_left_open:
        print(f"Too many {LEFT_OPEN}: {seen.things[LEFT_OPEN]}", file=sys.stderr)
        failed += 1
    if failed:
        print(f"{failed} homes failed; how to run each again is above", file=sys.stderr)
    return 1 if failed else 0


def _prove(seeds: range, root: Path, spark: SparkSession, asked: argparse.Namespace, tally: Tally) -> None:
    """Prove one home, and what it does beside; ``tally`` counts what happens."""
    say = print if asked.steps else _quiet
    some, folder = seeds[:WAY_LANES], root / f"ways-{seeds.start}"
    if asked.ways is not None:
        part = Part(draw(seeds, asked.landings), asked.ways or WAYS)
    else:
        part = short(seeds, asked.landings) if asked.short else Part(draw(seeds, asked.landings))
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {_said(part)}", flush=True)
    if part.story is not None:
        prove(part.story, root / f"{seeds.start}", spark, say=say, tally=tally)
    prove_ways(some, folder, spark, part.ways, tally=tally, extent=part.extent)


def _said(part: Part) -> str:
    story = part.story
    if story is None:
        return f"by {', '.join(part.ways)}"
    stages = "" if story.stages is STAGES else f", {', '.join(story.stages) or 'no stage but the last'}"
    said = f"{_kind(story.order)}, epochs {story.epochs}, batches {len(story.batches)}"
    return f"{said}, {_hindered(story)}{stages}"


def _homes(start: int, count: int, lanes: int, began: float, seconds: float | None) -> Iterator[range]:
    """The seeds of each home; with ``seconds``, which have run since ``began``, of one home more and more."""
    for first in range(start, start + count, lanes):
        yield range(first, min(first + lanes, start + count))
    first = start + count
    while seconds is not None and time.monotonic() - began < seconds:
        yield range(first, first + lanes)
        first += lanes


def _kind(order: str | None) -> str:
    return "a stream" if order is None else f"files ordered by {order}"


def _hindered(story: Story) -> str:
    gaps = ["a gap" if each.back is None else "a gap for a while" for each in story.gaps] or ["no gap"]
    parts = "partitions as usual" if story.cut.rows_of_a_part is None else "several partitions"
    kernels = "one event after the other" if story.cut.few else "by whole columns"
    said = f"policies {story.protecting}, {parts}"
    return f"{gaps[0]}, {said}, Arrow batches of {story.cut.rows_of_a_batch}, {kernels}"


def _failure(error: Exception, seeds: range, asked: argparse.Namespace) -> str:
    lines = [str(error) if isinstance(error, ProofFailed) else traceback.format_exc()]
    found = error.differences if isinstance(error, ProofFailed) else []
    touched = sorted({each.lane for each in found if each.lane is not None})
    if touched:
        lines.append(f"Histories that differ: seed {', '.join(map(str, touched))}")
    command = "python -m omnisupport_ingest_tests.proof --steps"
    command += f" --landings {asked.landings}" if asked.landings else ""
    command += " --short" if asked.short else ""
    command += "" if asked.ways is None else " ".join([" --ways", *asked.ways])
    command += " --bucket" if asked.bucket else ""
    lines.append(f"Again: {command} --start {seeds.start} --seeds {len(seeds)} --lanes {asked.lanes}")
    return "\n".join(lines)


def _summary(seen: Tally, seconds: float) -> str:
    lines = [
        f"{seen.histories} histories in {seen.homes} homes, {seen.copies} landed events, "
        f"{seen.comparisons} comparisons of every layer, {seconds:.0f} s"
    ]
    for title, names in seen.groups.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<40}{seen.things[name]:>9}" for name in names]
    lines.append(f"Unresolved though the oracle knows them: {seen.things[LEFT_OPEN]} {LEFT_OPEN}")
    if seen.never:
        lines.append(f"Nothing was seen of: {', '.join(seen.never)}")
    return "\n".join(lines)


def _quiet(_: str) -> None:
    """Nothing is said of single steps."""


if __name__ == "__main__":
    sys.exit(main())
