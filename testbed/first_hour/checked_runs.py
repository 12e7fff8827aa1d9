"""Runs that people start: what `rollstream check` refuses, warns of, or fits, by its JSON."""

import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save, save_file  # pyright: ignore[reportUnknownVariableType]

from rollstream.errors import EXIT_REFUSED
from rollstream.producers.dialogue.text_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from rollstream.run.cli.main import main
from testbed.first_hour.brought_data import BOM, POINTER
from testbed.first_hour.case import FirstHourCase

VERIFIERS = """
import os
def right(answer, reference): return float(answer == reference)
def nothing(answer, reference): return None
def huge(answer, reference): return 1e300
def one(answer): return 1.0
def keyword(answer, reference, *, strict): return 1.0
async def later(answer, reference): return 1.0
def failing(answer, reference): raise KeyError(answer)
def leaving(answer, reference): raise SystemExit(3)
def private(answer, reference):
    return float(not any(name.startswith(("AWS_", "ROLLSTREAM_")) for name in os.environ))
def written(answer, reference):
    open("called", "w").close()
    return 0.5
"""
PARTS = """
import math, torch
from rollstream.api import Score, TaskPrompt, TaskText
def undefined(inputs, settings):
    return inputs.logprobs * math.nan, torch.zeros_like(inputs.logprobs)
def plain(client, task): return 1.0
async def one(client): return 1.0
class Task:
    name = "own"
    def __init__(self, text: TaskText):
        self.text, self.stop = text, text.stop
    def tokenizer(self): return self.text.tokenizer
    def prompt(self, seed, position): return TaskPrompt(self.text.prompt("a"), '"a"')
    def held_out(self, count): return [self.prompt(0, n) for n in range(count)]
    def judge(self, reference, turns): return Score(1.0)
class Empty(Task):
    def prompt(self, seed, position): return TaskPrompt((), "1")
class Failing(Task):
    def prompt(self, seed, position): return {}["x"]
class Negative(Task):
    def prompt(self, seed, position): return TaskPrompt((1, -1), "1")
class Number(Task):
    def judge(self, reference, turns): return 0.25
"""
RUN = """
run = "mine"
[model]
path = "model"
[task]
name = "dataset"
[task.options]
path = "rows.jsonl"
verifier = "checks:right"
"""
CONFIG: dict[str, Any] = {
          "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 262,
          "max_position_embeddings": 2048, "hidden_size": 8, "intermediate_size": 8,
          "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
          "head_dim": 8, "tie_word_embeddings": True}  # fmt: skip
_SQUARES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_NORMS = (
    "self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def _tensors(vocabulary: int) -> dict[str, np.ndarray]:
    """Returns the tensors of a model of these sizes."""
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (vocabulary, 8), "model.norm.weight": (8,)}
    shapes |= {f"{layer}{name}.weight": (8, 8) for name in _SQUARES}
    shapes |= {f"{layer}{name}.weight": (8,) for name in _NORMS}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def write_model(
    folder: Path,
    mark: bytes = b"",
    template: str = CHAT_TEMPLATE,
    config: Mapping[str, Any] = CONFIG,
) -> None:
    """Write a small model's folder with the built-in tokenizer; `mark` begins each text file."""
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    if template:
        fields["chat_template"] = template
    for name, content in (
        ("config.json", json.dumps(config)),
        ("tokenizer_config.json", json.dumps(fields)),
        ("tokenizer.json", byte_tokenizer().to_str()),
    ):
        (folder / name).write_bytes(mark + content.encode())
    save_file(_tensors(config["vocab_size"]), folder / "model.safetensors")


