"""An agent of the examples: it asks for sorted letters, and once more if they are not sorted."""

from typing import Any


async def episode(client: Any, task: dict[str, Any]) -> float:
    """Returns 1 if the first answer is right, .5 if the second is, else 0."""
    wanted = "".join(sorted(task["reference"]["letters"]))
    messages = [{"role": "user", "content": task["prompt"]}]
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=10
        )
        text = answer.choices[0].message.content
        if text == wanted:
            return reward
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": task["prompt"]},
        ]
    return 0.0
