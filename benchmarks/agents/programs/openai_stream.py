"""Asks two times with the library openai and reads the answers as streams, with a tool that the
model may call. `python openai_stream.py PROMPT`
"""

import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "sort",
        "parameters": {"type": "object", "properties": {"letters": {"type": "string"}}},
    },
}

client = OpenAI()
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    content = ""
    for chunk in client.chat.completions.create(
        model="policy", messages=messages, max_tokens=10, tools=[TOOL], stream=True
    ):
        content += chunk.choices[0].delta.content or ""
    said = {"role": "assistant", "content": content}
    messages += [said, {"role": "user", "content": sys.argv[1]}]
