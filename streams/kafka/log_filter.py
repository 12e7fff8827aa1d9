"""Limits kafka-python's log to each kind twice a minute: while a broker is unreachable it logs
dozens of attempts a second.
"""

import logging
import time

EVERY_S = 30.0  # between two messages of one kind
KINDS_MAX = 1000  # kinds remembered; then all are forgotten, and each may pass once more
RETRIED = ("KafkaConnectionError", "KafkaTimeoutError")  # kafka-python reconnects after these


class RateLimitedHandler(logging.Handler):
    """Passes a record on, unless it reports a reconnect or one of the same kind (logger and message
    without arguments) was passed within `EVERY_S`.
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
    raised = record.exc_info[1] if record.exc_info else None
    details = (*(record.args if isinstance(record.args, tuple) else ()), raised)
    if any("CERTIFICATE" in str(detail) for detail in details):
        # A refused certificate will be refused again, and no other message names it.
        return False
    if record.levelno < logging.ERROR or str(record.msg).endswith("socket disconnected"):
        return True
    lost = (ConnectionError, TimeoutError)
    return any(isinstance(detail, lost) or type(detail).__name__ in RETRIED for detail in details)


def limit_kafka_log() -> None:
    """Install the handler once per process; does nothing if the logger `kafka` has a handler."""
    log = logging.getLogger("kafka")
    if all(isinstance(handler, logging.NullHandler) for handler in log.handlers):
        # At debug level kafka-python logs passwords, so the root logger must not set its level.
        log.setLevel(logging.WARNING)
        log.propagate = False
        log.addHandler(RateLimitedHandler())
        # The selector warns of callbacks above 0.1 s; with many roles on few cores they are normal.
        logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
