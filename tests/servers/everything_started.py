"""Tests that start processes of each kind and never end, for a process of pytest that is killed:
`test_leftovers.py` names the file, and no other run of pytest collects it. Each leaves the ids of
its processes in the file that `STARTED_NOTE` names.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from testbed.servers.guard import memory_folder

NOTE, MEMORY_NOTE = "STARTED_NOTE", "MEMORY_NOTE"
ENDLESS = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
ORPHAN = "import os, signal; os.fork() and os._exit(0); os.setsid(); signal.pause()"


def note_and_wait() -> None:
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    partial = Path(os.environ[NOTE] + ".partial")
    partial.write_text(" ".join(map(str, [os.getpid(), *pids])))
    partial.rename(os.environ[NOTE])
    signal.pause()


def test_programs():
    tempfile.mkdtemp(prefix="rollstream-explorer-")
    memory = memory_folder()
    if memory is not None:
        Path(os.environ[MEMORY_NOTE]).write_text(tempfile.mkdtemp(dir=memory))
    subprocess.Popen(ENDLESS, start_new_session=True)
    subprocess.Popen([sys.executable, "-c", STUBBORN], process_group=0)
    subprocess.run([sys.executable, "-c", ORPHAN], check=True)
    only_folder = {"TMPDIR": os.environ["TMPDIR"]}
    subprocess.Popen(ENDLESS, env=only_folder)
    if os.fork() == 0:
        signal.pause()
    note_and_wait()


def test_servers(tmp_path):
    from testbed.run_driver import RunDriver
    from testbed.servers.kafka_broker import KafkaBroker
    from testbed.servers.prometheus import Prometheus
    from testbed.servers.versity import VersityGW

    VersityGW().start()
    broker = KafkaBroker()
    broker.start()
    broker.wait_ready()
    run = RunDriver(tmp_path / "run", Path("examples/archive"))
    with Prometheus([], tmp_path / "rules.yml", 1.0), run:
        run.start("explore", "--port", "0")
        note_and_wait()


def test_that_leaves_one():
    subprocess.Popen(ENDLESS)
