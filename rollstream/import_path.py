"""Imports a user's own code, which a setting names as `module:attribute` (`find_callable`), and the
options that the project's registries name so (`load_option`); gives the command line and
environment of child processes (`module_command`, `module_environment`).

A user's working directory may hold a `storage.py` or `queue.py`, which must not be imported in
place of a module of Rollstream or of the standard library. So child processes run with Python's
option `-P`, which leaves the working directory out of the search for modules; `find_callable` then
makes it the last folder of the search.
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

OLD_ROOTS = ("streams", "storage", "producers", "consumers", "simulator")
"""Packages of release 0.1 that users imported by these names; they are now inside `rollstream`."""
_API = "rollstream.api"
_NEW_NAMES = {
    "consumers.trainer.choice": "rollstream.consumers.trainer.data.selection",
    "producers.scoring.finished": _API,
    "producers.tasks.base": _API,
    "streams.connect": _API,
    "streams.records": _API,
    "streams.writer": _API,
}
"""Maps import names of release 0.1 to the present modules, where more changed than the
`rollstream.` in front.
"""


def load_option(name: str) -> Any:
    """Returns what `module:attribute` names, of one of the project's own registries of options
    (`ENGINES`, `STORES` and the like); its module is imported now.
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def find_callable(path: str, setting: str) -> Callable[..., object]:
    """Import the callable that `path`, a text `module:attribute`, names. The module may be in the
    working directory.

    Raises `ConfigurationError` if there is no such callable. The message names `setting`, from
    which `path` comes, and the cause; for an import name of release 0.1 it has the new name.
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
    except (Exception, SystemExit) as error:  # a user's module may raise anything
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
            + _hidden_hint(module, module_name)
        )
    return found


def _spelling(named: str, attribute: str) -> str:
    """Returns how a file that was named by its path is named as a module; "" if that is unknown."""
    file = Path(named if named.endswith(".py") else f"{named}.py").expanduser()
    file = Path(os.path.relpath(file)) if file.is_absolute() else Path(os.path.normpath(file))
    parts = file.with_suffix("").parts
    if ".." in parts:
        return f": put {file.name} there, or its folder on PYTHONPATH"
    if not all(part.isidentifier() for part in parts):
        return ", so rename what has other characters than letters, digits and _"
    return f", e.g. {'.'.join(parts)}:{attribute}"


def _hidden_hint(module: ModuleType, name: str) -> str:
    """Returns that another file was imported than the one in the working directory; "" if there is
    none.
    """
    own = Path(f"{name.replace('.', '/')}.py").absolute()
    imported = getattr(module, "__file__", None) or "a module of Python itself"
    if not own.is_file() or imported == str(own):
        return ""
    return f"; {imported} was imported, which hides {own}: give that file another name"


def find_function(path: str, setting: str, arguments: Sequence[str]) -> Callable[..., object]:
    """Import as `find_callable` does, and check that what is there can be called with so many
    arguments; `arguments` are their names for the error message.
    """
    function = find_callable(path, setting)
    try:
        taken = signature(function)
    except (TypeError, ValueError):  # of a function in C nothing is known
        return function
    try:
        taken.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{setting} = {path!r} takes {taken} and is called as "
            f"{path.rpartition(':')[2]}({', '.join(arguments)}): {error}"
        ) from None
    return function


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the end of an error message about an unknown name: `; did you mean 'x'?` with the
    most similar known name, or "" if none is similar enough (`cutoff`, from 0 to 1).
    """
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs `module` in a child process, with the same Python as this
    process. The child's environment must contain `module_environment()`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Returns the variable `PYTHONPATH` with which a child process finds Rollstream, or no variable
    if none is needed. If this process uses a checkout that is not installed, it found the checkout
    in the working directory or in `sys.path`. The child would not find it: `-P` leaves out the
    working directory, and `sys.path` is not inherited. So the checkout is added to `PYTHONPATH`.
    """
    here = str(Path(__file__).resolve().parents[1])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_installed = Path(here).name in ("site-packages", "dist-packages")
    if here in sys.path and here not in given and not is_installed:
        given.insert(0, here)
    return {"PYTHONPATH": os.pathsep.join(given)} if given else {}


def _import_hint(error: ImportError, module_name: str) -> str:
    """Returns what to do about the error. Only if the module itself, or a package that it is in, is
    missing does its place matter; otherwise it was found, and something that it imports was not.
    """
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
        return f"is its folder the working directory ({os.getcwd()}) or on PYTHONPATH?"
    if isinstance(error, ModuleNotFoundError):
        return f"the module was found, but it imports {missing!r}: install that beside Rollstream"
    return "the module was found, but one of its imports fails: mend that import"


def _renamed(missing: str, module_name: str) -> str:
    """Returns a hint with the new import name if one of the two names (the module that was not
    found, and the one that the user wrote) is from release 0.1; "" otherwise.
    """
    for name in (module_name, missing):
        if name.partition(".")[0] in OLD_ROOTS:
            new = _NEW_NAMES.get(name, f"rollstream.{name}")
            return f"since release 0.2 it is imported as {new!r}"
    return ""
