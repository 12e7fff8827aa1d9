"""The engine `vllm` against transformers and against vLLM by itself; needs vLLM (`make vllm`).

* `vllm_logprob_error`: an in-flight update between two greedy tokens (`exact.py`).

* `vllm_overhead`: a whole rollout worker against bare `AsyncLLM` (`overhead.py`).

* `vllm_update_pause`, full and delta, and `vllm_updates_lost` (`pause.py`).

* `vllm_drafts_batch_1`, `vllm_drafts_batch_8`, `vllm_drafts_worst` (`drafts.py`).

In each arm vLLM's core computes with one thread and this process with one, so two cores are enough.
"""

import os
from collections.abc import Iterator

import torch

from benchmarks.case import Case
from benchmarks.vllm.drafts import drafts
from benchmarks.vllm.exact import logprob_error
from benchmarks.vllm.overhead import BATCH, overhead
from benchmarks.vllm.pause import update_pause, updates_lost


def cases(quick: bool) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of the processes that are started from here on
    try:
        yield logprob_error(100 if quick else 400, BATCH)
        yield overhead(pairs=2 if quick else 6, lengths=[32 if quick else 128] * 3 * BATCH)
        yield updates_lost(20 if quick else 200, BATCH)
        yield from update_pause(pairs=1 if quick else 5)
        yield from drafts(quick)
    finally:
        torch.set_num_threads(threads)
