"""The files of the page: libraries as they were fetched, nothing from elsewhere, bounded size."""

import re

from rollstream.look.explorer.assets import PAGE, load_assets, sent_bytes
from testbed.vendored_libraries import VERSIONS, file_hash

VENDOR = PAGE / "vendor"
OWN = sorted(path for path in PAGE.rglob("*.js") if VENDOR not in path.parents)
IMPORT = re.compile(r'''(?:^import\b[^;]*?from\s*|^import\s*|\bimport\()"([^"]+)"''', re.MULTILINE)


def test_vendored_libraries_are_those_that_were_fetched() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    present = {path.name: file_hash(path) for path in VENDOR.iterdir() if path.name != "SHA256SUMS"}
    assert present == sums


def test_each_library_has_its_licence_beside_it() -> None:
    for name in VERSIONS:
        assert "permission" in (VENDOR / f"LICENSE.{name}.txt").read_text().lower()


def test_modules_import_files_of_the_page_by_relative_paths() -> None:
    for path in OWN:
        for target in IMPORT.findall(path.read_text()):
            assert target.startswith(("./", "../")), f"{path.name}: {target}"
            assert (path.parent / target).resolve().is_relative_to(PAGE), f"{path.name}: {target}"
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_no_text_can_become_markup_or_code() -> None:
    """The page has no call that parses a string as HTML or script."""
    banned = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    for path in OWN:
        assert not banned.search(path.read_text()), path.name
    assert "style=" not in (PAGE / "index.html").read_text()


def test_all_assets_together_stay_below_150_kb_as_sent() -> None:
    assert sent_bytes(load_assets()) <= 150_000


def test_no_file_names_another_host() -> None:
    for path in [*OWN, PAGE / "index.html", PAGE / "styles.css"]:
        assert not re.search(r"https?://", path.read_text()), path.name


def test_an_export_holds_the_licences_beside_the_libraries() -> None:
    """The server and an export send files with a known ending only."""
    sent = load_assets()
    assert {f"vendor/LICENSE.{name}.txt" for name in VERSIONS} <= sent.keys()
