"""The example loss in docs/explanation/learning.md keeps its contract."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "learning.md"


def test_the_loss_of_the_page_keeps_its_contract(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# my_loss\.py\n.*?)```", PAGE.read_text("utf-8"), re.S)
    (tmp_path / "my_loss.py").write_text(code, encoding="utf-8")
    subprocess.run([sys.executable, "my_loss.py"], cwd=tmp_path, check=True)
    wrong = code.replace("return -tokens.logprobs", "return -tokens.logprobs.detach()")
    (tmp_path / "my_loss.py").write_text(wrong, encoding="utf-8")
    done = subprocess.run([sys.executable, "my_loss.py"], cwd=tmp_path, capture_output=True)
    assert done.returncode != 0
    assert b"no gradient" in done.stderr
