"""``tune``: latency against batch size and interval, measured on this machine, and a recommendation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.cli.render import counted, echo_json, heading, say_err, size, span, table
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.durable import replace
from omnisupport_ingest.settings import ENV_FILE, PREFIX, env_with
from omnisupport_ingest.tuning.curve import drawn, picture, require_plots
from omnisupport_ingest.tuning.measuring import Load, Measured, measure, own, refuse_paused, scratch
from omnisupport_ingest.tuning.points import (
    LITERATURE_ROWS,
    LITERATURE_SECONDS,
    Bounds,
    Percentiles,
    Point,
    Setting,
    recommend,
    settings_to_try,
)

_VARIABLE = f"{PREFIX}BATCH_MAX_SECONDS"
_INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (128 * 1024, 1024 * 1024)
_BAR = 40
"""Length of the longest bar, in characters."""


def _measured(command: Any) -> Any:
    """Add the options that say what is measured."""
    for option in reversed(
        (
            click.option(
                "--own",
                is_flag=True,
                help="Measure your own source, data and traffic, with your own capture (see above).",
            ),
            click.option(
                "--yes",
                is_flag=True,
                help="Agree to what --own does without being asked.",
            ),
            click.option(
                "--rate",
                type=click.FloatRange(1),
                default=500.0,
                show_default=True,
                help="Changes per second of the traffic; not with --own.",
            ),
            click.option(
                "--seconds",
                type=click.FloatRange(1),
                default=20.0,
                show_default=True,
                help="How long the traffic of each point lasts. At least twice the longest interval is best.",
            ),
            click.option(
                "--interval",
                "intervals",
                type=click.FloatRange(0, min_open=True),
                multiple=True,
                default=_INTERVALS,
                show_default=True,
                metavar="SECONDS",
                help="Cut batches at this age; repeatable.",
            ),
            click.option(
                "--size",
                "sizes",
                type=click.IntRange(1),
                multiple=True,
                default=_SIZES,
                show_default=True,
                metavar="BYTES",
                help="Cut batches at this size, with the longest interval; repeatable.",
            ),
            click.option(
                "--to",
                "end",
                type=click.Choice(["landing", "dimension"]),
                default="landing",
                show_default=True,
                help="Measure from commit to durable batch, or to the dimension too, which starts Spark and "
                "Dagster.",
            ),
        )
    ):
        command = option(command)
    return command


def _bounded(command: Any) -> Any:
    """Add the options that limit what a setting may cost."""
    for option in reversed(
        (
            click.option(
                "--most-batches",
                type=click.FloatRange(1),
                default=4000.0,
                show_default=True,
                help="Batches an hour that a recommended setting may make.",
            ),
            click.option(
                "--most-files",
                type=click.FloatRange(1),
                default=12_000.0,
                show_default=True,
                help="Files an hour: data files and manifests.",
            ),
            click.option(
                "--most-cpu",
                type=click.FloatRange(1),
                default=None,
                metavar="PERCENT",
                help="Share of one core.  [default: 25, and 150 with --to dimension]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@_measured
@_bounded
@out_option("Where to draw the curve: .svg, or .png with the extra `png`.", default="tune.svg")
@click.option("--write", is_flag=True, help="Set what is recommended in .env; its other lines stay.")
@click.option("--json", "as_json", is_flag=True, help="Print the points and the recommendation as JSON.")
def tune(out: Out, write: bool, as_json: bool, **options: Any) -> int:
    """Measure latency against batch interval and size on this machine, and recommend a setting.

    A PostgreSQL, a slot and a home of its own take the demo's traffic with each setting in turn, in a folder
    beside the home, so on its disk. The home, the source and the slot of the settings are not touched, and
    everything is removed at the end, after Ctrl-C too. No other program should be busy during that time.

    Of the intervals that keep every bound, the rule takes those whose p95 is at most a tenth above the
    lowest, and of these the one with the fewest batches. Sizes show the curve; none is recommended, as with
    little traffic a batch waits for its age. Every event counts with the time since the first commit of its
    batch. What your own platform and traffic take is measured all the time: `report` shows it from commit to
    durable batch and to dimension.

    With --own no traffic is made. Your own capture runs on your own home with each interval in turn, for
    --seconds each, and lands what your programs commit meanwhile, as it always does; nothing is written to
    the source. Stop `up` first, and choose a time at which they write. Sizes are tried if --size names them.

    \b
    Examples:
      omnisupport-ingest tune
      omnisupport-ingest tune --rate 5000 --seconds 30 --interval 1 --interval 10 --write
      omnisupport-ingest tune --own --seconds 120 --interval 1 --interval 5
      omnisupport-ingest tune --to dimension --interval 1 --interval 5 --seconds 60 --out tune.png

    Exit code: 0 recommended, 1 no interval keeps the bounds, or the source of --own is paused, 2 usage or
    settings, 3 no home for --own, 4 PostgreSQL or Java is missing, 5 the source is not set up, 6 the home is
    in use, 7 a service failed or nothing was committed.
    """
    path = out.file("tune.svg")
    if path.suffix not in (".svg", ".png"):
        raise click.UsageError(f"{path.name} ends neither with .svg nor with .png.")
    if path.suffix == ".png":
        require_plots()
    to_dimension = options["end"] == "dimension"
    of_own = bool(options["own"])
    rate, sizes = _traffic_asked(of_own, options)
    load = Load(rate, options["seconds"], to_dimension=to_dimension)
    cpu = (150.0 if to_dimension else 25.0) if options["most_cpu"] is None else options["most_cpu"]
    bounds = Bounds(options["most_batches"], options["most_files"], cpu / 100)
    usual = open_settings().batch_max_bytes
    tried = settings_to_try(options["intervals"], sizes, usual)
    if of_own and not options["yes"]:
        _agree(load, tried)
    points = _measure(load, tried)
    chosen = recommend(points, bounds)
    # No failpoint: a drawing for people; the same command makes it again.
    replace(path, picture(points) if path.suffix == ".png" else drawn(points).encode())
    if write and chosen is not None:
        _write(chosen)
    if as_json:
        echo_json(_document(points, bounds, chosen, path))
    else:
        _show(points, bounds, chosen)
        click.echo(f"\nThe curve is in {path}; open it in a browser or a viewer.")
        if write and chosen is not None:
            click.echo(
                f"{ENV_FILE} has {_VARIABLE}={_value(chosen)} now; `up` takes it in at its next start."
            )
    return FINDINGS if chosen is None else 0


def _traffic_asked(of_own: bool, options: dict[str, Any]) -> tuple[float | None, Sequence[int]]:
    """Return the rate and the sizes to try; with --own, no rate and only the sizes that are named."""
    named = click.get_current_context().get_parameter_source
    given = {name for name in ("rate", "sizes") if named(name) is not click.core.ParameterSource.DEFAULT}
    if not of_own:
        return options["rate"], options["sizes"]
    if "rate" in given:
        raise click.UsageError("--own makes no traffic, so it has no --rate.")
    return None, options["sizes"] if "sizes" in given else ()


def _agree(load: Load, tried: Sequence[Setting]) -> None:
    settings = open_settings()
    refuse_paused(settings, existing_home(settings))
    whole = sum(load.seconds + each.seconds for each in tried)
    say_err(
        f"Your capture of {settings.source} will run with {counted(len(tried), 'setting')} in turn on "
        f"{settings.home}, for about {span(whole)}, and land what is committed meanwhile. Nothing is written "
        "to the source, and no setting is changed."
    )
    click.confirm("Go on?", abort=True, err=True)


def _platform(load: Load) -> AbstractContextManager[Measured]:
    """Return the platform to measure: the user's own, or a new one beside their home."""
    settings = open_settings()
    if load.rate is None:
        return own(settings, existing_home(settings), load, say_err)
    beside = settings.home.absolute().parent
    while not beside.is_dir():
        beside = beside.parent
    return scratch(settings, beside, load, say_err)


