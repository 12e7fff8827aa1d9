"""A program in another language reads our records from a real broker
(docs/reference/wire-format.md).
"""

import json
import subprocess

import numpy as np

from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import publish
from testbed.repository import EXAMPLES
from testbed.sample_records import trajectory
from testbed.servers import kafka_broker
from testbed.waiting import WAIT_S

READER = EXAMPLES / "readers" / "ReadTrajectories.java"


def read(url: str) -> list[dict]:
    server, prefix = url.removeprefix("kafka://").split("/")
    command = [
        "java",
        *kafka_broker.SHORT_LIVED,
        "-cp",
        f"{kafka_broker.jars()}/*",
        str(READER),
        server,
    ]
    done = subprocess.run(
        [*command, f"{prefix}.trajectories"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_java_decodes_trajectories_from_the_broker():
    url = kafka_broker.new_url()
    bus = open_bus(url)
    bus.create(catalogue())
    written = trajectory(64)
    publish(bus, "trajectories", "7", written)
    bus.close()
    (found,) = read(url)
    assert found["schema"] == "trajectory/1"
    assert found["trajectory"] == written.trajectory
    assert found["tokens"] == written.tokens.tolist()
    assert found["sources"] == written.sources.tolist()
    logprobs = np.array([float(value) for value in found["logprobs"]], np.float32)
    np.testing.assert_array_equal(logprobs, written.logprobs)
    assert found["reward"] == written.reward
    assert [span["end"] for span in found["spans"]] == [span.end for span in written.spans]
