"""Which objects of a store are a run's own (`RunKeys`): the module that writes an object declares
the form of its key in `RUN_KEYS`. An object of another form is never deleted, copied or
overwritten.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

Copied = Literal["cut", "later", "terms", "claimed", "never"]
"""How a backup copies it: at the cut, because the run replaces it (`cut`); after the cut, because
it never changes (`later`); after all others (`terms`); if a record names it (`claimed`); or not.
"""
Kept = Literal["", "archive", "final", "any"]
"""With which `rollstream rm --keep` an object stays: never, with one, or with any of them."""
MANIFESTS, OTHERS, LEASES, IDENTITY = range(4)
"""The order of deletion. Readers ignore objects without a manifest. Leases and then `run.json` are
last: they keep roles away.
"""

IDENTITY_KEY = "run.json"
"""The object that identifies a run (`storage/identity.py`)."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """A pattern that matches the whole key. With the group `file` it ends in the name of a model's
    file (`is_model_file`); further files of a hub's model (licences) are own only if a manifest of
    the run names them.
    """

    pattern: re.Pattern[str]
    copied: Copied
    kept: Kept = ""
    deletion: int = OTHERS
    private: bool = False
    """Whether the object is a secret, which no other user of the machine may read."""
    linked: bool = False
    """A folder of such objects may be a link to another disk: no other files have so specific
    keys.
    """

    def owns(self, key: str, names: Collection[str] = ()) -> bool:
        """Returns whether the key has the declared form. `names` are files that manifests name."""
        file = self.file(key)
        return file is not None and (not file or is_model_file(file) or file in names)

    def file(self, key: str) -> str | None:
        """Returns the name of a model's file that the key ends in, "" for a key of another kind;
        None for another form.
        """
        match = self.pattern.fullmatch(key)
        if match is None:
            return None
        return (match["file"] or "") if "file" in self.pattern.groupindex else ""


RUN_KEYS = (RunKeys(re.compile(r"probes/[0-9a-f]{32}"), "never"),)
"""Objects that probe a store for conditional writes (`stores/connect.py`) and outlive a kill."""
_MODEL_FILE = re.compile(
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|vocab|chat_template|processor_config|preprocessor_config|adapter_config|warmup"
    r"|model\.safetensors\.index)\.json"
    r"|(?:merges|vocab)\.txt|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja"
    r"|(?:tokenizer|spiece|sentencepiece\.bpe|vocab)\.model"
    r"|(?:tokenizer|qwen|vocab)\.tiktoken"
    r"|(?:model|adapter_model|(?:model|delta)(?:-rank\d+)?-\d{5}-of-\d{5})\.safetensors"
)


def is_model_file(name: str) -> bool:
    """Returns whether rollstream or transformers writes such a file into the folder of a model or
    of a version.
    """
    return _MODEL_FILE.fullmatch(name) is not None


def undecided(declared: Iterable[RunKeys], keys: Iterable[str]) -> list[str]:
    patterns = tuple(declared)
    return [
        key
        for key in keys
        if any((file := pattern.file(key)) and not is_model_file(file) for pattern in patterns)
    ]
