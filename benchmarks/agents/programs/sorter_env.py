"""An environment of the library verifiers: sort the letters of the prompt, with a second try. Its
tasks come from `verifiers_service.py`, one per episode.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI

TRIES = 2


class SorterTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def is_sorted(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "".join(sorted(str(self.data.prompt))))


class SorterTaskset(vf.Taskset[SorterTask, vf.TasksetConfig]):
    def load(self) -> list[SorterTask]:
        return []


class SorterHarness(vf.Harness[vf.HarnessConfig]):
    """Asks in the environment's own process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(TRIES):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": data.prompt}]
        return vf.ProgramResult(0, "", "")


__all__ = ["SorterHarness", "SorterTaskset"]