def _measure(load: Load, tried: Sequence[Setting]) -> list[Point]:
    """Return the points, measured one after the other, with progress on standard error."""
    whole = sum(load.seconds + each.seconds + 6 for each in tried) + (90 if load.to_dimension else 15)
    say_err(f"Measuring {counted(len(tried), 'point')}, about {span(whole)} …")
    points = []
    with interrupt_on_terminate(), _platform(load) as platform:
        for number, each in enumerate(tried, 1):
            say_err(f"{number} of {len(tried)}: a batch every {_cut(each)} …")
            points.append(measure(platform, each))
            say_err(
                f"  p95 {points[-1].latency.p95:.2f} s, {points[-1].events_per_batch:,.0f} events a batch"
            )
    return points


def _cut(setting: Setting) -> str:
    return size(setting.bytes) if setting.by_size else f"{setting.seconds:g} s"


def _value(point: Point) -> str:
    return f"{point.setting.seconds:g}"


def _write(chosen: Point) -> None:
    """Write the recommended settings to ``.env`` of the working directory; warn if an environment variable
    wins."""
    path = Path(ENV_FILE).resolve()
    try:
        before, mode = path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777
    except FileNotFoundError:
        before, mode = "", 0o600
    # No failpoint: the .env with one line changed, in one step: the old or the new one.
    replace(path, env_with(before, {_VARIABLE: _value(chosen)}).encode())
    path.chmod(mode)
    if (value := os.environ.get(_VARIABLE)) is not None:
        say_err(f"Warning: {_VARIABLE}={value} of the environment wins over {ENV_FILE}. Unset it.")


