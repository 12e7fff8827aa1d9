"""The reading list of CONTRIBUTING.md is one evening: few files, few lines, each of which names the
file before and after it.
"""

import ast
import re

from testbed.repository import ROOT

FILES_MAX, LINES_MAX = 25, 6000
LISTED = re.findall(
    r"^\d+\. `([\w/]+\.py)`: ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_the_core_is_read_in_one_evening() -> None:
    lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file in LISTED}
    assert 20 <= len(lines) == len(LISTED) <= FILES_MAX
    assert sum(lines.values()) <= LINES_MAX


def test_each_file_names_what_comes_before_and_after() -> None:
    around = zip(["", *LISTED], LISTED, [*LISTED[1:], ""], strict=False)
    for before, file, after in around:
        docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
        begin = f"after `{before}`, " if before else "begins here, "
        end = f"before `{after}`." if after else f"after `{before}`."
        stated = " ".join(docstring.rpartition("Reading list: ")[2].split())
        assert stated == (begin + end if after else f"ends here, {end}"), file
