"""The policies of deploy/access/, imported from there: that folder is no package."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from testbed.repository import ROOT

FILE = ROOT / "deploy" / "access" / "policies.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("deploy_policies", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rights() -> Mapping[str, Mapping[str, list[str]]]:
    return _module().RIGHTS


def iam_policy(role: str, bucket: str, prefix: str) -> dict[str, Any]:
    return _module().iam_policy(role, bucket, prefix)
