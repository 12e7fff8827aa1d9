"""Starts a broker from `KAFKA_*` variables, as the official image does: KAFKA_NODE_ID becomes
node.id, `__` an underscore and `___` a hyphen; KAFKA_JVM_PERFORMANCE_OPTS are options of Java. Its
storage is formatted unless it was before.
"""

import os
import re
import subprocess
from pathlib import Path

PROPERTIES = Path("/tmp/server.properties")
CLUSTER = "5L6g3nShT-eMCtK--X86sw"  # one for all, so that a restart finds its own
JAVA_OPTIONS = "KAFKA_JVM_PERFORMANCE_OPTS"


def property_name(variable: str) -> str:
    name = variable.removeprefix("KAFKA_").lower()
    return re.sub("_+", lambda m: {1: ".", 2: "_", 3: "-"}[len(m[0])], name)


def main() -> None:
    settings = {
        property_name(name): value
        for name, value in os.environ.items()
        if name.startswith("KAFKA_") and name != JAVA_OPTIONS
    }
    PROPERTIES.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    java = ["java", "-Xmx512m", *os.environ.get(JAVA_OPTIONS, "").split()]
    java += ["-cp", "/opt/kafka/libs/*"]
    tool = ("kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", CLUSTER)
    subprocess.run([*java, *tool, "-c", str(PROPERTIES)], check=True)
    os.execvp(java[0], [*java, "kafka.Kafka", str(PROPERTIES)])


main()
