"""Whatever bytes a client sends, it gets a response or its end, the log has no error that nothing
foresaw, and the server answers the next request.
"""

import logging
import tempfile
from collections.abc import Generator
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
from hypothesis import given

from testbed.hostile.damage import changed_text
from testbed.hostile.parsers.http import (
    ServerRoutes,
    asked,
    damaged_request,
    exchange,
    is_alive,
    unforeseen,
)
from testbed.hostile.parsers.servers import SERVERS, open_server
from tests.edges.fuzz.damage import RANDOM, examples


class Errors(logging.Handler):
    """Keeps the log's records that have an exception."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.records.append(record)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Generator[tuple[ServerRoutes, Errors]]:
    errors = Errors()
    logging.getLogger().addHandler(errors)
    logging.getLogger("uvicorn.error").addHandler(errors)
    with tempfile.TemporaryDirectory() as folder, open_server(request.param, Path(folder)) as made:
        yield made, errors
    for logger in ("", "uvicorn.error"):
        logging.getLogger(logger).removeHandler(errors)


@given(drawn=RANDOM)
@examples(250)
def test_any_request_is_answered_or_ended(
    server: tuple[ServerRoutes, Errors], drawn: Random
) -> None:
    made, errors = server
    errors.records.clear()
    data = damaged_request(drawn, made)
    assert not unforeseen(exchange(made, data)), data
    assert not errors.records, (data, errors.records[0].getMessage(), errors.records[0].exc_info)
    assert is_alive(made), data


@pytest.fixture(scope="module")
def explorer() -> Generator[ServerRoutes]:
    with open_server("explorer", Path()) as made:
        yield made


@given(drawn=RANDOM)
@examples(200)
def test_any_route_and_parameter_of_the_explorer_is_answered_or_refused(
    explorer: ServerRoutes, drawn: Random
) -> None:
    path, _, query = drawn.choice(explorer.paths).partition("?")
    words = path.split("/")
    at = drawn.randrange(len(words))
    words[at] = quote(changed_text(drawn, words[at]), safe="", errors="surrogatepass")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    texts = [
        f"{name}={quote(changed_text(drawn, text), safe='', errors='surrogatepass')}"
        for name, _, text in pairs
    ]
    target = "/".join(words) + ("?" + "&".join(texts) if texts else "")
    assert asked(explorer, target) < 500, target
