"""Runs episodes of an environment of the library verifiers, whose training client asks over vLLM's
token route: `python verifiers_service.py URL TOKENIZER` opens sessions at the endpoint as they come
and ends each with the environment's reward. It ends when it is killed.
"""

import asyncio
import os
import sys

import httpx2
import verifiers.v1 as vf
from renderers import DefaultRendererConfig
from sorter_env import SorterTask
from verifiers.v1.utils.loaders import load_environment

TOGETHER = 4
PAUSE_S = 0.1


async def play(env: vf.Env, session: dict, tokenizer: str) -> dict:
    """Returns the end of an episode: its reward, or why it failed."""
    variable = f"KEY_{session['id']}"
    os.environ[variable] = session["key"]
    client = vf.TrainClientConfig(
        base_url=session["base_url"],
        api_key_var=variable,
        renderer=DefaultRendererConfig(),
        renderer_model_name=tokenizer,
    )
    context = vf.ModelContext("policy", client, vf.SamplingConfig(max_tokens=10, temperature=1.0))
    task = SorterTask(vf.TaskData(idx=0, prompt=session["task"]["prompt"]), env.taskset.config.task)
    episode = await env.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        return {"failed": str(errors[0])}
    return {"reward": sum(trace.reward for trace in episode.traces)}


async def serve(http: httpx2.AsyncClient, env: vf.Env, url: str, tokenizer: str) -> None:
    while True:
        try:
            opened = await http.post(f"{url}/sessions")
        except httpx2.TransportError:  # the rollout starts or ends
            opened = None
        if opened is None or opened.status_code != 200:
            await asyncio.sleep(PAUSE_S)
            continue
        session = opened.json()
        end = await play(env, session, tokenizer)
        headers = {"authorization": f"Bearer {session['key']}"}
        address = f"{url}/sessions/{session['id']}"
        await http.request("DELETE", address, json=end, headers=headers)


async def main(url: str, tokenizer: str) -> None:
    seat = {"harness": {"id": "sorter_env"}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": "sorter_env"}, "agent": seat}
    )
    env = load_environment(config)
    async with env.serving(), httpx2.AsyncClient(timeout=None, trust_env=False) as http:
        await asyncio.gather(*(serve(http, env, url, tokenizer) for _ in range(TOGETHER)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
