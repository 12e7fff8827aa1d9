"""Every number that the simulator assumes, with its source, known or within a range, over which
`benchmarks/simulator/` prints the results; all were written before any result. None is fitted to a
published ratio of two policies' speeds, and none may be.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """`low` and `high` are the range of an assumed value."""

    value: float
    unit: str
    source: str
    low: float
    high: float


def known(value: float, unit: str, source: str) -> Constant:
    """Its source states it, or the experiment sets it."""
    return Constant(value, unit, source, value, value)


def assumed(value: float, unit: str, why: str, low: float, high: float) -> Constant:
    """`why` gives the reason."""
    assert low <= value <= high
    return Constant(value, unit, why, low, high)


CONSTANTS = {
    # the accelerator
    "gpu_flops": known(989.4e12, "1/s", "NVIDIA H100/H800 SXM data sheet, dense bf16"),
    "gpu_bandwidth": known(3.35e12, "byte/s", "NVIDIA H100/H800 SXM data sheet, HBM3"),
    "gpu_memory": known(80e9, "byte", "NVIDIA H100/H800 SXM data sheet"),
    # generation
    "memory_share": known(0.9, "", "vLLM, default gpu_memory_utilization: weights and KV"),
    "memory_share_colocated": assumed(
        0.5, "", "verl rollout.yaml, gpu_memory_utilization beside a trainer", 0.5, 0.85
    ),
    "slots": assumed(
        1024, "", "verl rollout.yaml, max_num_seqs; vLLM's own default was 256 for long", 256, 1024
    ),
    "bandwidth_share": assumed(
        0.75, "", "of the peak in decode: what good kernels reach", 0.6, 0.9
    ),
    "decode_flops_share": assumed(0.5, "", "of the peak in a decode step's products", 0.35, 0.7),
    "prefill_flops_share": assumed(0.5, "", "of the peak in prefill", 0.35, 0.65),
    "step_overhead_s": assumed(
        0.004, "s", "scheduling, launch and sampling of a decode step", 0.002, 0.010
    ),
    "allreduce_s": assumed(
        15e-6, "s", "one small all-reduce over NVLink, two a layer, none at TP 1", 8e-6, 40e-6
    ),
    "kv_reserve": known(0.01, "", "vLLM's watermark: share of the KV cache kept free at admission"),
    # training
    "train_flops_per_parameter": assumed(
        8.0, "1/token", "6 forward and backward, 2 old log-probabilities, 2 with a reference", 8, 10
    ),
    "train_mfu": assumed(
        0.35, "", "Megatron-LM reports 0.47 in pre-training on H100; RL batches do worse", 0.2, 0.47
    ),
    "train_fixed_s": assumed(2.0, "s", "a step's optimiser, batching, logs", 0.5, 5.0),
    # weights
    "global_sync_bandwidth": assumed(
        8.25e9, "byte/s", "verl checkpoint engine: 30B in about 7 s by NCCL or NIXL", 8.25e9, 25e9
    ),
    "switch_bandwidth": assumed(
        13.7e9,
        "byte/s",
        "verl: 30B from trainer to engine in 4.38 s, formerly 15.76 s",
        3.8e9,
        13.7e9,
    ),
    "relay_stall_bandwidth": known(
        103e9, "byte/s", "Laminar §4: the actor stalls 0.64 s (32B), 1.40 s (72B)"
    ),
    "relay_chain_bandwidth": known(91e9, "byte/s", "Laminar §4: 72B to 127 relays below 1.6 s"),
    "pull_bandwidth": assumed(
        25e9, "byte/s", "host to one GPU; PCIe 5.0 x16 is 64e9 on paper", 12e9, 50e9
    ),
    "gpus_per_host": known(8, "", "Laminar §7: 128 machines of 8 H800"),
    "host_bandwidth": assumed(
        200e9,
        "byte/s",
        "memory of a host read by all pulls: half of 8 or 16 channels of DDR5-4800",
        100e9,
        400e9,
    ),
    "relay_chunk_bytes": assumed(
        64e6, "byte", "of a relay chain; Laminar does not state it", 16e6, 512e6
    ),
    "adapter_share": assumed(
        0.0106, "", "81 of 7616 million parameters: rank 32 on all linear layers", 0.005, 0.02
    ),
    # drafts
    "draft_found": assumed(
        0.6, "", "drafts.md, passes 2 to 8: look-ups that found a draft, the median", 0.51, 0.76
    ),
    "draft_rate": assumed(
        0.991,
        "",
        "drafts.md: from tokens per step and accepted share of each pass, the median",
        0.973,
        0.996,
    ),
    "draft_lookup_s": assumed(
        23e-6, "s", "drafts.md: a look-up in a run took 19 to 24 µs, alone 4.6", 4.6e-6, 24e-6
    ),
    # repack
    "repack_every_s": known(5.0, "s", "Laminar §5: about every 5 s and after each update"),
    "move_s": assumed(
        0.69, "s", "Laminar §8: overhead of a repack; re-prefill comes on top here", 0.0, 0.69
    ),
    # work
    "groups_per_step": known(512, "", "Laminar §8: 8192 = 512 prompts x 16"),
    "samples_per_group": known(16, "", "Laminar §8"),
    "length_max": known(16_384, "token", "Laminar §8: 16 K out"),
    "length_p99_over_median": known(10.0, "", "Laminar §2: p99 about 10 x the median"),
    "length_median": assumed(
        1638, "token", "then p99 is the limit of 16 K; shorter ones are never cut", 800, 2400
    ),
    "length_between_prompts": assumed(
        0.5, "", "share of the variance of log length that a prompt explains", 0.3, 0.8
    ),
    "prompt_tokens": assumed(250, "token", "DAPO-Math prompts; at most 2 K in Laminar", 100, 500),
    # policies
    "waves_outstanding": assumed(
        5, "", "AReaL's code has eta = 4; Laminar's largest observed lag is 4, so 4 + 1", 2, 9
    ),
    "quota_waves": assumed(
        1.0, "", "a rollout takes its share of a global batch before it pulls", 0.5, 2.0
    ),
    "areal_eta": known(8, "", "AReaL, mathematics"),
    "areal_rollout_share": known(0.75, "", "AReaL: inference to training GPUs 75 : 25"),
    "migrate_growth": assumed(
        1.5,
        "",
        "RhymeRL: beyond the predicted length; the paper does not give the factor",
        1.2,
        3.0,
    ),
    "repair_s": known(252.0, "s", "Laminar §8.5: full recovery of a machine"),
    # the experiment
    "steps": known(10, "", "length of the experiment"),
    "steps_skipped": known(3, "", "buffers fill and tails form before it is measured"),
}
"""A configuration's table `[constants]` replaces values.

The sources are the papers of Laminar (arXiv 2510.12633), RhymeRL (arXiv 2508.18588) and AReaL
(arXiv 2505.24298), and the libraries verl, vLLM and Megatron-LM. TP is tensor parallelism, MFU the
share of the peak arithmetic that training reaches, eta AReaL's bound on the lag, and a wave as many
groups as one step trains.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes from its published config.json. One replica runs on `tp` GPUs by tensor parallelism
    (assumed).
    """

    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    tp: int

    def weight_bytes(self) -> float:
        return 2.0 * self.parameters

    def kv_bytes(self) -> float:
        """Returns the bytes of one token's keys and values in bf16."""
        return 4.0 * self.layers * self.kv_heads * self.head_size


MODELS = {
    "qwen2.5-7b": Model(7.616e9, 28, 4, 128, 1),
    "qwen3-14b": Model(14.768e9, 40, 8, 128, 2),
    "qwen2.5-32b": Model(32.764e9, 64, 8, 128, 4),
    "qwen2.5-72b": Model(72.706e9, 80, 8, 128, 8),
}

ROLLOUT_SHARES = (0.25, 0.5, 0.75)
"""Of the GPUs; a policy that separates generation runs with its fastest share."""
