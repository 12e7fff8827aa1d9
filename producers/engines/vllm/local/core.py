"""`EngineCore` with a vLLM engine on this machine. Only this file uses vLLM's request and output
classes (docs/how-to/vllm.md).
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engines.vllm.local.environment import (
    AdapterSizes,
    VllmShape,
    installed_release,
)
from rollstream.producers.engines.vllm.local.parameter_map import architecture_of
from rollstream.producers.engines.vllm.local.proposer import draft_config, request_arguments
from rollstream.producers.engines.vllm.local.protocol import (
    CoreLoad,
    CoreRequest,
    PauseResult,
    ServedAdapter,
    StepOutput,
)
from rollstream.producers.engines.vllm.local.staging import NamedTensors, StagedFile
from rollstream.storage.weights.mapped import MappedTensors
from rollstream.streams.values import Sampling

CHECK_S = 1.0  # between two checks that the core's process lives


def call_core(client: Any, method: str, *arguments: Any) -> Any:
    """Raises vLLM's `EngineDeadError` if the core's process has ended."""
    from rollstream.producers.engines.vllm.local.release import EngineCoreRequestType

    answer, name = Future[Any](), time.monotonic_ns()
    client.utility_results[name] = answer
    client._send_input(EngineCoreRequestType.UTILITY, (0, name, method, arguments))
    # vLLM 0.32's own `call_utility` waits for ever if the core's process dies during a call. A
    # rollout that hangs there neither generates nor is restarted.
    while True:
        try:
            return answer.result(CHECK_S)
        except TimeoutError:
            client.ensure_alive()


def replace_core_calls(client: Any) -> None:
    """Make vLLM's own calls to its core go through `call_core`: none outlives the core."""
    client.call_utility = partial(call_core, client)


WORKER_CLASS = "rollstream.producers.engines.vllm.local.worker.WorkerExtension"
BACKEND = "rollstream"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # all that vLLM takes (vllm/config/lora.py)
FP32_HEAD = {"head_dtype": "float32"}
"""Computes the head in float32, as the trainer does: a lower precision causes most of the two
sides' difference in log-probabilities (PipelineRL, arXiv 2509.19128).
"""

# All engines of a process share torch's process groups, which would end when Python frees one of
# the engines. So none is ever freed: a released one is used again for the same model and shape.
_CORES: list["LocalCore"] = []


