"""A server's worker extension: `vllm serve --worker-extension-cls
rollstream.producers.engines.vllm.remote.worker.ServerWorker`. A method that can refuse a call
returns `{"refused": reason}` then, `{}` otherwise.
"""

from collections.abc import Callable
from typing import Any

from rollstream.errors import RollstreamError
from rollstream.producers.engines.vllm.local.parameter_map import served_part
from rollstream.producers.engines.vllm.local.staging import StagedTensor
from rollstream.producers.engines.vllm.local.uploads import UPLOADS
from rollstream.producers.engines.vllm.local.worker import WorkerExtension
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash

RpcAnswer = dict[str, Any]


class ServerWorker(WorkerExtension):
    """A remote rollout, the server's owner, uploads a version in chunks (`put_piece`,
    `check_chunk`); then vLLM's own calls load them (`transfer.py`).
    """

    vllm_config: Any

    def describe(self) -> RpcAnswer:
        """`slots` is the most sequences that run at once, `kv_tokens` the capacity of the KV cache,
        `engines` counts data and pipeline parallelism.
        """
        c, blocks = self.vllm_config, self.model_runner.kv_cache_config.num_blocks
        transfer = c.weight_transfer_config
        return {
            "architectures": list(c.model_config.architectures),
            "vocabulary": int(c.model_config.get_vocab_size()),
            "context_max": int(c.model_config.max_model_len),
            "slots": int(c.scheduler_config.max_num_seqs),
            "kv_tokens": (int(blocks) - 1) * int(c.cache_config.block_size),  # vLLM keeps one block
            "logprobs": str(c.model_config.logprobs_mode),
            "stream_interval": int(c.scheduler_config.stream_interval),
            "transfer": transfer.backend if transfer else None,
            "device": str(c.device_config.device_type),
            "tensor_parallel": int(c.parallel_config.tensor_parallel_size),
            "engines": int(c.parallel_config.data_parallel_size)
            * int(c.parallel_config.pipeline_parallel_size),
            "drafts": c.speculative_config is not None,
        }

    def claim(self, owner: str) -> RpcAnswer:
        """Make this rollout the owner: end the previous owner's update and refuse its calls."""
        UPLOADS.claim(owner)
        self.give_up_update()
        return {}

    def check_owner(self, owner: str) -> RpcAnswer:
        return _rpc_answer(lambda: UPLOADS.check_owner(owner))

    def put_piece(self, owner: str, name: str, size: int, begin: int, piece: str) -> RpcAnswer:
        """Receives a piece (base64) of a chunk of `size` bytes; it belongs at byte `begin`."""
        return _rpc_answer(lambda: UPLOADS.put(owner, name, size, begin, piece))

    def check_chunk(
        self, owner: str, name: str, entries: list[StagedTensor], hashes: list[str]
    ) -> RpcAnswer:
        """Check a chunk's tensors; a refusal names the one that differs."""
        return _rpc_answer(lambda: UPLOADS.check(owner, name, entries, hashes))

    def progress(self) -> dict[str, int]:
        """Returns generated tokens by vLLM's request id (of a resumed request, since vLLM received
        it).
        """
        runner = self.model_runner
        if hasattr(runner, "requests"):
            return {name: len(state.output_token_ids) for name, state in runner.requests.items()}
        states = runner.req_states  # vLLM's second model runner
        total, prompt_lengths = states.total_len.gpu.cpu(), states.prompt_len.np
        return {
            name: int(total[i]) - int(prompt_lengths[i])
            for name, i in states.req_id_to_index.items()
        }

    def served_hashes(self, names: list[str]) -> dict[str, list[tuple[str, str]]]:
        """Returns dtype and hash of every served copy of this worker's part, by tensor name."""
        model = self.model_runner.get_model()
        hashes: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            # On a CPU vLLM can have two copies of a matrix.
            copies = [copy.contiguous() for copy in served_part(model, name).copies()]
            kinds = [DTYPE_NAMES[copy.dtype] for copy in copies]
            hashes[name] = [
                (kind, tensor_hash(kind, tuple(copy.shape), tensor_bytes(copy)))
                for kind, copy in zip(kinds, copies, strict=True)
            ]
        return hashes


def _rpc_answer(do: Callable[[], None]) -> RpcAnswer:
    try:
        do()
    except RollstreamError as error:
        return {"refused": str(error)}
    return {}
