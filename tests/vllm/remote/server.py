"""A real vLLM server of a tiny model, started as in docs/how-to/vllm.md, on a free port of this
machine; and a web server with given answers.
"""

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from transformers import PreTrainedConfig

from rollstream.producers.engines.vllm.local.core import write_config
from testbed.repository import ROOT
from testbed.servers import free_ports
from testbed.waiting import wait_for

KEY = "a-key-of-the-tests"
SLOTS, CONTEXT = 16, 512
ARGUMENTS = (
    "--tokens-only",
    "--load-format=dummy",
    "--worker-extension-cls=tests.vllm.remote.braked_worker.BrakedWorker",
    '--weight-transfer-config={"backend": "rollstream"}',
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    f"--max-num-seqs={SLOTS}",
    f"--max-model-len={CONTEXT}",
    # Settings of the CPU build, as in `settings.shape_for`.
    "--dtype=float32",
    "--enforce-eager",
    "--block-size=32",
    "--num-gpu-blocks-override=257",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens=2048",
)


@dataclass
class Server:
    """A running server; `start` after `kill` starts the same one again."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {
            "BRAKE": str(self.folder / "brake"),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": KEY,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "NUMBA_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={self.folder}", "--host=127.0.0.1", f"--port={self.port}", *ARGUMENTS]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | more, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until it answers; the error shows its output if it ends first."""
        assert self.process is not None
        wrote = (self.folder / "log").read_text
        wait_for(
            lambda: _answers(f"{self.url}/health"),
            self.process,
            lambda: wrote(errors="replace")[-4000:],
        )

    def brake(self, step_s: float) -> None:
        """Every step waits so long from now on; not at all with 0."""
        (self.folder / "brake").write_text(str(step_s))

    def kill(self) -> None:
        """Kills it with all its children."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def serve(config: PreTrainedConfig, folder: Path) -> Server:
    """Starts it; it answers some time after."""
    write_config(config, folder)
    server = Server(folder, free_ports(1)[0])
    server.start()
    return server


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def answering(answers: Mapping[str, tuple[int, str]]) -> Generator[str]:
    """The URL of a server with these paths, 404 for all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, "{}"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
