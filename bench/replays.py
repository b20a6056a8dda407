"""Measure the replay of many windows in one run, beside one run per window, estimated from some of them (P8).

Every window has a late event, as is why people replay. Single windows are replayed without news, too: that
touches no row of the dimension.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from statistics import median

import click

from bench.homes import many_tables, this_minute
from bench.report import write_result

REACH = 20.0


@click.command()
@click.option("--windows", default=500, show_default=True)
@click.option("--singles", default=20, show_default=True, help="Runs of one window that are measured.")
@click.option("--events", default=200, show_default=True, help="Events of a window.")
@click.option("--repeats", default=1, show_default=True, help="Rounds.")
@click.option("--seed", default=1, show_default=True)
def main(windows: int, singles: int, events: int, repeats: int, seed: int) -> None:
    """Measure replays of windows of a minute, and print the figures."""
    start = this_minute() - timedelta(minutes=windows + 5)
    took: dict[str, list[float]] = {"together": [], "single": [], "without news": []}
    with (
        tempfile.TemporaryDirectory(prefix="bench-replays-") as folder,
        many_tables(Path(folder) / "of", 1, window="minutes:1", first_window=start, seed=seed) as home,
    ):
        home.stream.table = "tickets_000"
        moments = [start + timedelta(minutes=number) for number in range(windows)]
        keys = [home.workspace.grid.key_of(each, each) for each in moments]
        for number in range(windows):
            home.stream.mixed(events, start + timedelta(minutes=number)) if number else home.land(
                0, events, start
            )
        first = home.run(keys[0], keys[-1])
        click.echo(f"  {windows} windows of {events} events made in {first:.0f} s", err=True)
        for number in range(1, repeats + 1):
            step = windows // singles
            took["without news"] += [home.run(key, key, replay=True) for key in keys[::step][:singles]]
            for place in range(0, windows, step)[:singles]:
                home.stream.mixed(1, moments[place])
                took["single"].append(home.run(keys[place], keys[place], replay=True))
            for moment in moments:
                home.stream.mixed(1, moment)
            took["together"].append(home.run(keys[0], keys[-1], replay=True))
            click.echo(
                f"  {number}/{repeats}: together {took['together'][-1]:.1f} s, "
                f"one of them {median(took['single']):.1f} s, "
                f"without news {median(took['without news']):.1f} s",
                err=True,
            )
    extrapolated = windows * median(took["single"])
    ratio = extrapolated / median(took["together"])
    click.echo(f"replay of {windows} windows in one run   {median(took['together']):8.1f} s")
    click.echo(f"in runs of one, estimated from {singles}   {extrapolated:8.1f} s")
    click.echo(f"  ratio {ratio:.1f} (reach {REACH}): {'met' if ratio >= REACH else 'NOT MET'}")
    write_result("replays", {"windows": windows, "events": events, "seconds": took, "ratio": ratio})


if __name__ == "__main__":
    main()
