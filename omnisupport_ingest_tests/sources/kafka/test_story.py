"""From a topic to the dimensions: what a real Debezium wrote ends as it does when it comes as a file."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, SOURCE, TABLES, Recorder, contract
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.test_sync import produce_recorded
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes

NAMES = ("customers", "toasty")


@pytest.mark.slow
def test_a_topic_ends_in_the_dimensions_that_the_same_file_ends_in(
    broker: Broker, tmp_path: Path, spark: SparkSession
) -> None:
    prefix = f"s{uuid.uuid4().hex[:8]}."
    broker.make_topic(f"{prefix}all")
    produce_recorded(broker, f"{prefix}all")
    topics = Reader(tmp_path / "topics", broker.address, prefix, batch_rows=40)
    assert topics.sync().finished
    assert len(topics.store.batch_ids()) > 1
    # Sent again, as a connector does that was killed: the same events, at later offsets.
    produce_recorded(broker, f"{prefix}all")
    topics.sync()
    files = Recorder(tmp_path / "files", *NAMES)
    files.land(DEFAULTS)
    (judged,) = files.run(spark)
    (by_topic,) = topics.recorder.run(spark)
    assert by_topic.deduped == judged.deduped
    assert by_topic.duplicates >= judged.deduped, "all that came twice counts once"
    for table in NAMES:
        state = topics.recorder.state(spark, table)
        assert state == files.state(spark, table)
        assert state


@pytest.mark.slow
def test_a_source_of_topics_is_made_synced_and_looked_at_by_commands(
    broker: Broker, warm: str, tmp_path: Path
) -> None:
    topic = f"c{uuid.uuid4().hex[:8]}.customers"
    broker.make_topic(topic)
    broker.produce(topic, changes(1, 20))
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    document = contract("customers", *TABLES["customers"])
    (tmp_path / "contracts" / "data" / "customers.json").write_text(json.dumps(document))
    given = {
        "OMNISUPPORT_HOME": str(tmp_path / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(tmp_path / "contracts" / "data"),
        "OMNISUPPORT_FIRST_WINDOW": "2026-11-20T15:00:00Z",
        **pgbench.on(warm),
    }

    def command(*arguments: str) -> tuple[int, str, str]:
        done = pgbench.command(*arguments, folder=tmp_path, variables=given)
        return done.returncode, done.stdout, done.stderr

    made = command("sources", "new", SOURCE, "--kind", "kafka", "--servers", broker.address, "--topic", topic)
    assert made[0] == 0, made[2]
    assert command("sources", "validate")[0] == 0
    code, out, err = command("sync", SOURCE, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["finished"], told["records"], told["events"]) == (True, 20, 20)
    code, out, err = command("source", "status", SOURCE, "--json")
    assert code == 0, err
    (partition,) = json.loads(out)["partitions"]
    assert (partition["landed"], partition["behind"], partition["gone"]) == (20, 0, 0)
    code, out, _ = command("landing", "show", told["batches"][0], "--source", SOURCE)
    assert code == 0 and f"{topic}[0] 0 to 19, 20 records" in out
    assert "kafka" in command("sources", "list")[1]

    broker.make_anew(topic)
    broker.produce(topic, changes(31, 1))
    code, _, err = command("sync", SOURCE)
    assert code == 7 and "was made anew" in err and f"sync {SOURCE} --new-epoch" in err
    code, out, err = command("sync", SOURCE, "--new-epoch", "made anew")
    assert code == 0, err
    code, _, err = command("sync", SOURCE, "--verify", "full")
    assert code == 2 and "--verify" in err
