"""Limits kafka-python's log: warnings and errors only, the same one at most twice a minute, and no
attempt to reconnect.

While a broker is away kafka-python logs every attempt, dozens a second; the caller's error states
what could not be done (`admin.call_with_retries`). At its debug level it logs passwords, so that
level cannot be enabled from outside.
"""

import logging
import time

EVERY_S = 30.0
KINDS_MAX = 1000
RETRIED = ("KafkaConnectionError", "KafkaTimeoutError")  # errors after which it connects again


class RateLimitedHandler(logging.Handler):
    """Passes a record to the root logger's handlers unless one of the same kind was passed within
    `EVERY_S`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last_s: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("kafka.net") and _is_retry(record):
            return
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        if now_s - self._last_s.get(kind, -EVERY_S) < EVERY_S:
            return
        if len(self._last_s) >= KINDS_MAX:
            self._last_s.clear()
        self._last_s[kind] = now_s
        if record.name.startswith("kafka.net"):
            record.exc_info = None  # for a broken connection the message is enough
        logging.getLogger().handle(record)


def _is_retry(record: logging.LogRecord) -> bool:
    arguments = record.args if isinstance(record.args, tuple) else ()
    return record.levelno < logging.ERROR or any(type(one).__name__ in RETRIED for one in arguments)


def limit_kafka_log() -> None:
    """Set up once per process; a handler that the application has set on `kafka` stays."""
    log = logging.getLogger("kafka")
    if all(isinstance(handler, logging.NullHandler) for handler in log.handlers):
        log.setLevel(logging.WARNING)
        log.propagate = False
        log.addHandler(RateLimitedHandler())
        # It warns of each callback above 0.1 s, which is normal when many roles share few cores.
        logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
