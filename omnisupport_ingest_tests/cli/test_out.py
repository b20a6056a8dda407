"""``--out``: one rule says whether it is a file or a folder, in every command that has the option."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.cli.out import Out
from omnisupport_ingest_tests.cli.command import command


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("rows.csv", "rows.csv"),
        ("rows", "rows/tickets.csv"),
        ("v1.2/", "v1.2/tickets.csv"),
        ("there.d", "there.d/tickets.csv"),
        ("README", "README"),
    ],
    ids=["suffix", "no suffix", "slash", "a folder with a suffix", "a file without one"],
)
def test_one_rule_says_what_is_a_folder(tmp_path: Path, text: str, written: str) -> None:
    (tmp_path / "there.d").mkdir()
    (tmp_path / "README").write_text("older")
    path = Out.of(f"{tmp_path}/{text}").file("tickets.csv")
    assert path == tmp_path / written
    assert path.parent.is_dir()


def test_several_files_need_a_folder(tmp_path: Path) -> None:
    names = ["tickets.csv", "agents.csv"]
    assert Out.of(f"{tmp_path}/then").files(names) == [tmp_path / "then" / name for name in names]
    with pytest.raises(click.UsageError, match=r"2 files are to be written.*like .*/then/\."):
        Out.of(f"{tmp_path}/then.csv").files(names)


def test_the_folder_around_it_has_to_exist(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for text in ("nowhere/then", "nowhere/then.csv"):
        with pytest.raises(click.UsageError, match="nowhere is not a folder"):
            Out.of(f"{tmp_path}/{text}").file("tickets.csv")
    with pytest.raises(click.UsageError, match="taken is a file, not a folder"):
        Out.of(f"{tmp_path}/taken/").file("tickets.csv")


def test_what_is_no_file_is_not_replaced_and_a_link_names_the_file_behind_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "tickets.csv")
    for text in (str(pipe), f"{pipe}/", str(tmp_path / "tickets.csv"), f"{tmp_path}/", os.devnull):
        with pytest.raises(click.UsageError, match="is a pipe or a device"):
            Out.of(text).file("tickets.csv")
    (tmp_path / "data").mkdir()
    link, target = tmp_path / "latest", tmp_path / "data" / "today.csv"
    link.symlink_to(target)
    target.write_text("older")
    assert Out.of(str(link)).file("tickets.csv") == target
    target.unlink()
    (tmp_path / "data").rmdir()
    with pytest.raises(click.UsageError, match="data is not a folder"):
        Out.of(f"{link}").file("tickets.csv")
    there = tmp_path / "there.csv"
    there.mkdir()
    (there / "tickets.csv").mkdir()
    with pytest.raises(click.UsageError, match=r"tickets\.csv is a folder, not a file"):
        Out.of(str(there)).file("tickets.csv")


def test_every_command_with_the_option_goes_by_the_rule() -> None:
    options = dict(_out_options(cli, ()))
    named = {"export", "as-of", "report", "tune", "checkpoint export", "contracts new", "doctor"}
    assert named <= set(options)
    for name, option in options.items():
        assert isinstance(option.type(str(Path(__file__).parent)), Out), name


def _out_options(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _out_options(below, (*path, name))
    for each in command.params:
        if isinstance(each, click.Option) and {"--out", "--archive"} & set(each.opts):
            yield " ".join(path), each


@pytest.mark.parametrize(
    "arguments", [("export", "tickets"), ("export", "tickets", "--format", "csv"), ("checkpoint", "export")]
)
def test_a_place_that_has_to_be_named_is_asked_for(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.code == 2 and "Missing option '--out'" in done.err
