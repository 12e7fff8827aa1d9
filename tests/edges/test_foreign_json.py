"""JSON that another program wrote is parsed by `rollstream/foreign_json.py`: the parsers of the
libraries raise further errors (`RecursionError`), which end the caller.
"""

import ast
from pathlib import Path

from testbed.repository import ROOT

PACKAGES = ("rollstream", "consumers", "producers", "simulator", "storage", "streams")
PARSERS = frozenset({"json.loads", "json.load", "json.decode", "json.Decoder"})
OWN_TEXT = "text that the same process, its own child or its own parent wrote"
CAUGHT = "catches `RecursionError` beside `ValueError`"
PERMITTED = {
    "consumers/audit/source.py": CAUGHT,
    "rollstream/keep/replay/gathering.py": CAUGHT,
    "consumers/trainer/sharded/ranks.py": OWN_TEXT,
    "producers/agents/front.py": "answers of the endpoints of the same run",
    "producers/agents/keys.py": "text with a signature of this run",
    "producers/agents/conversation.py": CAUGHT,
    "producers/agents/program_process.py": OWN_TEXT,
    "producers/agents/programs.py": CAUGHT,
    "producers/engines/vllm/remote/http.py": CAUGHT,
    "producers/rewards/environment.py": OWN_TEXT,
    "producers/rewards/pool.py": CAUGHT,
    "producers/rewards/process.py": OWN_TEXT,
    "producers/rewards/replies.py": CAUGHT,
    "producers/rows/row_files.py": CAUGHT,
    "producers/sandbox/inside.py": "runs inside the sandbox, without the package",
    "producers/sandbox/process.py": "text of the sandbox's own starter",
    "producers/scoring/functions.py": CAUGHT,
    "producers/tasks/automaton.py": "references of this task's own prompts",
    "producers/tasks/dataset.py": "references of this task's own prompts",
    "producers/tasks/dataset_rows.py": "text that it wrote itself",
    "producers/tasks/gym.py": "references of this task's own prompts",
    "producers/tasks/mixture.py": "references of this task's own prompts",
    "producers/tasks/remainder.py": "references of this task's own prompts",
    "producers/tasks/scripted.py": "references of this task's own prompts",
    "producers/tasks/tool_dialogue.py": "arguments that the parser of tool calls wrote as JSON",
    "rollstream/run/checks/model_process.py": OWN_TEXT,
    "rollstream/run/checks/task.py": OWN_TEXT,
    "rollstream/run/checks/task_process.py": OWN_TEXT,
    "rollstream/run/cli/maintain/health.py": OWN_TEXT,
    "rollstream/run/config/config.py": OWN_TEXT,
    "rollstream/look/explorer/serving/export.py": OWN_TEXT,
    "rollstream/look/explorer/serving/sql.py": OWN_TEXT,
    "rollstream/look/explorer/serving/sql_process.py": OWN_TEXT,
    "rollstream/foreign_json.py": "the functions themselves",
    "rollstream/run/roles/evaluation.py": OWN_TEXT,
    "rollstream/run/warmup/process.py": OWN_TEXT,
    "streams/codec.py": CAUGHT,
    "streams/foreign_text.py": CAUGHT,
}
"""The modules that call a library's parser, each with the reason."""


def calls_parser(path: Path) -> bool:
    """Whether a module uses a library's parser by its qualified name or imports one."""
    source = path.read_bytes()
    for node in ast.walk(ast.parse(source)) if b"json" in source else ():
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if ".".join(name.split(".")[-2:]) in PARSERS:
                return True
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json"):
            return True
    return False


def test_each_parser_of_json_is_bounded_or_states_why_not():
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    callers = {str(path.relative_to(ROOT)) for path in paths if calls_parser(path)}
    assert callers == PERMITTED.keys()
