"""Names thirty public families of chat templates (`FAMILIES`), with the format in which each model
calls tools and the token that it samples at the end of an answer.

The templates are those that TRL's wheel carries, read from a folder or from an installed package,
else from the wheel, which is downloaded. Templates that it lacks are written here, in the forms
that their makers document. No tokenizer of a model is read: `family_tokenizer` makes one of bytes
with the special tokens that the template names.
"""

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rollstream.producers.dialogue.text_tokenizer import TextTokenizer, byte_tokenizer

FOLDER = "ROLLSTREAM_CHAT_TEMPLATES"
"""Environment variable with a folder of `NAME.jinja` files."""
WHEEL = "trl==1.16.0"
_TEMPLATES = "trl/chat_templates/"


@dataclass(frozen=True, slots=True)
class TemplateFamily:
    """States what a family's model writes. `calls` is the format of its calls, "" if its template
    takes no tools. `end` ends an answer, `call_end` one with calls (default: `end`), and `closing`
    stands in the template behind an earlier answer (default: `end`).
    """

    name: str
    calls: str
    end: str
    call_end: str = ""
    closing: str = ""
    bos: str = ""
    template: str = ""
    thinks: bool = False


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x y"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n"
    "x y\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 2, "b": "x y"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": "x y"}, '
    '"id": "abcdefgh1"}]',
    "glm45": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>",
    "openai": ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": "x y"}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 2, "b": "x y"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:add{a:2,b:<|"|>x y<|"|>}<tool_call|>',
    "lfm2": "<|tool_call_start|>[add(a=2, b='x y')]<|tool_call_end|>",
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 2, "b": "x y"}}]',
    "atem": '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">2'
    '</atem:parameter>\n<atem:parameter name="b">x y</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
}
"""A call of `add` with a = 2 and b = "x y" as the models of each format write it."""

