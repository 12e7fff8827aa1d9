"""Imports code that a setting names as `module:attribute`, and options of registries. Child
processes run with `-P`: a `storage.py` in the working directory must not hide a module of
Rollstream or Python; `find_callable` appends that directory to the search.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from rollstream.errors import ConfigurationError

# Packages that users of release 0.1 imported by these names; now inside `rollstream`.
OLD_ROOTS = ("streams", "storage", "producers", "consumers", "simulator")
_API = "rollstream.api"
# Import names of release 0.1 → present modules, where more changed than `rollstream.` in front.
_NEW_NAMES = {
    "consumers.trainer.choice": "rollstream.consumers.trainer.data.selection",
    "producers.scoring.finished": _API,
    "producers.tasks.base": _API,
    "streams.connect": _API,
    "streams.records": _API,
    "streams.writer": _API,
}
# Folders of release 0.1 inside `rollstream` → present ones.
_NEW_FOLDERS = {
    **dict.fromkeys(("cli", "config", "metrics", "roles", "supervisor", "warmup"), "run"),
    **dict.fromkeys(("explorer", "monitor", "report"), "look"),
    "analysis": "look.query",
    "runs": "keep",
    "sizes": "plan",
    "tuning": "plan",
}


def load_option(name: str) -> Any:
    """`module:attribute` of a registry (`ENGINES`, `STORES` and the like)."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def find_callable(path: str, setting: str) -> Callable[..., object]:
    """`path` is `module:attribute`, perhaps in the working directory. Raises `ConfigurationError`,
    which names `setting` and the cause, or the new name for one of release 0.1.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigurationError(f"{setting} = {path!r}: write it as `module:attribute`")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigurationError(
            f"{setting} = {path!r}: {module_name!r} is no module's name; write it as Python "
            f"imports it from the working directory{_spelling(module_name, attribute)}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting} = {path!r}: module {module_name!r} cannot be imported ({error}); "
            + (_renamed(error.name or "", module_name) or _import_hint(error, module_name))
        ) from error
    # A user's module may raise anything.
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{setting} = {path!r}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        has = f"has {attribute!r}, which is not callable"
        hint = nearest(attribute, (name for name in dir(module) if not name.startswith("_")))
        missing = f"has no callable {attribute!r}{hint}"
        raise ConfigurationError(
            f"{setting} = {path!r}: {module_name} {missing if function is None else has}"
            + _hidden_hint(module, module_name)
        )
    return function


def _spelling(module_name: str, attribute: str) -> str:
    file = Path(module_name if module_name.endswith(".py") else f"{module_name}.py").expanduser()
    file = Path(os.path.relpath(file)) if file.is_absolute() else Path(os.path.normpath(file))
    parts = file.with_suffix("").parts
    if ".." in parts:
        return f": put {file.name} there, or its folder on PYTHONPATH"
    if not all(part.isidentifier() for part in parts):
        return ", so rename what has other characters than letters, digits and _"
    return f", e.g. {'.'.join(parts)}:{attribute}"


def _hidden_hint(module: ModuleType, name: str) -> str:
    local_file = Path(f"{name.replace('.', '/')}.py").absolute()
    imported = getattr(module, "__file__", None) or "a module of Python itself"
    if not local_file.is_file() or imported == str(local_file):
        return ""
    return f"; {imported} was imported, which hides {local_file}: give that file another name"


def find_function(path: str, setting: str, arguments: Sequence[str]) -> Callable[..., object]:
    """Finds the function as `find_callable`, checking that the function can be called with these
    `arguments`, named for the message.
    """
    function = find_callable(path, setting)
    try:
        taken = signature(function)
    # Of a function in C nothing is known.
    except (TypeError, ValueError):
        return function
    try:
        taken.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{setting} = {path!r} takes {taken} and is called as "
            f"{path.rpartition(':')[2]}({', '.join(arguments)}): {error}"
        ) from None
    return function


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of an error message, `; did you mean 'x'?`, or "" if no name is similar enough
    (`cutoff`, from 0 to 1).
    """
    near = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs `module` in a child process with this Python; its environment must contain
    `module_environment()`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """`PYTHONPATH` with which a child process finds Rollstream, if one is needed."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_installed = Path(root).name in ("site-packages", "dist-packages")
    # A checkout that is not installed was found by the working directory or `sys.path`, which the
    # child, with `-P`, does not have.
    if root in sys.path and root not in paths and not is_installed:
        paths.insert(0, root)
    return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}


def _import_hint(error: ImportError, module_name: str) -> str:
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
        return f"is its folder the working directory ({os.getcwd()}) or on PYTHONPATH?"
    if isinstance(error, ModuleNotFoundError):
        return f"the module was found, but it imports {missing!r}: install that beside Rollstream"
    return "the module was found, but one of its imports fails: mend that import"


def _renamed(missing: str, module_name: str) -> str:
    for name in (module_name, missing):
        if name.partition(".")[0] in OLD_ROOTS:
            new = _NEW_NAMES.get(name, f"rollstream.{name}")
            return f"since release 0.2 it is imported as {new!r}"
        top, _, _ = name.removeprefix("rollstream.").partition(".")
        if name.startswith("rollstream.") and top in _NEW_FOLDERS:
            folder = f"rollstream.{_NEW_FOLDERS[top]}"
            return f"since release 0.2 folder 'rollstream.{top}' is part of {folder!r}"
    return ""
