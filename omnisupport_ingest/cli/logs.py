"""``logs``: the last lines or errors of the home's services, and new ones as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.render import say_err
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.runtime.service_logs import (
    Entries,
    LogFollower,
    ServiceLog,
    last_errors,
    last_lines,
    service_logs,
)

if TYPE_CHECKING:
    from pathlib import Path


_LOOK_SECONDS = 0.5
_ELSEWHERE = (
    "Services that are started one by one (`serve`, `capture`) log to whoever starts them: "
    "`journalctl --unit 'omnisupport-*'`, `docker compose logs`, or `kubectl logs omnisupport-0 "
    "--all-containers`."
)
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


@click.command()
@click.option(
    "--component", "components", multiple=True, metavar="NAME", help="Only this component; repeatable."
)
@click.option("--errors", is_flag=True, help="Only errors, each with its traceback, causes and fix.")
@click.option(
    "--lines",
    "count",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="The last N lines of each component; with --errors, the last N errors.",
    metavar="N",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as one JSON document.")
def logs(components: tuple[str, ...], errors: bool, count: int, follow: bool, as_json: bool) -> None:
    """Show what the services have logged: the last lines of each, or the errors.

    The services are those that `up`, `demo` and the passes start. Every line begins with its component.
    Lines of a component are in order; the component that wrote last comes last.

    \b
    capture              capture of the home's own log; capture-NAME, of another one
    spark-connect        the Spark server
    dagster-daemon, dagster-code-server, dagster-webserver
    dagster-runs         output of the runs that the sensor starts
    postgres             the service that keeps the embedded server running
    postgres-server      the embedded server's own log
    workload             changes to the demo's database
    land                 the watcher of the inbox
    ingest-run           runs of the last `sync`, `materialize`, `rebuild` or `replay`

    A `capture` that you started in a terminal logs there, not here; `source status` has its last error. The
    UI has the logs of the sensor's runs, with each run.

    \b
    Examples:
      omnisupport-ingest logs --component capture --component dagster-daemon --follow
      omnisupport-ingest logs --errors --lines 3

    Exit code: 0 done, also if there are no logs yet; 2 usage, an unknown component; 3 no home.
    """
    home = existing_home(open_settings())
    all_logs = service_logs(home.path)
    names = sorted(log.component for log in all_logs)
    for name in components:
        if name not in names:
            listed = f"There are: {', '.join(names)}." if names else f"There are no logs yet. {_ELSEWHERE}"
            raise click.UsageError(f"There is no log of a component {name!r}. {listed}")
    if not all_logs:
        say_err(
            f"There are no logs in {home.path / 'logs'} yet. The services of "
            "`omnisupport-ingest up` and `omnisupport-ingest demo` write them, and the runs of `sync` and "
            f"`materialize`. {_ELSEWHERE}"
        )
    chosen = [log for log in all_logs if not components or log.component in components]
    width = max((len(log.component) for log in chosen), default=0)
    show = _print_json if as_json else partial(_print, width=width)
    # Following begins before the last lines are read, so a line may be shown twice but is never missed.
    with ExitStack() as opened:
        following = _Following(home.path, components, errors, show, opened, chosen) if follow else None
        some = False
        for log in chosen:
            for line in _last(log, count, errors):
                some = True
                show(log.component, line)
        if chosen and errors and not some and not follow:
            say_err("There are no errors in " + ", ".join(log.component for log in chosen) + ".")
        if following is not None:
            with stop_on_signal() as stop:
                while not stop.wait(_LOOK_SECONDS):
                    following.look()


def _last(log: ServiceLog, count: int, errors: bool) -> Iterable[str]:
    if count == 0:
        return ()
    return chain.from_iterable(last_errors(log, count)) if errors else last_lines(log, count)


class _Following:
    """The followed logs, including those that appear later."""

    def __init__(
        self,
        home: Path,
        components: tuple[str, ...],
        errors: bool,
        show: Callable[[str, str], None],
        opened: ExitStack,
        logs: list[ServiceLog],
    ) -> None:
        self._home, self._components, self._errors = home, components, errors
        self._show, self._opened = show, opened
        self._followed: dict[str, tuple[LogFollower, Entries]] = {}
        for log in logs:
            self._add(log, from_start=False)

    def look(self) -> None:
        """Print what was written since the last look."""
        for log in service_logs(self._home):
            if log.component not in self._followed and not self._components:
                self._add(log, from_start=True)
        for component, (follower, entries) in self._followed.items():
            lines = follower.new_lines()
            for line in _errors(entries, lines) if self._errors else lines:
                self._show(component, line)

    def _add(self, log: ServiceLog, *, from_start: bool) -> None:
        follower = self._opened.enter_context(LogFollower(log, from_start=from_start))
        self._followed[log.component] = (follower, Entries())


def _errors(entries: Entries, lines: Iterable[str]) -> Iterator[str]:
    quiet = True
    for line in lines:
        quiet = False
        yield from chain.from_iterable(entries.errors(line))
    if quiet:
        # An entry counts as complete when nothing has followed it for one look: until then, the next line may
        # belong to it.
        yield from chain.from_iterable(entries.rest())


def _print_json(component: str, line: str) -> None:
    click.echo(json.dumps({"component": component, "line": line}, ensure_ascii=False))


def _print(component: str, line: str, width: int) -> None:
    colour = _COLOURS[sum(component.encode()) % len(_COLOURS)]
    click.echo(f"{click.style(f'{component:<{width}} |', fg=colour)} {line}")
