"""Verifiers that run an answer's program (docs/how-to/run-code-in-a-sandbox.md), each test in a
clean sandbox, which the expected output never enters.
"""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from rollstream.foreign_json import parse_loose_json
from rollstream.producers.sandbox.base import SandboxResult
from rollstream.producers.sandbox.factory import LANGUAGES, run
from rollstream.producers.tasks.base import Score

TESTS_MAX = 256  # of one prompt
_FENCED = re.compile(r"```[ \t]*([A-Za-z0-9+_-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)
_LANGUAGES: Mapping[str, str] = {
    "": "python",
    "py": "python",
    "python3": "python",
    "bash": "sh",
    "js": "javascript",
}
_CALL = """\
import json
from answer import *
result = ({call})
print("\\n" + json.dumps(result))
"""


class ProgramTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With `stdin` the `stdout` is expected, spaces at the ends of lines and empty lines at the end
    aside; or the Python expression `call` must give the JSON value `returns`.
    """

    stdin: str = ""
    stdout: str | None = None
    call: str = ""
    returns: object = None


def passes_tests(answer: str, reference: object) -> Score:
    """Returns reward 1 if the program passes all tests of the reference (a list of `ProgramTest`),
    else 0; the score `passed` is the share. Raises `ValueError` for another reference.
    """
    tests = read_tests(reference)
    language, program = program_of(answer)
    is_called = any(test.call for test in tests)
    if not program or language not in LANGUAGES or (is_called and language != "python"):
        return Score(0.0, {"passed": 0.0, "style/has_program": 0.0})
    passed = _count_passed(program, language, tests)
    scores = {"passed": passed / len(tests), "style/has_program": 1.0}
    return Score(float(passed == len(tests)), scores)


def read_tests(reference: object) -> list[ProgramTest]:
    """Returns a list, or a table with the list as `tests`."""
    if isinstance(reference, Mapping):
        reference = cast(Mapping[str, object], reference).get("tests")
    try:
        tests = msgspec.convert(_without_nulls(reference), list[ProgramTest])
    except msgspec.ValidationError as error:
        raise ValueError(f"the reference is no list of tests: {error}") from error
    if not 0 < len(tests) <= TESTS_MAX:
        raise ValueError(f"the reference has {len(tests)} tests; 1 to {TESTS_MAX} are allowed")
    for number, test in enumerate(tests):
        if bool(test.call) == (test.stdout is not None):
            raise ValueError(f"test {number} needs either `stdout` or `call`")
    return tests


def _without_nulls(reference: object) -> object:
    if not isinstance(reference, list):
        return reference
    # In Parquet each row has all fields.
    return [
        {name: value for name, value in cast(dict[str, object], test).items() if value is not None}
        if isinstance(test, dict)
        else test
        for test in cast(list[object], reference)
    ]


def program_of(answer: str) -> tuple[str, str]:
    """Returns language and text: the answer's last fenced block, else all of it as Python."""
    blocks: Sequence[tuple[str, str]] = _FENCED.findall(answer)
    if not blocks:
        return "python", answer.strip()
    language, program = blocks[-1]
    return _LANGUAGES.get(language.lower(), language.lower()), program


def _count_passed(program: str, language: str, tests: Sequence[ProgramTest]) -> int:
    passed = 0
    for test in tests:
        result = _result(program, language, test)
        if result.ok:
            passed += _returns(result, test) if test.call else _prints(result, test)
        # A program that never ends must not cost its time as often as there are tests.
        if result.ended != "exit":
            break
    return passed


def _result(program: str, language: str, test: ProgramTest) -> SandboxResult:
    if not test.call:
        return run(program, language=language, stdin=test.stdin)
    return run(_CALL.replace("{call}", test.call), files={"answer.py": program})


def _prints(result: SandboxResult, test: ProgramTest) -> bool:
    return test.stdout is not None and _lines(result.text) == _lines(test.stdout)


def _returns(result: SandboxResult, test: ProgramTest) -> bool:
    # The program may print, too: the last line is the result.
    lines = result.text.strip().splitlines()
    try:
        return bool(lines) and parse_loose_json(lines[-1]) == test.returns
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
