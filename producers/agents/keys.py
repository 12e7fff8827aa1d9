"""Session keys, an HMAC-SHA256 with a secret of the run, so the program of a replaced attempt or a
failed try is refused (invariant 13). Neither is ever logged.
"""

import base64
import hmac
import json
import re
import secrets
from dataclasses import dataclass

from rollstream.errors import ObjectExists, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.run_keys import RunKeys

SECRET_KEY = "agents/secret"
RUN_KEYS = (RunKeys(re.compile(re.escape(SECRET_KEY)), "cut", private=True),)
_PREFIX = "rs-"
_MAC_BYTES = 18  # 144 bits
KNOWN_MAX = 8192  # keys of open episodes, about 1 MB


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """One attempt of an episode on one rollout's term, and its try: `retry` failed before."""

    trajectory: str
    attempt: int
    rollout: str
    term: int
    retry: int = 0


class SessionKeys:
    """Issues and checks keys. Any process with the same secret accepts the same keys."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) >= 16, "a secret of 128 bits or more"
        self._secret = secret
        self._known: dict[str, SessionIdentity] = {}
        """Authentic keys: each is issued or checked once, not with each request."""

    def issue(self, identity: SessionIdentity) -> str:
        fields = [identity.trajectory, identity.attempt, identity.rollout, identity.term]
        fields += [identity.retry] if identity.retry else []
        payload = _text(json.dumps(fields, separators=(",", ":")).encode())
        key = f"{_PREFIX}{payload}.{self._mac(payload)}"
        self._remember(key, identity)
        return key

    def identity(self, key: str) -> SessionIdentity | None:
        """Returns the session that an authentic key names, else None."""
        if (cached := self._known.get(key)) is not None:
            return cached
        payload, dot, mac = key.removeprefix(_PREFIX).partition(".")
        if not (key.startswith(_PREFIX) and dot and key.isascii()):
            return None
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        trajectory, attempt, rollout, term, *retry = json.loads(_bytes(payload))
        identity = SessionIdentity(
            str(trajectory), int(attempt), str(rollout), int(term), *map(int, retry)
        )
        self._remember(key, identity)
        return identity

    def _remember(self, key: str, identity: SessionIdentity) -> None:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[key] = identity

    def _mac(self, payload: str) -> str:
        return _text(hmac.digest(self._secret, payload.encode(), "sha256")[:_MAC_BYTES])


def run_session_keys(store: ObjectStore) -> SessionKeys:
    """Returns the keys of the run; the first process creates the secret."""
    # In the run's store, so that a program outside keeps its key while rollouts restart.
    try:
        return SessionKeys(store.get(SECRET_KEY))
    except ObjectMissing:
        pass
    try:
        secret = secrets.token_bytes(32)
        # On a machine of several users no other user may read it.
        create = store.create_private if isinstance(store, FileStore) else store.create
        create(SECRET_KEY, secret)
    except ObjectExists:  # another process was first
        secret = store.get(SECRET_KEY)
    return SessionKeys(secret)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
