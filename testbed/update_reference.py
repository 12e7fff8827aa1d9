"""The reference of an in-flight update, by transformers: the new weights continue on the old
weights' cache. Import it as `testbed.update_reference` everywhere.
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from rollstream.streams.values import Tokens


def over_old_cache(
    old: PreTrainedModel, new: PreTrainedModel, start: Tokens, chosen: list[int], before: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and log-probabilities of the chosen ones: `before` of them by the old model,
    then by the new one on the old one's cache.
    """
    cache = DynamicCache()
    greedy: list[int] = []
    logprobs: list[float] = []
    step = torch.tensor([start.tolist()])
    for count, token in enumerate(chosen):
        model = old if count < before else new
        with torch.inference_mode():
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
        greedy.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token]))
        step = torch.tensor([[token]])
    return greedy, torch.tensor(logprobs)
