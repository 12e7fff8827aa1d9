"""Writes the JavaScript libraries of the explorer's page: `python -m testbed.vendored_libraries`.

A maintainer's script, run once for each change of a version below; it needs npm and a network. It
fetches the packages, bundles each group into one minified ES module with relative imports only, and
writes the modules with their licences and `SHA256SUMS` to `rollstream/look/explorer/page/vendor/`,
which is committed. Neither the program nor its tests fetch anything; a test compares the hashes.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "rollstream" / "look" / "explorer" / "page" / "vendor"
VERSIONS = {
    "preact": "11.2.0",
    "htm": "3.1.1",
    "hyparquet": "1.31.5",
    "fzstd": "0.1.1",
}
BUNDLER = "esbuild@0.28.2"
ENTRIES = {
    "preact.js": """
        import htm from "htm";
        import { h } from "preact";
        export { h, render, Component, Fragment, createContext } from "preact";
        export * from "preact/hooks";
        export const html = htm.bind(h);
    """,
    "parquet.js": """
        export {
            asyncBufferFromUrl, cachedAsyncBuffer, parquetMetadataAsync, parquetReadObjects,
        } from "hyparquet";
        export { decompress as decompressZstd } from "fzstd";
    """,
}


def write_libraries(vendor: Path, work: Path) -> None:
    """Fetch and bundle the libraries in the folder `work`, then replace the content of `vendor`."""
    (work / "package.json").write_text(json.dumps({"private": True}))
    packages = [f"{name}@{version}" for name, version in VERSIONS.items()]
    _run(work, "npm", "install", "--no-audit", "--no-fund", BUNDLER, *packages)
    modules = work / "node_modules"
    shutil.rmtree(vendor, ignore_errors=True)
    vendor.mkdir(parents=True)
    for name, source in ENTRIES.items():
        (work / name).write_text(source)
        options = ("--bundle", "--minify", "--format=esm", "--target=es2022")
        _run(work, "npx", "esbuild", name, *options, f"--outfile={vendor / name}")
    for name in VERSIONS:
        shutil.copyfile(modules / name / "LICENSE", vendor / f"LICENSE.{name}.txt")
    write_sums(vendor)


def write_sums(vendor: Path) -> None:
    """Write `SHA256SUMS` in the format of sha256sum, over all other files of the folder."""
    lines = [f"{file_hash(path)}  {path.name}\n" for path in sorted(vendor.glob("[!S]*"))]
    (vendor / "SHA256SUMS").write_text("".join(lines))


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(folder: Path, *line: str) -> None:
    subprocess.run(line, cwd=folder, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        write_libraries(VENDOR, Path(work))
