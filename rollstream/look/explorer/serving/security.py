"""Guards the explorer's server: only GET and HEAD, only under a Host that no stranger can own and
with its Origin, beyond loopback only with a token.

The text of a run is hostile: a model wrote it. The page shows it as text nodes, and `default-src
'self'` refuses scripts and styles inside of it.
"""

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollstream.errors import ConfigurationError
from rollstream.http_guard import HostRule, program_rule

# For a server beyond loopback.
TOKEN_VARIABLE = "ROLLSTREAM_EXPLORER_TOKEN"
_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
COOKIE = "rollstream_explorer"
HEALTH = "/health"
QUERY_MAX = 8192  # bytes of a request's query
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ADVICE = "use the URL that was printed, or start the explorer with --allow-host {host}"


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    body = {"error": {"status": status, "message": message}}
    return JSONResponse(body, status, headers=dict(headers or {}))


def read_token(file: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the token of the file or of the environment, "" without any. Raises
    `ConfigurationError` for one that is too short; no message contains it.
    """
    source = TOKEN_VARIABLE if file is None else file
    try:
        token = environment.get(TOKEN_VARIABLE, "") if file is None else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--token-file {file}: {error}") from None
    token = token.strip()
    if (token or file is not None) and _TOKEN.fullmatch(token) is None:
        raise ConfigurationError(
            f"{source} must have 16 to 512 characters of ASCII, without spaces"
        )
    return token


def new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class AccessRule:
    """`origins` are exact origins of the page (`http://127.0.0.1:7461`), whose hosts are served, as
    are those of `served`. `token` "" means that none is needed.
    """

    origins: frozenset[str]
    token: str = ""
    served: HostRule = field(default_factory=HostRule)

    @property
    def pages(self) -> HostRule:
        hosts = frozenset(origin.partition("://")[2] for origin in self.origins)
        return replace(
            self.served, hosts=hosts, origins=self.origins | self.served.origins, advice=_ADVICE
        )

    @property
    def cookie(self) -> str:
        """The cookie's value; the token cannot be computed from it."""
        return hmac.new(self.token.encode(), b"explorer cookie", sha256).hexdigest()


def access_rule(host: str, port: int, allowed: tuple[str, ...], token: str) -> AccessRule:
    """Returns the rule of a server that is bound to `host`. `allowed` are further origins, or hosts
    with ports, under which browsers reach it.
    """
    names = {*LOOPBACK}
    if host not in ("0.0.0.0", "::", ""):
        names.add(f"[{host}]" if ":" in host else host)
    origins = {f"http://{name}:{port}" for name in names}
    for origin in allowed:
        name = origin.lower().rstrip("/")
        origins.add(name if "://" in name else f"http://{name}")
    # Without a token only loopback is served, at any port, which a tunnel of SSH or a container may
    # have changed; with one also this machine's names, addresses and `ROLLSTREAM_ALLOWED_HOSTS`.
    loopback = HostRule(names=frozenset(name.strip("[]") for name in LOOPBACK))
    return AccessRule(frozenset(origins), token, program_rule(host) if token else loopback)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a server that is bound to `host`."""
    return host in ("127.0.0.1", "localhost", "::1")


class Guard:
    """Checks each request before `app` receives it. Every response, also an error, carries the
    headers that keep a run's text from being run by the browser.
    """

    def __init__(self, app: ASGIApp, rule: AccessRule) -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                return
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refusal(scope)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        wrong = self._wrong(scope, headers)
        if wrong is not None:
            return wrong
        if not self._rule.token or scope["path"] == HEALTH:
            return None
        return self._without_token(scope, headers)

    def _wrong(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return error_response(405, "only GET and HEAD are served", {"Allow": "GET, HEAD"})
        refusal = self._rule.pages.refusal(
            headers.getlist("host"),
            headers.getlist("origin"),
            headers.get("sec-fetch-site", ""),
            headers.get("sec-fetch-mode", ""),
        )
        if refusal:
            return error_response(403, refusal)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return error_response(413, "a request has no body here")
        if len(scope["query_string"]) > QUERY_MAX:
            return error_response(413, f"a query has at most {QUERY_MAX} bytes")
        return None

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        token = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("token")
        if token is not None:
            if not _equal(token, self._rule.token):
                return error_response(401, "the token is wrong")
            # The token of the printed URL is exchanged for a cookie, so it leaves the address bar.
            response = RedirectResponse("/", 303)
            kind: Literal["strict"] = "strict"
            response.set_cookie(
                COOKIE, self._rule.cookie, httponly=True, samesite=kind, path="/", max_age=7 * 86400
            )
            return response
        bearer = headers.get("authorization", "")
        if bearer.startswith("Bearer ") and _equal(bearer[7:], self._rule.token):
            return None
        if any(_equal(cookie, self._rule.cookie) for cookie in _cookies(headers)):
            return None
        return error_response(401, "open the URL with the token that the server printed")


def _equal(candidate: str, secret: str) -> bool:
    return hmac.compare_digest(candidate.encode(errors="replace"), secret.encode())


def _cookies(headers: Headers) -> list[str]:
    cookies: list[str] = []
    for line in headers.getlist("cookie")[:8]:
        for part in line.split(";")[:64]:
            name, _, value = part.strip().partition("=")
            if name == COOKIE:
                cookies.append(value)
    return cookies[:4]