def _write_shards(folder: Path) -> None:
    write_model(folder)
    (folder / "model.safetensors").unlink()
    tensors = _tensors(CONFIG["vocab_size"])
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    names = {tensor: files[place % 2] for place, tensor in enumerate(tensors)}
    for file in files:
        part = {name: tensors[name].astype(np.float16) for name in names if names[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _write_linked(folder: Path) -> None:
    write_model(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def _write_with_others(folder: Path) -> None:
    write_model(folder)
    (folder / "README.md").write_text("a model")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
HEALTHY_MODELS: Mapping[str, Callable[[Path], object]] = {
    "plain": write_model,
    "marked": lambda folder: write_model(folder, BOM),
    "base": lambda folder: write_model(folder, template=""),
    "chatml": lambda folder: write_model(folder, template=CHATML),
    "shards": _write_shards,
    "linked": _write_linked,
    "others": _write_with_others,
    "padded": lambda folder: write_model(folder, config={**CONFIG, "vocab_size": 320}),
    "old_words": lambda folder: write_model(folder, config={**CONFIG, "torch_dtype": "float32"}),
}
"""How each form of a model's folder that is whole is written."""


def write_run(folder: Path, rows: int = 600, longest: int = 10) -> Path:
    """Write a run's file with its model, its verifiers and its data set; returns the file."""
    write_model(folder / "model")
    (folder / "checks.py").write_text(VERIFIERS)
    lines = [
        json.dumps({"prompt": f"{n}".rjust(longest, "x"), "reference": str(n)}) for n in range(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def checked(folder: Path, *words: str) -> Mapping[str, Any]:
    """Call `rollstream check run.toml --json` in the folder; returns its answer and exit code."""
    before, output, errors = Path.cwd(), io.StringIO(), io.StringIO()
    files = sorted(folder.rglob("*"))
    os.chdir(folder)
    try:
        sys.path_importer_cache.clear()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main(["check", "run.toml", "--json", *words])
    finally:
        os.chdir(before)
    written = sorted(str(path) for path in set(folder.rglob("*")) - set(files))
    written = [name for name in written if "__pycache__" not in name]
    try:
        answer = json.loads(output.getvalue())
    except ValueError:
        answer = {"verdict": "error", "findings": [{"text": errors.getvalue()}], "fitted": []}
    return {**answer, "code": code, "written": written}


def ends(
    name: str,
    kind: str,
    words: Sequence[str],
    verdict: str = "refused",
    change: Callable[[Path], object] = lambda folder: None,
    options: Sequence[str] = (),
) -> FirstHourCase:
    """Returns the case of a run that ends in this verdict (`ok`, `warning`, `refused`, or `fitted`:
    a default became another one) with these words; its folder is made by `write_run` and changed.
    """

    def fault(folder: Path) -> str:
        write_run(folder)
        change(folder)
        answer = checked(folder, *(word for option in options for word in ("--set", option)))
        lines = [f["text"] for f in answer["findings"] if f.get("verdict", "refused") == verdict]
        text = "\n".join(answer["fitted"] if verdict == "fitted" else lines)
        if lacking := [word for word in words if word not in text]:
            return f"{lacking} not in {answer}"
        if answer["code"] != (EXIT_REFUSED if verdict == "refused" else 0):
            return f"exit code {answer['code']}: {answer}"
        return f"it wrote {answer['written']}" if answer["written"] else ""

    return FirstHourCase(name, kind, fault, is_slow=True)


def _rows(count: int, longest: int = 10) -> Callable[[Path], object]:
    return lambda folder: write_run(folder, count, longest)


def _verifier(name: str) -> list[str]:
    return [f"task.options.verifier=checks:{name}"]


def _replace(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _parts(folder: Path) -> None:
    (folder / "parts.py").write_text(PARTS)


def _own_task(folder: Path) -> None:
    _parts(folder)
    (folder / "run.toml").write_text('run = "mine"\n[model]\npath = "model"\n')


JUDGE = ["scoring.function=judge", "scoring.service.url=http://localhost:1/v1",
         "scoring.judge.model=m"]  # fmt: skip


def _cut(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _index(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "part-1.safetensors")
    files = {"model.embed_tokens.weight": "part-1.safetensors", "x": "part-2.safetensors"}
    index = folder / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


def _adapter(file: str, target: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / file).write_bytes(save({"x": np.zeros(1, np.float32)}))
        fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [target]}
        (folder / "adapter" / "adapter_config.json").write_text(json.dumps(fields))

    return change


ADAPTER = ["model.lora.path=adapter"]


def _bad_row(count: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        lines = (folder / "rows.jsonl").read_text().splitlines()
        lines[10 : 10 + count] = ['{"prompt": '] * count
        (folder / "rows.jsonl").write_text("\n".join(lines))

    return change


def _mixture(folder: Path) -> None:
    """Make the task a mixture of three verifiers, the first of which ends its process."""
    path = folder / "run.toml"
    before = path.read_text().partition("[task]")[0]
    parts = "".join(
        f'[[task.parts]]\nname = "dataset"\nlabel = "{name}"\n'
        f'options = {{path = "rows.jsonl", verifier = "checks:{name}"}}\n'
        for name in ("leaving", "huge", "right")
    )
    path.write_text(f'{before}[task]\nname = "mixture"\n{parts}')


def _no_write(folder: Path) -> str:
    """The verifier may have written, so only the run's folder counts."""
    write_run(folder)
    checked(folder, *("--set", "task.options.verifier=checks:written", "--set", "seed=3"))
    return "the run's folder was made" if (folder / "runs").exists() else ""


DEFAULTS, EARLY, MODEL = (
    "a default that nobody set refuses",
    "a mistake in the run's file is found by a role",
    "a model's folder that is not whole",
)
CASES = (
    ends("evaluation_prompts_by_default", DEFAULTS, ["evaluation.prompts = "], "fitted"),
    ends("evaluation_prompts_that_were_set", DEFAULTS,
         ["evaluation.prompts: 200 asked for", "are held out"], options=["evaluation.prompts=200"]),
    ends("nothing_is_held_out", DEFAULTS, ["evaluation.enabled = false"], "fitted", _rows(3),
         ["task.options.held_out_share=0.000001"]),
    ends("prompts_above_the_default_context", DEFAULTS, ["rollouts.context_max = 640"], "fitted",
         _rows(600, 200)),
    ends("prompts_above_a_context_that_was_set", DEFAULTS, ["prompts have more tokens than the 92"],
         change=_rows(600, 200), options=["rollouts.context_max=512", "sampling.tokens_max=420"]),
    ends("base_model_without_a_template", DEFAULTS, ['task.template = "plain"'], "fitted",
         lambda folder: write_model(folder / "model", template="")),
    ends("template_that_was_set", DEFAULTS, ["has no chat template"],
         change=lambda folder: write_model(folder / "model", template=""),
         options=["task.template=chat"]),
    ends("unknown_option", EARLY, ["no option 'promt'"], options=["task.options.promt=a"]),
    ends("nothing_is_left_to_train", EARLY, ["rows are held out"],
         options=["task.options.held_out_share=0.999999", "evaluation.prompts=1"]),
    ends("gpu_that_is_not_here", EARLY, ["trainer.device = 'cuda:99'", "GPUs here"], "warning",
         options=["trainer.device=cuda:99"]),
    ends("path_that_is_a_list", EARLY, ["task.options.path must be text"],
         options=['task.options.path=["rows.jsonl"]']),
    ends("column_that_is_a_number", EARLY, ["task.options.prompt must be text, got 5"],
         options=["task.options.prompt=5"]),
    ends("share_that_is_text", EARLY, ["held_out_share must be a number, got 'half'"],
         options=["task.options.held_out_share=half"]),
    ends("verifier_by_its_path", EARLY, ["e.g. checks:right"],
         options=["task.options.verifier=./checks:right"]),
    ends("verifier_module_that_calls_exit", EARLY, ["importing 'leaves'", "SystemExit"],
         change=lambda f: (f / "leaves.py").write_text("raise SystemExit(5)"),
         options=["task.options.verifier=leaves:right"]),
    ends("unknown_column", EARLY, ["no column 'question'"],
         options=["task.options.prompt=question"]),
    ends("verifier_that_is_not_there", EARLY, ["no callable 'wrong'"], options=_verifier("wrong")),
    ends("verifier_of_one_argument", EARLY, ["verifier", "takes (answer)"],
         options=_verifier("one")),
    ends("verifier_with_a_needed_keyword", EARLY, ["strict"], options=_verifier("keyword")),
    ends("verifier_that_is_async", EARLY, ["async def"], options=_verifier("later")),
    ends("verifier_module_that_fails", EARLY, ["ZeroDivisionError"],
         change=_replace("checks.py", b"1 / 0")),
    ends("verifier_module_that_exits", EARLY, ["failed with SystemExit: bye"],
         change=_replace("checks.py", b"raise SystemExit('bye')")),
    ends("verifier_that_raises", EARLY, ["KeyError at checks.py"], "warning",
         options=_verifier("failing")),
    ends("verifier_that_returns_nothing", EARLY, ["NoneType"], "warning",
         options=_verifier("nothing")),
    ends("reward_beyond_the_bounds", EARLY, ["a run refuses a reward of 1e+300"], "warning",
         options=_verifier("huge")),
    ends("each_part_of_a_mixture", EARLY,
         ["part leaving: checks:leaving: no reward", "part huge: checks:huge: no reward"],
         "warning", _mixture),
    ends("lines_of_a_mixture_name_the_part", EARLY,
         ["part huge: rows.jsonl: ", "part right: checks:right: reward 0"], "ok", _mixture),
    ends("verifier_that_exits", EARLY, ["no reward of a made-up answer"], "warning",
         options=_verifier("leaving")),
    ends("verifier_with_a_paid_key", EARLY, ["not called", "OPENAI_API_KEY"], "ok",
         options=["task.environment=['OPENAI_API_KEY']"]),
    ends("two_bad_rows_of_600", EARLY, ["2 cannot be used (skipped", "line 11: not JSON"],
         "warning", _bad_row(2)),
    ends("nine_bad_rows_of_600", EARLY, ["9 cannot be used", "line 11: not JSON"],
         change=_bad_row(9)),
    ends("port_above_all", EARLY, ["is above 65535"], options=["metrics.port=65534"]),
    ends("loss_that_is_not_there", EARLY, ["module 'nomod'"], options=["trainer.loss=nomod:f"]),
    ends("loss_that_is_not_finite", EARLY, ["trainer.loss: a loss is not finite"], change=_parts,
         options=["trainer.loss=parts:undefined"]),
    ends("episode_that_is_not_async", EARLY, ["async def plain"], change=_parts,
         options=["agent.episode=parts:plain"]),
    ends("episode_of_one_argument", EARLY, ["takes (client)"], change=_parts,
         options=["agent.episode=parts:one"]),
    ends("command_without_its_script", EARLY, ["no file 'nofile.py'"],
         options=["agent.command=['python3', '-u', 'nofile.py']"]),
    ends("judge_pattern_that_is_none", EARLY, ["scoring.judge.pattern"],
         options=[*JUDGE, "scoring.judge.pattern=score ("]),
    ends("judge_that_sees_no_answer", EARLY, ["{answer}"],
         options=[*JUDGE, "scoring.judge.prompt=hello"]),
    ends("unknown_scoring_function", EARLY, ["scoring.function = 'jugde'"],
         options=["scoring.function=jugde"]),
    ends("prompt_without_tokens", EARLY, ["prompt(0, 0) has no tokens"], change=_own_task,
         options=["task.name=parts:Empty"]),
    ends("prompt_that_raises", EARLY, ["KeyError in prompt() at parts.py:"], change=_own_task,
         options=["task.name=parts:Failing"]),
    ends("prompt_of_negative_token", EARLY, ["the token -1"], change=_own_task,
         options=["task.name=parts:Negative"]),
    ends("judge_that_returns_a_number", EARLY, ["reward 0.25"], "ok", change=_own_task,
         options=["task.name=parts:Number"]),
    ends("misspelled_field_of_a_new_model", EARLY, ["did you mean 'hidden_size'"],
         change=_replace("run.toml", RUN.replace('path = "model"\n', "", 1).encode()),
         options=["task.options.answer=reference", "model.config.hiden_size=64"]),
    ends("no_config", MODEL, ["model.path"], change=lambda f: (f / "model/config.json").unlink()),
    ends("no_weights", MODEL, ["neither model.safetensors"],
         change=lambda f: (f / "model/model.safetensors").unlink()),
    ends("no_tokenizer", MODEL, ["no tokenizer.json"],
         change=lambda f: (f / "model/tokenizer.json").unlink()),
    ends("weights_are_a_pointer", MODEL, ["Git LFS pointer"],
         change=_replace("model/model.safetensors", POINTER)),
    ends("tokenizer_is_a_pointer", MODEL, ["tokenizer.json is a Git LFS pointer"],
         change=_replace("model/tokenizer.json", POINTER)),
    ends("config_is_a_pointer", MODEL, ["config.json is a Git LFS pointer"],
         change=_replace("model/config.json", POINTER)),
    ends("cut_weights", MODEL, ["download was cut off"], change=_cut),
    ends("lacking_shard", MODEL, ["lacks part-2.safetensors"], change=_index),
    ends("pickled_adapter", MODEL, ["adapter_model.bin", "save_pretrained"],
         change=_adapter("adapter_model.bin", "q_proj"), options=ADAPTER),
    ends("adapter_of_another_layer", MODEL, ["'adapter'", "no linear layer 'embed_tokens'"],
         change=_adapter("adapter_model.safetensors", "embed_tokens"), options=ADAPTER),
    ends("adapter_of_other_tensors", MODEL, ["'adapter'", "is missing"],
         change=_adapter("adapter_model.safetensors", "q_proj"), options=ADAPTER),
    ends("template_without_the_messages", MODEL, ["leaves the messages out"],
         change=lambda folder: write_model(folder / "model", template="hello")),
    ends("smaller_vocabulary", MODEL, ["belongs to another model"], change=_replace(
        "model/config.json", json.dumps({**CONFIG, "vocab_size": 200}).encode())),
    ends("byte_order_marks", "a byte order mark", ["parameters, F32, complete"], "ok",
         lambda folder: write_model(folder / "model", BOM)),
    ends("byte_order_mark_in_toml", "a byte order mark", ["parameters"], "ok",
         _replace("run.toml", BOM + RUN.encode())),
    FirstHourCase("a_check_writes_nothing", EARLY, _no_write, is_slow=True),
)  # fmt: skip
