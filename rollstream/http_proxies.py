"""Which HTTP requests may use a proxy of the environment (`http_proxy`, `all_proxy` …): those to
hosts that the user names elsewhere (an object store, a judge), never to this machine or the run's
processes, which a proxy may not know.
"""

import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from ipaddress import ip_address
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

# curl and Go read either, some clients only the capitals.
NO_PROXY = ("no_proxy", "NO_PROXY")


def is_this_machine(host: str) -> bool:
    """A name or an address without port that is always this machine itself."""
    name = host.strip("[]").partition("%")[0].rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def may_use_proxy(url: str | None) -> bool:
    """Decides for a URL that the user named."""
    return not is_this_machine(urlsplit(url or "").hostname or "")


def open_direct(url: str, timeout_s: float, context: SSLContext | None = None) -> HTTPResponse:
    """Opens the URL of a process of this run or machine. Raises `HTTPError` for a status of 400 and
    above, `OSError` without answer.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    answer = urllib.request.build_opener(*handlers).open(url, timeout=timeout_s)
    return cast(HTTPResponse, answer)


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Returns variables by which a program with this environment, in any language, reaches the host
    of `url` without a proxy.
    """
    host = urlsplit(url).hostname or ""
    present = [environment[name] for name in NO_PROXY if environment.get(name)]
    hosts = [part.strip() for text in present for part in text.split(",")]
    joined = ",".join(dict.fromkeys(part for part in (*hosts, host) if part))
    return dict.fromkeys(NO_PROXY, joined)
