"""`limit_kafka_log` keeps kafka-python's log short: only warnings and errors pass, each kind at
most twice a minute, and no message about a reconnect.

While a broker is unreachable kafka-python logs every connection attempt, dozens a second; the error
that the caller gets names the failed operation (`admin.call_with_retries`). At debug level
kafka-python logs passwords, so its level is set here and not by the root logger.
"""

import logging
import time

EVERY_S = 30.0
KINDS_MAX = 1000
RETRIED = ("KafkaConnectionError", "KafkaTimeoutError")  # kafka-python reconnects after these


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
    """Install the handler once per process; does nothing if `kafka` has a handler already."""
    log = logging.getLogger("kafka")
    if all(isinstance(handler, logging.NullHandler) for handler in log.handlers):
        log.setLevel(logging.WARNING)
        log.propagate = False
        log.addHandler(RateLimitedHandler())
        # The selector warns of callbacks above 0.1 s; with many roles on few cores they are normal.
        logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
