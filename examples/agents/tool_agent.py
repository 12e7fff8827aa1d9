"""An agent with a calculator: the program of tool-agent.toml and tool-agent-1.5b.toml."""

import asyncio
import json
from typing import Any

from examples.verifiers import final_number
from rollstream.api import sandbox

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


async def episode(client: Any, task: dict[str, Any]) -> float:
    """Returns 1 if the answer ends with the right number, else 0."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    while len(messages) < 8:
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return final_number(message.content, task["reference"])[0]
        messages.append(message)
        for call in message.tool_calls:
            result = await asyncio.to_thread(calculate, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def calculate(arguments: str) -> str:
    """Evaluates an expression of the model, which may be any program, in a sandbox of its own."""
    expression = json.loads(arguments).get("expression")
    done = sandbox.run(["python3", "-IS", "-c", f"print({expression})"])
    return done.text.strip()[:200] if done.ok else "error"
