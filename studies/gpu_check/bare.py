"""Bare vLLM on the prompts and lengths of a run: `python -m studies.gpu_check.bare FILE`.

It is a process of its own, so that it has the card to itself. Speed is measured while every slot is
filled, as in a run, and not in the tail, when the last requests decode alone. Prints one JSON
object.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rollstream.producers.engines.vllm.local.environment import has_gpu, require_vllm

WARM = 8  # requests


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    require_vllm()
    engine = _opened(asked)
    for index, request in enumerate(asked["requests"][:WARM]):
        _add(engine, f"warm-{index}", request)
    while engine.has_unfinished_requests():
        engine.step()
    print(json.dumps({"tokens_per_s": _measured(engine, asked)}), flush=True)


def _opened(asked: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    here: dict[str, Any] = {"gpu_memory_utilization": asked["share"], "dtype": "bfloat16"}
    if not has_gpu():
        here = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
        here |= {"kv_cache_memory_bytes": 64 << 20, "enable_chunked_prefill": False}
    arguments = EngineArgs(
        model=asked["model"],
        skip_tokenizer_init=True,
        max_model_len=asked["context"],
        max_num_seqs=asked["slots"],
        logprobs_mode="processed_logprobs",
        **here,
    )
    return LLMEngine.from_engine_args(arguments)


def _add(engine: Any, name: str, request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        max_tokens=request["length"],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)


def _measured(engine: Any, asked: dict[str, Any]) -> float:
    """Returns tokens per second until fewer requests remain than there are slots."""
    left = {str(index) for index in range(len(asked["requests"]))}
    for index, request in enumerate(asked["requests"]):
        _add(engine, str(index), request)
    least = min(asked["slots"], len(left)) if len(left) > asked["slots"] else 1
    tokens, began = 0, time.perf_counter()
    while len(left) >= least:
        for output in engine.step():
            tokens += sum(len(one.token_ids) for one in output.outputs)
            if output.finished:
                left.discard(output.request_id)
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
