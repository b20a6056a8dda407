"""The demo's waiting, which ends at once where nothing would ever come, and the line that it ends with."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from rich.console import Console

from omnisupport_ingest.cli import demo_pipeline
from omnisupport_ingest.cli.demo import say_what_to_do_next
from omnisupport_ingest.cli.demo_pipeline import DemoStuck
from omnisupport_ingest.cli.demo_run import Demo
from omnisupport_ingest.demo.domain import Domain
from omnisupport_ingest.demo.domains import DOMAINS
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.stages.story import SOURCE, Change, Commit, Story


def test_a_hole_ends_the_demo_until_a_new_epoch_has_begun(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for lsn in (10, 20, 30):
        batch = story.land(Commit(lsn, 1, [Change("c", lsn, {"title": "one", "body": None})]))
        if lsn == 20:
            gone = story.store.folder / "manifests" / f"{batch.batch_id}.json"
    assert demo_pipeline._pending(story.workspace, SOURCE).landed == 3
    gone.unlink()
    with pytest.raises(DemoStuck, match="The chain of epoch 1 is broken") as raised:
        demo_pipeline._pending(story.workspace, SOURCE)
    assert "capture --new-epoch" in raised.value.fix
    story.store.begin_epoch("a batch is missing", None)
    assert demo_pipeline._pending(story.workspace, SOURCE).landed == 1


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS.keys())
def test_the_last_line_reads_the_table_in_any_shell(tmp_path: Path, domain: Domain[Any]) -> None:
    settings = Settings(home=tmp_path / "my home", source=domain.name, _env_file=None)
    home, said = Home.open(settings.home, WindowSize(60)), io.StringIO()
    write_deltalake(home.lake / domain.name / f"dim_{domain.shown}", pa.table({"n": ["printer on fire"]}))
    with Supervisor(home) as supervisor:
        console = Console(file=said, width=40)
        say_what_to_do_next(Demo(settings, home, supervisor, console, changes=120, seed=1, again=""))
    line = said.getvalue().rstrip().splitlines()[-1].partition("Query it: ")[2]
    done = subprocess.run(
        ["/bin/sh", "-c", line], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert "printer on fire" in done.stdout, done.stderr
