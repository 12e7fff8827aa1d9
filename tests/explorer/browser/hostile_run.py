"""A run whose every text is hostile: each of `HOSTILE` is a token, an answer, and the name of a
task, a rollout, a score, an annotation and a scorer, and a reason. One answer is a line of 10 MB.
"""

import json
from pathlib import Path

import numpy as np

from rollstream.producers.tasks.character_tokenizer import SPECIAL
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Admitted, Annotation, GroupClosed, StepDone, Take, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, GroupMembers, Member, Span, Version
from rollstream.streams.writer import FencedWriter, publish

CALL = "window.hit=1,alert(1)"
HOSTILE = (
    f"<script>{CALL}</script>",
    f"</script><script>{CALL}</script>",
    f"<img src=x onerror={CALL}>",
    f"<svg onload={CALL}>",
    f"<body onload={CALL}>",
    f"<iframe src=javascript:{CALL}></iframe>",
    f"<a href='javascript:{CALL}'>click me</a>",
    f"<math><mi xlink:href='javascript:{CALL}'>x</mi></math>",
    f"<details open ontoggle={CALL}>",
    f"<input autofocus onfocus={CALL}>",
    "<style>@import 'http://192.0.2.1/x.css'; *{display:none}</style>",
    "<link rel=stylesheet href=http://192.0.2.1/x.css>",
    "<img src=http://192.0.2.1/pixel.png>",
    "<object data=http://192.0.2.1/x></object>",
    "<base href=http://192.0.2.1/>",
    "<meta http-equiv=refresh content='0;url=http://192.0.2.1/'>",
    f"<form action=http://192.0.2.1/><button>{CALL}</button></form>",
    f"'\"><script>{CALL}</script>",
    f"`${{{CALL}}}`",
    f"{{{{constructor.constructor('{CALL}')()}}}}",
    f"javascript:{CALL}",
    f"data:text/html,<script>{CALL}</script>",
    f"${{{CALL}}} #{{{CALL}}} <%= {CALL} %>",
    f"]]><script>{CALL}</script>",
    f"<!--><script>{CALL}</script-->",
    f"&lt;script&gt;{CALL}&lt;/script&gt;",
    f"&#60;script&#62;{CALL}",
    f"\\u003cscript\\u003e{CALL}",
    "__proto__",
    "constructor",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x1b[2J\x1b[H\x1b[8mhidden",
    "\r\nSet-Cookie: a=b\r\n",
    "bell\x07 back\x08\x08 null\x00 del\x7f c1\x9b31m",
    "\u202egnp.exe\u202c user",
    "\u2066\u2067isolated\u2069 \u2068first\u2069",
    "\u200bzero\u200d\u2060\ufeff width",
    "a" + "\u0301" * 200 + "\u0489" * 200,
    "\U000e0041\U000e0042 tags \u2028 line \u2029 paragraph",
    "../../../etc/passwd%00?x=1#/r/0/steps",
)
LONG_PIECE, LONG_COPIES = "A" * 100_000, 100  # together a line of 10 MB
FIRST = len(SPECIAL)
SAMPLES = len(HOSTILE) + 1


def make_hostile_run(folder: Path) -> Path:
    """Writes the run's log, tokenizer and configuration; group 0 is trained, group 1 filtered."""
    (folder / "model").mkdir(parents=True)
    (folder / "store").mkdir()
    configuration = {"run": "hostile", "bus": "sqlite:bus", "store": "file:store"}
    (folder / "config.json").write_text(json.dumps(configuration))
    save_tokenizer(folder / "model" / "tokenizer.json")
    bus = open_bus(f"sqlite:{folder / 'bus'}", lambda: 1_700_000_100.0)
    bus.create(catalogue(1))
    publish_records(bus)
    bus.close()
    return folder


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    pieces = [*SPECIAL, *HOSTILE, LONG_PIECE]
    inner = Tokenizer(models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    inner.save(str(path))


def publish_records(bus: Bus) -> None:
    dispatch = FencedWriter(bus, "admissions", "dispatch", 1)
    trainer = FencedWriter(bus, "ledger", "trainer", 1)
    dispatch.open()
    trainer.open()
    dispatch.append([(str(g), admitted(g, n)) for g, n in ((0, SAMPLES), (1, len(HOSTILE)))])
    for index in range(SAMPLES):
        publish(bus, "trajectories", "0", answer(index))
    for index, text in enumerate(HOSTILE):
        publish(bus, "trajectories", "1", dead(index, text))
        value = np.array([0.5], np.float32)
        publish(bus, "annotations", "0", Annotation(f"0.{index}", 0, text, value, text))
    members = tuple(Member(f"0.{n}", Address(0, n), "00" * 8) for n in range(SAMPLES))
    metrics = {"reward_mean": 0.5, HOSTILE[0]: 1.0}
    step = StepDone(1, Version(1, 1), "00" * 8, 1, metrics, {HOSTILE[2]: 1}, 1.7e9 + 9)
    closed = GroupClosed(1, "dead", HOSTILE[0], 1)
    take = Take(1, 0, 0, members, (GroupMembers(0, members),))
    trainer.append([("run", record) for record in (take, closed, step)])


def admitted(group: int, count: int) -> Admitted:
    names = tuple(f"{group}.{index}" for index in range(count))
    return Admitted(group, 0, names, 600.0, Address(0, group))


def answer(index: int) -> Trajectory:
    """Prompt and answer are the text of this index; the last one is the long line."""
    is_long = index == len(HOSTILE)
    generated = [FIRST + index] * (LONG_COPIES if is_long else 2)
    text = "long" if is_long else HOSTILE[index]
    tokens = np.array([FIRST + index % len(HOSTILE), *generated], np.uint32)
    return Trajectory(
        f"0.{index}", 0, index, 1, text, text, 1, tokens,
        np.array([0, *[1] * len(generated)], np.uint8),
        np.full(len(generated), -0.5, np.float32), (Span(0, len(generated), Version(0, 1)),),
        "stop", 1.0, Version(0, 1), 1.7e9, 1.7e9 + 3, scores={text: 1.0}, reference=text,
        environment=text,
    )  # fmt: skip


def dead(index: int, text: str) -> Trajectory:
    none = np.zeros(0, np.float32)
    return Trajectory(
        f"1.{index}", 1, index, 1, text, "rollout-0", 1, np.array([FIRST + index], np.uint32),
        np.zeros(1, np.uint8), none, (), "dead", None, Version(0, 1), 1.7e9, 1.7e9, reason=text,
    )  # fmt: skip
