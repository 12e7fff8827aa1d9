"""Holds the files of the page (`page/`) in memory, each also compressed by gzip. No file outside of
that folder can be requested.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
SOURCE_META = '<meta name="rollstream-source" content="server">'
# Files with other endings are not part of the page.
TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class PageAsset:
    kind: str
    data: bytes
    compressed: bytes
    etag: str


def load_assets(folder: Path = PAGE) -> dict[str, PageAsset]:
    """Returns the page's files by their paths in the folder, with `/` between the parts."""
    assets: dict[str, PageAsset] = {}
    for path in sorted(folder.rglob("*")):
        kind = TYPES.get(path.suffix)
        if kind is None or not path.is_file():
            continue
        data = path.read_bytes()
        # Without a time in the header the same file always has the same bytes.
        packed = gzip.compress(data, 9, mtime=0)
        tag = f'"{sha256(data).hexdigest()[:32]}"'
        assets[path.relative_to(folder).as_posix()] = PageAsset(kind, data, packed, tag)
    return assets


def sent_bytes(assets: Mapping[str, PageAsset]) -> int:
    """Returns the size of all scripts, styles and the page itself as a browser receives them."""
    endings = (".html", ".js", ".mjs", ".css", ".svg")
    return sum(len(asset.compressed) for name, asset in assets.items() if name.endswith(endings))
