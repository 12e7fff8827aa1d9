"""Verifiers of the task `dataset` that run the program of an answer: `task.options.verifier =
"rollstream.producers.sandbox.grading:passes_tests"` (docs/how-to/run-code-in-a-sandbox.md).

Each test runs in a clean sandbox of its own, never in one that an episode used. What is expected is
compared outside of it and never enters it, so a program can neither read nor change it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from rollstream.producers.sandbox.factory import run
from rollstream.producers.tasks.base import Score

TESTS_MAX = 256  # of one prompt
_FENCED = re.compile(r"```[ \t]*([A-Za-z0-9+_-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)
_LANGUAGES = {"": "python", "py": "python", "python3": "python", "bash": "sh", "js": "javascript"}
_CALL = """\
import json, runpy
result = eval(compile(open("call.txt").read(), "call", "eval"), runpy.run_path("answer.py"))
print("\\n" + json.dumps(result))
"""


class ProgramTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test: either `stdin` is given and `stdout` expected, spaces at the ends of lines and empty
    lines at the end aside; or the Python expression `call` is evaluated in the program's module,
    and a result equal to the JSON value `returns` is expected.
    """

    stdin: str = ""
    stdout: str | None = None
    call: str = ""
    returns: object = None


def passes_tests(answer: str, reference: object) -> Score:
    """Return the reward 1 if the program in the answer passes all tests of the reference, else 0,
    and the share that it passes as the score `passed`. The reference is a list of tests
    (`ProgramTest`). Raises `ValueError` for another reference.
    """
    tests = read_tests(reference)
    language, program = program_of(answer)
    if not program:
        return Score(0.0, {"passed": 0.0, "style/has_program": 0.0})
    passed = sum(_passes(program, language, test) for test in tests)
    scores = {"passed": passed / len(tests), "style/has_program": 1.0}
    return Score(float(passed == len(tests)), scores)


def read_tests(reference: object) -> list[ProgramTest]:
    """Return the tests of a reference: a list, or a table with the list as `tests`."""
    if isinstance(reference, Mapping):
        reference = cast(Mapping[str, object], reference).get("tests")
    try:
        tests = msgspec.convert(reference, list[ProgramTest])
    except msgspec.ValidationError as error:
        raise ValueError(f"the reference is no list of tests: {error}") from error
    if not 0 < len(tests) <= TESTS_MAX:
        raise ValueError(f"the reference has {len(tests)} tests; 1 to {TESTS_MAX} are allowed")
    for number, test in enumerate(tests):
        if bool(test.call) == (test.stdout is not None):
            raise ValueError(f"test {number} needs either `stdout` or `call`")
    return tests


def program_of(answer: str) -> tuple[str, str]:
    """Return the language and the text of the program in an answer: its last fenced block, else all
    of it as Python.
    """
    blocks: Sequence[tuple[str, str]] = _FENCED.findall(answer)
    if not blocks:
        return "python", answer.strip()
    language, program = blocks[-1]
    return _LANGUAGES.get(language.lower(), language.lower()), program


def _passes(program: str, language: str, test: ProgramTest) -> bool:
    if test.call:
        return language == "python" and _returns(program, test)
    try:
        result = run(program, language=language, stdin=test.stdin)
    except ValueError:  # a language that no sandbox runs
        return False
    assert test.stdout is not None
    return result.ok and _lines(result.text) == _lines(test.stdout)


def _returns(program: str, test: ProgramTest) -> bool:
    files = {"answer.py": program, "call.txt": test.call}
    result = run(_CALL, files=files)
    lines = result.text.strip().splitlines()
    if not result.ok or not lines:
        return False
    try:
        return json.loads(lines[-1]) == test.returns
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
