"""The decision table: read, checked, and refused in words that name line and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.contracts.decision_table import (
    COLUMNS,
    JUDGED,
    SCENARIOS,
    DecisionTableRefused,
    default_decision_table,
    load_decision_table,
)

SHIPPED = default_decision_table().read_text()


def refusal(tmp_path: Path, text: str) -> DecisionTableRefused:
    path = tmp_path / "decisions.csv"
    path.write_text(text)
    with pytest.raises(DecisionTableRefused) as refused:
        load_decision_table(path)
    return refused.value


def test_shipped_table_decides_every_scenario_by_its_detector():
    table = load_decision_table(default_decision_table())
    assert table.decisions.keys() == SCENARIOS.keys()
    assert {name: row.detected_by for name, row in table.decisions.items()} == {
        name: scenario.detector for name, scenario in SCENARIOS.items()
    }


@pytest.mark.parametrize(
    ("scenario", "detector", "action", "review"),
    [
        ("late_arrival", "watermark_gap", "replay_window", False),
        ("duplicate_event", "idempotency_key", "dedupe", False),
        ("duplicate_position", "dedupe_key", "dedupe", False),
        ("out_of_order_event", "sequence_or_ts", "quarantine", True),
        ("crash_after_emit", "recovery_lsn", "replay_and_dedupe", False),
    ],
)
def test_shipped_rows_are_those_that_were_agreed(scenario, detector, action, review):
    row = load_decision_table(default_decision_table()).decisions[scenario]
    assert (row.detected_by, row.action, row.needs_manual_review) == (detector, action, review)


@pytest.mark.parametrize(
    ("old", "new", "problem", "fix"),
    [
        (
            "late_arrival,watermark",
            "tardy_arrival,watermark",
            "line 2: scenario 'tardy_arrival' is not known",
            "late_arrival",
        ),
        ("watermark_gap,", "clock,", "detected_by 'clock' is not what finds late_arrival", "watermark_gap"),
        (",replay_window,false,An event landed when", ",drop,false,x", "'drop' cannot be done", "ingest or"),
        (",true,An event landed later", ",maybe,x", "needs_manual_review is 'maybe'", "true or false"),
        ("scenario,", "case,", "line 1: the columns are case", ",".join(COLUMNS)),
    ],
)
def test_word_that_is_not_known_is_refused_with_its_line_and_the_fix(tmp_path, old, new, problem, fix):
    assert SHIPPED.count(old) == 1
    refused = refusal(tmp_path, SHIPPED.replace(old, new))
    assert problem in refused.problem
    assert "decisions.csv" in refused.problem
    assert fix in refused.fix


def test_scenario_without_a_row_is_refused_with_a_row_to_add(tmp_path):
    without = "".join(line for line in SHIPPED.splitlines(True) if not line.startswith("collision,"))
    refused = refusal(tmp_path, without)
    assert "no row for collision" in refused.problem
    assert "collision,dedupe_key,quarantine,false," in refused.fix


def test_scenario_with_two_rows_is_refused(tmp_path):
    assert "collision has a row already" in refusal(tmp_path, SHIPPED + SHIPPED.splitlines()[5]).problem


def test_missing_file_is_refused_with_the_setting_to_look_at(tmp_path):
    with pytest.raises(DecisionTableRefused) as refused:
        load_decision_table(tmp_path / "nowhere.csv")
    assert "OMNISUPPORT_DECISION_TABLE" in refused.value.fix


@pytest.mark.parametrize("scenario", [name for name in JUDGED if len(SCENARIOS[name].actions) > 1])
def test_another_verdict_is_another_fingerprint_and_another_note_is_not(tmp_path, scenario):
    before = load_decision_table(default_decision_table())
    lines = SHIPPED.splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith(f"{scenario},"))
    cells = lines[number].split(",")
    noted, decided = lines.copy(), lines.copy()
    noted[number] = ",".join([*cells[:4], "another note"])
    cells[2] = next(action for action in SCENARIOS[scenario].actions if action != cells[2])
    decided[number] = ",".join(cells[:4]) + ","
    prints = []
    for name, text in (("noted", noted), ("decided", decided)):
        path = tmp_path / name
        path.write_text("\n".join(text))
        prints.append(load_decision_table(path).fingerprint)
    assert prints[0] == before.fingerprint != prints[1]
