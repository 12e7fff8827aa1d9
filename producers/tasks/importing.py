"""Loads your own code by `module:attribute`, from the working directory or PYTHONPATH.

A mistake raises `ConfigurationError`, which names the setting and what was found instead; nothing
is guessed.
"""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module

from rollstream.errors import ConfigurationError


def find_callable(path: str, setting: str) -> Callable[..., object]:
    """The callable that `path` names; `setting` names the setting in error messages."""
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigurationError(f"{setting} = {path!r}: write it as `module:attribute`")
    if os.getcwd() not in sys.path:  # like `python -m`, also for the console script
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting} = {path!r}: module {module_name!r} cannot be imported ({error}); "
            f"is its folder the working directory ({os.getcwd()}) or on PYTHONPATH?"
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
    """`; did you mean 'x'?`, or an empty text."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