def _show(points: Sequence[Point], bounds: Bounds, chosen: Point | None) -> None:
    """Print the table, the curve as bars, and the conclusion."""
    far = points[0].dimension is not None
    columns = ["batch every", "events/batch", "p50", "p95", "p99", *(["dim. p50", "p95 ", "p99 "] * far)]
    columns += ["batches/h", "files/h", "CPU", ""]
    rows = [
        [
            _cut(each.setting),
            f"{each.events_per_batch:,.0f}",
            *_seconds(each.landing),
            *(_seconds(each.dimension) if far else ()),
            f"{each.batches_per_hour:,.0f}",
            f"{each.files_per_hour:,.0f}",
            f"{100 * each.cpu:.0f} %",
            _remark(each, bounds, chosen),
        ]
        for each in points
    ]
    table(columns, rows, right=columns[1:-1])
    heading(f"\np95 of the latency, commit to {points[0].end}")
    longest = max(each.latency.p95 for each in points)
    for each in sorted(points, key=lambda each: each.events_per_batch):
        bar = "█" * max(1, round(_BAR * each.latency.p95 / longest))
        click.echo(
            f"{_cut(each.setting):>10} {each.events_per_batch:>9,.0f} events  {bar} {each.latency.p95:.2f} s"
        )
    _show_literature(points)
    if chosen is None:
        click.echo(
            "\nNo interval keeps every bound. The last column says why. Try a longer --interval "
            "or a lower --rate, or allow more: --most-batches, "
            "--most-files, --most-cpu."
        )
        return
    click.echo(
        f"\nRecommended at {chosen.rate:,.0f} changes/s: {_VARIABLE}={_value(chosen)}  "
        f"(p95 {chosen.latency.p95:.2f} s, {chosen.batches_per_hour:,.0f} batches/h)"
    )


def _show_literature(points: Sequence[Point]) -> None:
    """Print where the range from the literature lies for this traffic."""
    rate = points[0].rate
    least, most = (rows / rate for rows in LITERATURE_ROWS)
    low, high = LITERATURE_SECONDS
    click.echo(
        f"Literature: 50,000 to 100,000 events, at this rate a batch every {span(least)} to "
        f"{span(most)}; or every {low / 60:.0f} to {high / 60:.0f} minutes. A change is that late then."
    )


def _seconds(percentiles: Percentiles | None) -> list[str]:
    return (
        ["-"] * 3
        if percentiles is None
        else [f"{each:.2f} s" for each in (percentiles.p50, percentiles.p95, percentiles.p99)]
    )


def _remark(point: Point, bounds: Bounds, chosen: Point | None) -> str:
    if point is chosen:
        return "recommended"
    if point.setting.by_size:
        return "by size"
    return "; ".join(bounds.broken_by(point))


def _document(points: Sequence[Point], bounds: Bounds, chosen: Point | None, curve: Path) -> dict[str, Any]:
    return {
        "points": [
            asdict(each)
            | {
                "events_per_batch": round(each.events_per_batch, 1),
                "batches_per_hour": round(each.batches_per_hour, 1),
                "files_per_hour": round(each.files_per_hour, 1),
                "bounds_broken": list(bounds.broken_by(each)),
            }
            for each in points
        ],
        "bounds": asdict(bounds),
        "recommended": None if chosen is None else {_VARIABLE: chosen.setting.seconds},
        "curve": str(curve),
    }
