"""Imports a user's own code by `module:attribute`, and finds the Python of child processes.

A user's folder may hold `storage.py` or `queue.py`. Child processes run with `-P`, so Python never
imports such a file in place of a module of Rollstream or of the standard library; Python searches
the working directory last, and only for code that a setting names.
"""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from rollstream.errors import ConfigurationError

OLD_ROOTS = ("streams", "storage", "producers", "consumers", "simulator")
_API = "rollstream.api"
_NEW_NAMES = {
    "consumers.trainer.choice": "rollstream.consumers.trainer.data.selection",
    "producers.scoring.finished": _API,
    "producers.tasks.base": _API,
    "streams.connect": _API,
    "streams.records": _API,
    "streams.writer": _API,
}
"""Maps import names of release 0.1 that users wrote to the present modules; every other old name
only gets `rollstream.` in front.
"""


def find_callable(path: str, setting: str) -> Callable[..., object]:
    """Import the callable that `path` names; error messages name the setting `setting`.

    Raises `ConfigurationError` if there is none, with the setting, the failure and, for an import
    name of release 0.1, the new name.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigurationError(f"{setting} = {path!r}: write it as `module:attribute`")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting} = {path!r}: module {module_name!r} cannot be imported ({error}); "
            + (
                _renamed(error.name or "", module_name)
                or f"is its folder the working directory ({os.getcwd()}) or on PYTHONPATH?"
            )
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ConfigurationError(
            f"{setting} = {path!r}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        has = f"has {attribute!r}, which is not callable"
        hint = nearest(attribute, (name for name in dir(module) if not name.startswith("_")))
        missing = f"has no callable {attribute!r}{hint}"
        raise ConfigurationError(
            f"{setting} = {path!r}: {module_name} {missing if found is None else has}"
        )
    return found


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `; did you mean 'x'?` with the nearest known name, or "" if none is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs `module` with this Python. The child's environment must
    contain `module_environment()`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Returns the variable `PYTHONPATH` for a child process, or no variable if none is needed. A
    parent finds an uninstalled checkout through the working directory or `sys.path`; `-P` removes
    the first and a child does not inherit the second.
    """
    here = str(Path(__file__).resolve().parents[1])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_installed = Path(here).name in ("site-packages", "dist-packages")
    if here in sys.path and here not in given and not is_installed:
        given.insert(0, here)
    return {"PYTHONPATH": os.pathsep.join(given)} if given else {}


def _renamed(missing: str, module_name: str) -> str:
    """Returns a hint with the new name of a module of release 0.1; "" if neither name is one."""
    for name in (module_name, missing):
        if name.partition(".")[0] in OLD_ROOTS:
            new = _NEW_NAMES.get(name, f"rollstream.{name}")
            return f"since release 0.2 it is imported as {new!r}"
    return ""
