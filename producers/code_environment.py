"""The environment of processes that run code of a task: named variables without the run's
credentials (`allowed_variables`), and where they find modules.

A process that runs the user's functions in Rollstream's Python finds what this process finds
(`with_own_path`). A program that the user gives as a command is started as a shell would start it
(`of_a_program`): another Python would break on Rollstream's modules.
"""

import os
import sys
from collections.abc import Mapping, Sequence

OWN_VARIABLES = ("KAFKA_", "AWS_", "ROLLSTREAM_")
"""Prefixes of the environment variables that hold the run's credentials and settings. The processes
that run a task's code get no such variable.
"""
_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_VISIBLE_DEVICES
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE TOKENIZERS_PARALLELISM
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME XDG_CACHE_HOME
"""
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_")


def allowed_variables(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Returns those variables of `environment` that a task's code gets: paths of programs,
    libraries and caches, language, threads, and those that `task.environment` names (`named`).
    Variables of the run's credentials and settings (`OWN_VARIABLES`) are left out even if they are
    named.

    A task's code may execute a part of a model's answer. An answer that prints its environment
    finds neither the broker's password nor the store's keys.
    """
    wanted = {*_NAMES.split(), *named}
    return {
        name: text
        for name, text in environment.items()
        if (name in wanted or name.startswith(_ALLOWED_PREFIXES))
        and not name.startswith(OWN_VARIABLES)
    }


_PATH, _GIVEN_PATH = "PYTHONPATH", "PYTHONPATH_GIVEN"


def with_own_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that imports what this process can import."""
    found = os.pathsep.join(path for path in sys.path if path)
    given = variables.get(_GIVEN_PATH, variables.get(_PATH, ""))
    return {**variables, _PATH: found, _GIVEN_PATH: given}


def of_a_program(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a command of the user, below any number of `with_own_path`."""
    kept = {name: text for name, text in variables.items() if name not in (_PATH, _GIVEN_PATH)}
    given = variables.get(_GIVEN_PATH, variables.get(_PATH, ""))
    return {**kept, _PATH: given} if given else kept