MISTRAL = """\
{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string }}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""
MISTRAL_SMALL = """\
{%- set today = strftime_now("%Y-%m-%d") %}{{ bos_token }}
{%- set system = 'The current date is ' + today + '.' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% endif %}{{ '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in rest %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content or '' }}
{%- if m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}
{%- if c.id | length < 9 %}{{ raise_exception('Tool call IDs need length >= 9') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id[-9:] + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' }}{% endif %}{{ eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id[-9:] + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""
PHI4_MINI = """\
{% for m in messages %}{% if m.role == 'system' or loop.first %}
{{- '<|system|>\\n' + (m.content if m.role == 'system' else 'You are a helpful assistant.') }}
{%- if tools %}{{ '\\nprefix function calls with functools: functools[...]\\n' }}
{%- for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ '<|end|>' }}{% endif %}
{%- if m.role != 'system' %}{{ '<|' + m.role + '|>\\n' }}
{%- if m.content %}{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' ~ c.function.arguments ~ '}' }}
{%- if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endif %}
{%- endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"""
SMOLLM2 = """\
{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SMOLLM3 = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nToday Date: ' + strftime_now('%d %B %Y') + '\\n' }}
{{- 'Reasoning Mode: ' + ('/think' if enable_thinking else '/no_think') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- if xml_tools %}{{ '### Tools\\n\\n<tools>\\n' }}{% for t in xml_tools %}{{ t | string + '\\n' }}
{%- endfor %}{{ '</tools>\\n\\nFor each function call, return a json object with function name' }}
{{- ' and arguments within <tool_call></tool_call> XML tags' }}{% endif %}{{ '<|im_end|>\\n' }}
{%- for m in messages %}{% if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n') }}
{{- m.content.lstrip('\\n') + '<|im_end|>\\n' }}{% elif m.role == 'tool' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}{% endif %}"""

_IM, _EOT, _DEEP = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
FAMILIES = (
    TemplateFamily("qwen2_5", "hermes", _IM),
    TemplateFamily("qwen3", "hermes", _IM, thinks=True),
    TemplateFamily("qwen3_instruct_2507", "hermes", _IM),
    TemplateFamily("qwen3_5_think", "qwen3_coder", _IM, thinks=True),
    TemplateFamily("qwen3_6", "qwen3_coder", _IM, thinks=True),
    TemplateFamily("qwen3_8", "qwen3_coder", _IM, thinks=True),
    TemplateFamily("llama3", "", _EOT, bos="<|begin_of_text|>"),
    TemplateFamily("llama3_1", "llama3_json", _EOT, bos="<|begin_of_text|>"),
    TemplateFamily("llama3_2", "llama3_json", _EOT, bos="<|begin_of_text|>"),
    TemplateFamily("glm4moe", "glm45", "<|user|>", call_end="<|observation|>", thinks=True),
    TemplateFamily("gptoss", "openai", "<|return|>", call_end="<|call|>", closing="<|end|>"),
    TemplateFamily("deepseekv3", "deepseek_v3", _DEEP, bos="<｜begin▁of▁sentence｜>", thinks=True),
    TemplateFamily(
        "deepseek_r1_distill", "deepseek_v3", _DEEP, bos="<｜begin▁of▁sentence｜>", thinks=True
    ),
    TemplateFamily("phi3", "", "<|end|>", bos="<s>"),
    TemplateFamily("phi3_5", "", "<|end|>", bos="<s>"),
    TemplateFamily("gemma", "", "<end_of_turn>", bos="<bos>"),
    TemplateFamily("gemma3", "", "<end_of_turn>", bos="<bos>"),
    TemplateFamily("gemma4", "gemma4", "<turn|>", call_end="<|tool_response>", bos="<bos>"),
    TemplateFamily("lfm2", "lfm2", _IM, bos="<|startoftext|>"),
    TemplateFamily("lfm2_2_5", "lfm2", _IM, bos="<|startoftext|>"),
    TemplateFamily("cohere", "", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    TemplateFamily("cohere2", "", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    TemplateFamily("nemotron_3_nano", "qwen3_coder", _IM, thinks=True),
    TemplateFamily("nemotron_3_super", "qwen3_coder", _IM, thinks=True),
    TemplateFamily("muse_glimmer", "atem", "<|eot|>"),
    TemplateFamily("mistral", "mistral", "</s>", bos="<s>", template=MISTRAL),
    TemplateFamily("mistral_small", "mistral", "</s>", bos="<s>", template=MISTRAL_SMALL),
    TemplateFamily("phi4_mini", "phi4_mini_json", "<|end|>", template=PHI4_MINI),
    TemplateFamily("smollm2", "", _IM, template=SMOLLM2),
    TemplateFamily("smollm3", "hermes", _IM, template=SMOLLM3, thinks=True),
)

_SPECIAL = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|>|<｜[^｜\s]{1,40}｜>|\[/?[A-Z_]{3,30}\]|<(?:start|end)_of_turn>"
    r'|<\|[a-z_]+>|<[a-z_]+\|>|<\|"\|>|\[gMASK\]|<sop>'
)
_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
          "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip


def family_tokenizer(family: TemplateFamily, template: str, folder: Path) -> TextTokenizer:
    """Save a tokenizer with the template and its special tokens into the folder. Tags of calls are
    added tokens that are not special, as in Qwen's tokenizers.
    """
    made = byte_tokenizer()
    names = {*_SPECIAL.findall(template), family.end, family.call_end, family.closing, family.bos}
    names = sorted(name for name in names if name and name not in _WORDS)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names])  # pyright: ignore[reportUnknownMemberType]
    made.add_tokens([AddedToken(word, normalized=False) for word in _WORDS if word in template])  # pyright: ignore[reportUnknownMemberType]
    given = {"bos_token": family.bos} if family.bos else {}
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=family.end, **given)
    whole.chat_template = template
    whole.save_pretrained(str(folder))  # pyright: ignore[reportUnknownMemberType]
    return TextTokenizer(folder)


def family_templates(scratch: Path, quick: bool) -> dict[str, str]:
    """Returns the template of each family by its name; the quick form has those written here."""
    templates = {family.name: family.template for family in FAMILIES if family.template}
    if quick:
        return templates
    folder = _folder(scratch)
    for family in FAMILIES:
        path = folder / f"{family.name}.jinja"
        if not family.template and path.is_file():
            templates[family.name] = path.read_text(encoding="utf-8")
    return templates


def _folder(scratch: Path) -> Path:
    if given := os.environ.get(FOLDER):
        return Path(given)
    installed = find_spec("trl")
    if installed is not None and installed.origin:
        return Path(installed.origin).parent / "chat_templates"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "-d",
        str(scratch),
        WHEEL,
    ]
    subprocess.run(command, check=True, timeout=300)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.startswith(_TEMPLATES)]
        wheel.extractall(scratch, names)
    return scratch / _TEMPLATES