class LocalCore:
    """Runs one model in vLLM, with dummy weights until weights are loaded. With `shape.process`
    vLLM's core is a process of its own, and computes between two calls of `step` too.
    """

    def __init__(self, config: PreTrainedConfig, shape: VllmShape) -> None:
        from rollstream.producers.engines.vllm.local.release import LLMEngine

        self.load = CoreLoad()
        self.has_process = shape.process
        # `read_back` is called from another thread.
        self._lock = threading.RLock()
        # KV blocks are shared only within one load.
        self.loads = 0
        self.opened_for = (config.to_json_string(), shape)
        self.is_free = False
        self._keys: set[str] = set()
        with tempfile.TemporaryDirectory() as folder:
            write_config(config, Path(folder))
            self._engine = LLMEngine.from_engine_args(
                _engine_arguments(folder, shape),
                stat_loggers=[self._logger()],
                enable_multiprocessing=shape.process,
            )
        if shape.process:
            replace_core_calls(self._engine.engine_core)
        _CORES.append(self)
        cache: Any = self._engine.vllm_config.cache_config
        # vLLM keeps one block for itself.
        self.kv_capacity = (int(cache.num_gpu_blocks) - 1) * int(cache.block_size)

    def add(self, request: CoreRequest) -> None:
        from rollstream.producers.engines.vllm.local.release import (
            RequestOutputKind,
            SamplingParams,
        )

        s = request.sampling
        params = SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            seed=None if s.temperature == 0 else request.seed,
            max_tokens=request.room,
            stop_token_ids=list(s.stop),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=request_arguments(
                request.prompt, request.group, request.place, request.stay
            ),
        )
        prompt: Any = {"prompt_token_ids": request.tokens, "cache_salt": request.salt}
        adapter = None if request.adapter is None else _lora_request(request.adapter)
        with self._locked():
            self._engine.add_request(request.key, prompt, params, lora_request=adapter)
        self._keys.add(request.key)

    def step(self, wait_s: float) -> list[StepOutput]:
        """Returns [] if a core process finished no step in `wait_s`."""
        if self.has_process and not self._has_output(wait_s):
            with self._locked():
                self._engine.engine_core.ensure_alive()
            return []
        with self._locked():
            outputs = [_step_output(output) for output in self._engine.step()]
        self._keys.difference_update(output.key for output in outputs if output.finish is not None)
        return outputs

    def pause(self) -> PauseResult:
        """Make no step until `resume`; returns the outputs of earlier steps, all of the old
        version.
        """
        if not self.has_process:
            return PauseResult([])
        with self._locked():
            self._engine.engine_core.call_utility("pause_scheduler", "keep", False)
            # Outputs of steps before the pause arrive before its acknowledgement.
            return PauseResult(
                [output for _ in iter(self._queued_outputs, 0) for output in self.step(0.0)]
            )

    def resume(self) -> None:
        if self.has_process:
            with self._locked():
                self._engine.engine_core.call_utility("resume_scheduler")

    def drop(self, keys: Iterable[str]) -> None:
        dropped = list(keys)
        with self._locked():
            self._engine.abort_request(dropped)
        self._keys.difference_update(dropped)

    def release(self) -> None:
        try:
            self.drop(self._keys)
            self.resume()
            if self.opened_for[1].drafts:
                self.draft_from(None, "", None, "")
        except EngineRefused:  # its process has ended
            return
        self.load, self.is_free = CoreLoad(), True

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a worker's method, of the first of several workers."""
        return self.call_all(method, *arguments)[0]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        with self._locked():
            return list(self._engine.collective_rpc(method, args=arguments))

    def call_with_tensors(
        self,
        method: str,
        *arguments: Any,
        tensors: NamedTensors,
        mapped: MappedTensors | None = None,
    ) -> list[Any]:
        """Returns the results of a method of all workers, whose last argument is `tensors`."""
        if not self.has_process:
            return self.call_all(method, *arguments, tensors)
        # Workers in another process read shared memory, or the file that has the tensors.
        with contextlib.closing(StagedFile(tensors, mapped)) as file:
            return self.call_all("call_staged", method, arguments, file.path, file.entries)

    def draft_from(self, source: Any, window: str, forced: bool | None, counters_path: str) -> None:
        """Draft from this history and count drafts in the file `counters_path`; without a `source`,
        stop drafting. `worker.py` has the meaning of `window` and `forced`.
        """
        self.call("draft_from", source, window, forced, counters_path)

    def stamp(self, version: str) -> None:
        self.loads += 1
        with self._locked():
            self._engine.set_weight_version(version)

    def load_adapter(self, adapter: ServedAdapter) -> None:
        with self._locked():
            self._engine.add_lora(_lora_request(adapter, load_inplace=True))

    def unload_adapter(self, number: int) -> None:
        with self._locked():
            self._engine.remove_lora(number)

    def reset_cache(self) -> None:
        with self._locked():
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def test_step(self) -> None:
        # A model that vLLM's kernels cannot compute fails only in a step.
        self.add(CoreRequest("try", [0], Sampling(temperature=0), 1, 0, "try"))
        while not any(output.finish for output in self.step(1.0)):
            pass

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        from rollstream.producers.engines.vllm.local.release import EngineDeadError

        try:
            with self._lock:
                yield
        except EngineDeadError as error:
            raise EngineRefused(f"vLLM's core ended: {error}") from error

    def _queued_outputs(self) -> int:
        return len(self._engine.engine_core.outputs_queue.queue)

    def _has_output(self, wait_s: float) -> bool:
        queue = self._engine.engine_core.outputs_queue
        with queue.not_empty:
            return queue.not_empty.wait_for(lambda: len(queue.queue) > 0, wait_s)

    def _logger(self) -> Any:
        from rollstream.producers.engines.vllm.local.release import StatLoggerBase

        core = self

        class Listener(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    s = scheduler_stats
                    core.load = CoreLoad(s.num_running_reqs, s.num_waiting_reqs, s.kv_cache_usage)

            def log_engine_initialized(self) -> None:
                pass

        return Listener


def open_core(config: PreTrainedConfig, shape: VllmShape) -> LocalCore:
    """Returns a released core of this model and shape, else a new one. Raises `EngineRefused` for a
    model that vLLM cannot serve on this machine, `ConfigurationError` for an unknown argument.
    """
    for core in _CORES:
        if core.is_free and core.opened_for == (config.to_json_string(), shape):
            core.is_free = False
            return core
    check_arguments(shape.args)
    try:
        core = LocalCore(config, shape)
        core.test_step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise EngineRefused(f"vLLM does not serve {type(config).__name__} here: {error}") from error
    return core


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    content = config.to_dict() | {"architectures": [architecture_of(config)]}
    (folder / "config.json").write_text(json.dumps(content, default=str), encoding="utf-8")


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError`, with the nearest name, for an argument unknown to the installed
    vLLM.
    """
    from rollstream.producers.engines.vllm.local.release import EngineArgs

    arguments: Any = EngineArgs
    argument_names = [argument.name for argument in fields(arguments)]
    for name in args.keys() - set(argument_names):
        near = get_close_matches(name, argument_names, n=1)
        nearest = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"rollouts.vllm.args: vLLM {installed_release()} has no argument {name!r}{nearest}"
        )


def _engine_arguments(folder: str, shape: VllmShape) -> Any:
    from rollstream.producers.engines.vllm.local.release import EngineArgs

    return EngineArgs(**own_arguments(folder, shape) | _typed_arguments(shape.args))


def _lora_request(adapter: ServedAdapter, load_inplace: bool = False) -> Any:
    from rollstream.producers.engines.vllm.local.release import LoRARequest

    return LoRARequest(adapter.name, adapter.id, adapter.path, load_inplace=load_inplace)


def _adapter_arguments(sizes: AdapterSizes | None) -> dict[str, Any]:
    return {
        "enable_lora": sizes is not None,
        # The smallest sufficient rank.
        "max_lora_rank": 16 if sizes is None else min(r for r in LORA_RANKS if r >= sizes.rank),
        "max_loras": 1 if sizes is None else sizes.together,
        "max_cpu_loras": None if sizes is None else sizes.kept,
        "lora_target_modules": None if sizes is None else list(sizes.targets),
    }


def _typed_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    from rollstream.producers.engines.vllm.local.release import KVTransferConfig

    typed = dict(args)
    if isinstance(typed.get("kv_transfer_config"), dict):
        # vLLM does not convert this table itself.
        typed["kv_transfer_config"] = KVTransferConfig(**typed["kv_transfer_config"])
    return typed


def own_arguments(folder: str, shape: VllmShape) -> dict[str, Any]:
    from rollstream.producers.engines.vllm.local.release import WeightTransferConfig

    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": shape.dtype,
        "max_model_len": shape.context_max,
        "max_num_seqs": shape.slots,
        "hf_overrides": FP32_HEAD if shape.head_float32 else {},
        "tensor_parallel_size": shape.tensor_parallel,
        "gpu_memory_utilization": shape.memory_share,
        "enforce_eager": shape.eager,
        "enable_chunked_prefill": shape.chunked,
        "max_num_batched_tokens": shape.step_tokens,
        "block_size": shape.block,
        "num_gpu_blocks_override": shape.blocks,
        "kv_cache_memory_bytes": shape.kv_bytes,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        # Off (False) where the core is in this process: an unfinished step would end under the next
        # version. Off with drafts: a draft needs the tokens of the step before. None: vLLM decides.
        "async_scheduling": None if shape.process and not shape.drafts else False,
        "speculative_config": draft_config(shape.drafts, shape.slots, shape.eager),
        "worker_extension_cls": WORKER_CLASS,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        **_adapter_arguments(shape.adapters),
    }


def _step_output(output: Any) -> StepOutput:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    rows = completion.logprobs or []
    logprobs = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
    stamped = completion.weight_versions or ()
    return StepOutput(
        output.request_id,
        tokens,
        logprobs,
        completion.finish_reason,
        tuple((span.version, span.start) for span in stamped),
    )
