"""Public names of a package that are imported on first use (PEP 562), so that importing one light
module of a package never imports torch, DuckDB or a Kafka client.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package: `names` lists, by module, the names that it exports."""
    module_of = {name: module for module, exported in names.items() for name in exported}

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return load
