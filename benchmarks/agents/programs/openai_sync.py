"""Asks two times with the library openai. `python openai_sync.py PROMPT`"""

import sys
from typing import Any

from openai import OpenAI

client = OpenAI()
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=10)
    messages += [answer.choices[0].message, {"role": "user", "content": sys.argv[1]}]
