"""The shell of a game day's operator: words that the process of the game day answers
(`serve_words`). A word with its arguments is a file, and so is the answer, so that any number of
shells may come and go.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from testbed.repository import ROOT
from testbed.waiting import let_pass

POLL_S = 0.25
FINISH = "finish"
SHELL = """\
export GAME={folder} RUN={folder}/run PYTHONPATH={root}
. $GAME/credentials.sh
rollstream() {{ . $GAME/credentials.sh; {python} -m rollstream "$@"; }}
ask() {{
  (
    flock 9
    printf '%s\\0' "$@" > $GAME/control/.asked; mv $GAME/control/.asked $GAME/control/asked
    while [ -e $GAME/control/asked ]; do kill -0 {pid} || exit 1; sleep 0.2; done
    cat $GAME/control/answer
  ) 9> $GAME/control/lock
}}
for word in {words}; do eval "$word() {{ ask $word \\"\\$@\\"; }}"; done
"""


def serve_words(
    folder: Path, answers: Mapping[str, Callable[..., str]], between: Callable[[], None]
) -> None:
    """Answer the words that shells ask after `. FOLDER/env.sh`, until `finish`; `between` is called
    several times a second. An answer that raises is the text of its error.
    """
    control, word = folder / "control", ""
    control.mkdir()
    words = " ".join([*answers, FINISH])
    shell = {"folder": folder, "root": ROOT, "python": sys.executable, "pid": os.getpid()}
    (folder / "env.sh").write_text(SHELL.format(**shell, words=words))
    print(f"ready: . {folder}/env.sh", flush=True)
    while word != FINISH:
        let_pass(POLL_S)
        between()
        if (control / "asked").exists():
            word, *given = (control / "asked").read_text().split("\0")[:-1]
            answer = _answer(answers.get(word, lambda: "finished"), given)
            (control / "answer").write_text(answer + "\n")
            (control / "asked").unlink()


def _answer(answer: Callable[..., str], given: Sequence[str]) -> str:
    try:
        return answer(*given)
    except Exception as error:  # noqa: BLE001 - the day goes on whatever one request meets
        return f"failed: {type(error).__name__}: {error}"
