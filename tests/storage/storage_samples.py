"""A tiny model's configuration, and racing threads, for several tests of this folder."""

import threading
from concurrent.futures import ThreadPoolExecutor

TINY = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def in_threads(count, work):
    """Returns the results of `work(number)` in `count` threads that start together."""
    barrier = threading.Barrier(count)

    def start(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))
