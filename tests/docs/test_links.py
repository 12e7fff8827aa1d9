"""Each relative link of README, docs and the other pages of the repository resolves."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![\w/.])docs/[\w./-]+\.(?:md|svg|png)")
MODULE = re.compile(r"(?<![\w/.:-])[\w/]+\.py\b")
READ = ("*.py", "*.toml", "*.md", "*.yml", "*.java", "Makefile")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a page's headings have on GitHub."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_resolves(page: Path) -> None:
    broken: list[str] = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_each_page_that_a_file_names_exists() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--", *READ], cwd=ROOT, capture_output=True, text=True, check=True
    )
    missing: list[str] = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            missing += [f"{name}: {p}" for p in NAMED.findall(text) if not (ROOT / p).is_file()]
    assert missing == []


def test_each_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    open_ = [ROOT / "README.md"]
    while open_:
        page = open_.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        open_ += [
            (page.parent / one.partition("#")[0]).resolve() for one in links if "://" not in one
        ]
    docs = {page for page in pages() if "docs" in page.parts}
    assert sorted(str(page.relative_to(ROOT)) for page in docs - seen) == []


def test_each_module_that_a_page_names_exists() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = listed.stdout.split()
    own = {
        "make_prompts.py",
        "my_loss.py",
        "my_reward.py",
        "word_reward.py",
        "sums.py",
    }  # files that the reader creates
    missing: list[str] = []
    for page in pages():
        for name in MODULE.findall(page.read_text(encoding="utf-8")):
            ends = f"/{name}"
            if name not in own and not any(f"/{one}".endswith(ends) for one in files):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_the_readme_is_short() -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 790
