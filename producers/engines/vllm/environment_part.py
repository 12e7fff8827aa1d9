"""The installed vLLM: its release, the environment variables that must be set before its first
import, and the error where it is missing.

vLLM's interfaces for reinforcement learning change between releases, so one release is supported at
a time; any other is refused by its number, so that it does not fail inside vLLM.
"""

import os
from importlib.metadata import PackageNotFoundError, version

import torch

from rollstream.errors import ConfigurationError

RELEASE = "0.32"
INSTALL = "the CPU build by `make vllm`, the GPU build by `pip install 'rollstream[vllm]'`"

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # set for each engine separately
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a rollout has threads when its engine starts
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "NUMBA_NUM_THREADS": "1",
}
_WITHOUT_A_GPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else 16 s of compilation in the first batch
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # rollouts of a machine would share the first cores
}


def require_vllm() -> None:
    """Prepare the process for importing vLLM. Raises `ConfigurationError` with what to install."""
    found = installed_release()
    if found is None:
        raise ConfigurationError(f"rollouts.engine: 'vllm' is not installed; get {INSTALL}")
    if not found.startswith(f"{RELEASE}."):
        raise ConfigurationError(
            f"rollouts.engine: vLLM {found} is installed, this engine is written for {RELEASE}; "
            f"get {INSTALL}"
        )
    for name, value in (_ALWAYS if has_gpu() else _ALWAYS | _WITHOUT_A_GPU).items():
        os.environ.setdefault(name, value)


def installed_release() -> str | None:
    """The installed release of vLLM, None where it is missing."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def has_gpu() -> bool:
    return torch.cuda.is_available()
