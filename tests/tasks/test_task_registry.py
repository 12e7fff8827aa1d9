"""Tasks are found by name or import path; mistakes say what to do."""

import pytest

from producers.tasks.registry import load_task
from producers.tasks.remainder import Remainder
from streams.errors import ConfigurationError


def test_a_registered_name_builds_the_task_with_its_options():
    task = load_task("remainder", {"direct": 0.5})
    assert isinstance(task, Remainder)
    assert task.name == "remainder"


def test_an_import_path_builds_ones_own_task():
    assert load_task("odd_tasks:Odd", {}).name == "odd"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("remainer", {}, "did you mean 'remainder'"),
        ("zzz", {}, "registered: remainder, scripted"),
        ("odd_taskz:Odd", {}, "module 'odd_taskz' cannot be imported"),
        ("odd_tasks:Od", {}, "no callable 'Od'; did you mean 'Odd'"),
        ("odd_tasks:Path", {}, "without stop, tokenizer"),
        ("remainder", {"directt": 0.5}, "unexpected keyword argument 'directt'"),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, float], message: str):
    with pytest.raises(ConfigurationError) as caught:
        load_task(name, options)
    assert message in str(caught.value)
