"""Chat templates in the forms of published families (`FORMS`), each with what makes it hard to
continue: thoughts that are left out, calls as JSON text, ids of a fixed form, ends that differ.
"""

from dataclasses import dataclass

from rollstream.producers.dialogue.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """States a template, what its model writes for a call of `add` with a = 1, with the token that
    ends it, and what stands behind that token up to the next answer after the result 42.
    """

    template: str
    call: str
    reply: str
    special: tuple[str, ...]


_CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
_HERMES = """{{ '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}\
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}"""
_XML = """{{ '<tool_call>\\n<function=' + c.function.name + '>' }}\
{%- for k, v in c.function.arguments | items %}{{ '\\n<parameter=' + k + '>\\n' }}{{ v }}\
{{- '\\n</parameter>' }}{% endfor %}{{ '\\n</function>\\n</tool_call>' }}"""
_IM_REPLY = (
    "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n"
)
_IM = ("<|im_start|>", "<|im_end|>")
_GLM = """\
{%- if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think></think>' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- v }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
_HARMONY = """\
{%- if tools %}{{ '<|start|>developer<|message|>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|end|>' }}{% endif %}{% set ns = namespace(name='') %}{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}
{%- set ns.name = c.name %}{{ '<|start|>assistant to=functions.' + c.name }}
{{- '<|channel|>commentary json<|message|>' + (c.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_DEEPSEEK = """\
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% else %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}
{%- endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
_MISTRAL = """\
{%- for m in messages %}{% if m.role == 'user' %}{% if tools and loop.first %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}
{%- endif %}{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{% endfor %}{{ ']</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
_OUTPUTS = ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_CALLS = tuple(f"<｜tool▁call{name}｜>" for name in ("s▁begin", "s▁end", "▁begin", "▁end"))

FORMS = {
    "qwen3": TemplateForm(
        _CHATML.replace("CALL", _HERMES),
        'Hm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>",
        _IM_REPLY,
        _IM,
    ),
    "qwen3.5": TemplateForm(
        _CHATML.replace("CALL", _XML),
        "Hm.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        _IM_REPLY,
        (*_IM, "<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "glm-4.5": TemplateForm(
        _GLM,
        "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<tool_response>\n42\n</tool_response><|assistant|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gpt-oss": TemplateForm(
        _HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>"
        'commentary json<|message|>{"a": 1}<|call|>',
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"42"<|end|><|start|>assistant',
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    ),
    "deepseek-v3": TemplateForm(
        _DEEPSEEK,
        "Hm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜Assistant｜><think>\n",
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁sep｜>",
            "<｜end▁of▁sentence｜>",
            *_OUTPUTS,
            *_CALLS,
        ),
    ),
    "mistral": TemplateForm(
        _MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefgh1"}]</s>',
        '[TOOL_RESULTS] {"content": 42, "call_id": "abcdefgh1"}[/TOOL_RESULTS]',
        ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}


def form_tokenizer(form: TemplateForm) -> TextTokenizer:
    """Returns the built-in tokenizer with the form's template and special tokens."""
    from tokenizers import AddedToken

    tokenizer = TextTokenizer(None)
    names = [AddedToken(name, normalized=False) for name in form.special]
    tokenizer.light.add_special_tokens(names)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.whole.add_special_tokens({"additional_special_tokens": list(form.special)})  # pyright: ignore
    tokenizer.whole.chat_template = form.template
    return tokenizer
