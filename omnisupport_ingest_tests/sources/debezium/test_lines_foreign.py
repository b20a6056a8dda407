"""Lines of events that others wrote: an event that lands and can be judged, or the line and its fault."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.load import Contracts
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.events import Events
from omnisupport_ingest.sources.debezium.faults import FileRefused, LineFault
from omnisupport_ingest.sources.debezium.handling import REFUSE, Handling
from omnisupport_ingest.sources.debezium.images import NOT_WHOLE
from omnisupport_ingest.sources.debezium.land import land
from omnisupport_ingest.sources.debezium.records import read_line
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import (
    DEEP,
    IN_THE_PLACE,
    ODD_VALUES,
    Raw,
    in_time,
    mutated,
    places,
    text_of,
    with_value_at,
)
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, STRING_MODES, STRINGS, Recorder
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope, flat


def recorded(path: Path) -> Iterator[Any]:
    """Of each table and operation the first line."""
    seen: set[object] = set()
    for line in path.read_text().splitlines():
        document = json.loads(line)
        value = document.get("value", document) or {}
        payload = value.get("payload", value)
        kind = str(payload.get("op")), str(payload.get("source", {}).get("table"))
        if kind not in seen:
            seen.add(kind)
            yield document


FLAT = flat("u", customer(1, updated_at="2026-01-01T00:00:00Z"), lsn=5, sequence='["1","2"]', txId="7")
RECORDED = {
    "defaults": ([*recorded(DEFAULTS), envelope("c", customer(1), order=1), FLAT], Handling()),
    "strings": ([*recorded(STRINGS)], STRING_MODES),
}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def contracts(recorder: Recorder) -> Contracts:
    return recorder.workspace.contracts


def landed(line: bytes, contracts: Contracts, handling: Handling) -> LandedEvent | None:
    """The event in ``line`` as it goes into a data file, read and judged as the layers would."""
    change = read_line(line)
    if not isinstance(change, Change):
        return None
    events = Events(tuple(contracts), handling)
    event = events.event(change, 1, 1, line.decode())
    assert events_table([event]).num_rows == 1
    contract = events.contract_of(event)
    for image in (event.before, event.after):
        columns = read_image(image)
        assert (columns is None) == (image is None)
        if contract is not None and columns is not None:
            RowRules(contract).broken(columns)
    return event


@pytest.mark.parametrize("which", RECORDED)
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_line_is_an_event_or_a_fault(contracts: Contracts, which: str, data: st.DataObject) -> None:
    documents, handling = RECORDED[which]
    line = data.draw(mutated(documents))
    with in_time():
        try:
            landed(line, contracts, handling)
        except LineFault as fault:
            assert fault.problem and fault.fix and len(fault.problem) < 500


@pytest.mark.parametrize(
    "which",
    # Lines with schemas have hundreds of places each.
    ["defaults", pytest.param("strings", marks=pytest.mark.full)],
)
def test_a_value_of_another_kind_at_any_place_is_an_event_or_a_fault(
    contracts: Contracts, which: str
) -> None:
    documents, handling = RECORDED[which]
    for document in documents:
        for keys in places(document):
            for value in ([], True):
                try:
                    landed(text_of(with_value_at(document, keys, value)).encode(), contracts, handling)
                except LineFault as fault:
                    assert fault.problem and fault.fix and len(fault.problem) < 500, keys


NOT_LONG = [each for each in ODD_VALUES if len(text_of(each)) <= 10_000]


@pytest.mark.parametrize("which", RECORDED)
def test_any_value_of_any_column_is_an_event_or_a_fault(contracts: Contracts, which: str) -> None:
    documents, handling = RECORDED[which]
    ended = 0
    for document in documents:
        value = document.get("value", document) or {}
        payload = value.get("payload", value)
        row = payload.get("after") if isinstance(payload, dict) else None
        if not isinstance(row, dict) or payload["source"]["table"] != "all_types":
            continue
        for name in list(row):
            kept = row[name]
            # Lines with schemas are long: there each column gets a part of the values, every column another.
            for odd in NOT_LONG if which == "defaults" else NOT_LONG[len(name) % 5 :: 5]:
                row[name] = odd
                with in_time():
                    try:
                        landed(text_of(document).encode(errors="surrogatepass"), contracts, handling)
                    except LineFault:
                        ended += 1
            row[name] = kept
        break
    assert ended


LONG = "9" * 5000
NESTED = "[" * DEEP + "]" * DEEP

FAULTS: dict[str, Any] = {
    "a value": envelope("c", customer(1, attrs=Raw(NESTED))),
    "the sequence": {
        **envelope("c", customer(1)),
        "source": {**envelope("c", None)["source"], "sequence": NESTED},
    },
    "a key": {"key": {"id": Raw(NESTED)}, "value": envelope("c", customer(1))},
    "a schema": {"schema": Raw(NESTED), "payload": envelope("c", customer(1))},
    "a number that is no LSN": {
        **envelope("c", customer(1)),
        "source": {**envelope("c", None)["source"], "txId": Raw(LONG)},
    },
    "a transaction beyond 64 bits": {
        **envelope("c", customer(1)),
        "source": {**envelope("c", None)["source"], "txId": 2**63},
    },
    "an operation that is a list": {**FLAT, "__op": ["c"]},
    "a float beyond its type": {
        **envelope("c", {"id": 1, "f8": Raw("1e400")}, table="all_types"),
    },
    "money of many digits": envelope("c", {"id": 1, "m": Raw("1e999999999")}, table="all_types"),
    "an interval of many digits": envelope("c", {"id": 1, "iv": f"P{LONG}Y"}, table="all_types"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_file_with_it_is_refused_by_file_and_line(tmp_path: Path, where: str) -> None:
    recorder = Recorder(tmp_path, handling=Handling(odd_lines=REFUSE))
    good = json.dumps(envelope("c", customer(1), order=1)).encode()
    path = recorder.file("odd.jsonl", [good, text_of(FAULTS[where]).encode()])
    with in_time(), pytest.raises(FileRefused) as refused:
        recorder.land(path)
    assert f"{path}, line 2: " in refused.value.problem
    assert recorder.inlet.store.batch_ids() == []


@pytest.mark.parametrize("where", FAULTS)
def test_a_line_with_it_lands_for_quarantine_and_the_others_with_it(tmp_path: Path, where: str) -> None:
    recorder = Recorder(tmp_path)
    good = json.dumps(envelope("c", customer(1), order=1)).encode()
    with in_time():
        landing = recorder.land(recorder.file("odd.jsonl", [good, text_of(FAULTS[where]).encode()]))
    assert landing.tally is not None and landing.tally.odd == 1
    first, odd = recorder.events()
    assert first["moved_from_key"] is None and first["key"]
    assert odd["key"] is None or odd["moved_from_key"] == NOT_WHOLE
    assert odd["envelope"] == text_of(FAULTS[where])


def test_an_old_key_that_cannot_be_read_is_none(contracts: Contracts) -> None:
    headers = [{"key": "__debezium.oldkey", "value": NESTED}, {"key": ["no name"], "value": 1}]
    line = {"topic": "t", "key": {"id": 1}, "value": envelope("c", customer(1), order=2), "headers": headers}
    with in_time():
        event = landed(text_of(line).encode(), contracts, Handling())
    assert event is not None and event.moved_from_key is None


@pytest.mark.parametrize("told", [LONG, Raw(LONG), Raw("-" + LONG)])
def test_a_whole_number_of_any_length_lands_digit_by_digit(contracts: Contracts, told: Any) -> None:
    line = text_of(envelope("c", customer(1, org_id=told), order=1)).encode()
    event = landed(line, contracts, Handling())
    digits = told.text if isinstance(told, Raw) else told
    assert event is not None and json.loads(event.after or "")["org_id"] == digits


@pytest.mark.parametrize("digits", [5000, 131_072])
def test_a_numeric_of_any_length_lands_digit_by_digit_in_every_form(
    contracts: Contracts, digits: int
) -> None:
    text = "7" * digits
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        unscaled = int(text)
    finally:
        sys.set_int_max_str_digits(before)
    packed = base64.b64encode(unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True)).decode()
    for told in (Raw(text), text, {"scale": 0, "value": packed}):
        row = {"id": 1, "n": told}
        with in_time():
            line = text_of(envelope("c", row, order=1, table="all_types")).encode()
            event = landed(line, contracts, Handling())
        assert event is not None and json.loads(event.after or "")["n"] == text


def test_a_text_of_json_nested_deeper_than_any_lands_as_it_is(contracts: Contracts) -> None:
    line = text_of(envelope("c", customer(1, attrs=NESTED), order=1)).encode()
    with in_time():
        event = landed(line, contracts, Handling())
    assert event is not None and json.loads(event.after or "")["attrs"] == NESTED


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_is_no_file_of_events_is_refused_and_not_waited_for(
    recorder: Recorder, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "events.jsonl"
    IN_THE_PLACE[what](path)
    if what == "an empty file":
        return
    with in_time(), pytest.raises(FileRefused, match=r"events\.jsonl"):
        land(path, recorder.inlet)
