"""The environment of a task's code: named variables without the run's credentials, and the path of
modules.
"""

import os
import sys
from collections.abc import Mapping, Sequence

OWN_VARIABLES = ("KAFKA_", "AWS_", "ROLLSTREAM_")
"""Prefixes of the variables with the run's credentials and settings, which no task's code gets."""
_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_VISIBLE_DEVICES
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE TOKENIZERS_PARALLELISM
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME XDG_CACHE_HOME
"""
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_")


def allowed_variables(environment: Mapping[str, str], extra_names: Sequence[str]) -> dict[str, str]:
    """Returns paths of programs, libraries and caches, language, threads, and `extra_names`
    (`task.environment`), never `OWN_VARIABLES`.
    """
    # A task's code may execute a part of an answer, and an answer that prints its environment must
    # find neither the broker's password nor the store's keys.
    names = {*_NAMES.split(), *extra_names}
    return {
        name: text
        for name, text in environment.items()
        if (name in names or name.startswith(_ALLOWED_PREFIXES))
        and not name.startswith(OWN_VARIABLES)
    }


_PATH, _GIVEN_PATH = "PYTHONPATH", "PYTHONPATH_GIVEN"


def with_own_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that imports what this process can import."""
    module_path = os.pathsep.join(path for path in sys.path if path)
    outer_path = variables.get(_GIVEN_PATH, variables.get(_PATH, ""))
    return {**variables, _PATH: module_path, _GIVEN_PATH: outer_path}


def of_a_program(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables as a shell would start a user's command, below any number of
    `with_own_path`.
    """
    # Another Python would break on Rollstream's modules.
    others = {name: text for name, text in variables.items() if name not in (_PATH, _GIVEN_PATH)}
    outer_path = variables.get(_GIVEN_PATH, variables.get(_PATH, ""))
    return {**others, _PATH: outer_path} if outer_path else others
