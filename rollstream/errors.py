"""Every error that the project raises is a `RollstreamError` and also a standard-library error.

These errors mean failures outside the program: of files, brokers, configurations, and bytes from
other programs. Programmer errors are asserts. Each message names the failure, its place and the
remedy.
"""

EXIT_REFUSED = 2
"""Exit code of a role whose configuration or command line is wrong: another start cannot help."""
EXIT_UNSERVED = 3
"""Exit code of a role that could not open an engine or server before it did any work; another start
may help.
"""


class RollstreamError(Exception):
    """The base class of all errors that a caller may expect and handle."""


class ConfigurationError(RollstreamError, ValueError):
    """A setting is wrong, unknown or impossible together with another one."""


class DecodeError(RollstreamError, ValueError):
    """Bytes are no record that this reader understands; the reader moves them to topic `dead`."""


class UnknownSchema(DecodeError):
    """A well-formed record has a schema that is unknown to this reader."""


class NewerRelease(RollstreamError, NotImplementedError):
    """The log or store holds content that only a newer release understands (invariant 14). A role
    that meets it ends without moving a position, so a newer release can resume there.
    """


class BusError(RollstreamError, OSError):
    """The log could not perform an operation; records that it acknowledged are not lost."""


class TopicMissing(BusError, LookupError):
    """The log has no topic of this name: the run has not created its topics yet."""


class BusTimeout(BusError, TimeoutError):
    """The log did not answer before the deadline; whether the request took effect is unknown."""


class PositionLost(BusError, LookupError):
    """A read position was truncated; reading from elsewhere would skip records."""


class RecordTooLarge(BusError, ValueError):
    """A record is larger than its topic accepts."""


class SequenceGap(BusError):
    """A single-holder role's records are not consecutive: the log lost one (invariant 7)."""


class StoreError(RollstreamError, OSError):
    """The object store could not perform an operation."""


class StoreTimeout(StoreError, TimeoutError):
    """The object store did not answer before the deadline; whether the request took effect is
    unknown.
    """


class ObjectMissing(StoreError, FileNotFoundError):
    """No object has this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create-if-absent found an object under this key."""


class SwapLost(StoreError):
    """A compare-and-swap found another value than the expected one."""


class CorruptObject(StoreError, ValueError):
    """An object's content differs from the hash in its manifest; the content was not served."""


class Fenced(RollstreamError, PermissionError):
    """A higher term holds this role: the process with the lower term exits (invariant 7)."""


class LeaseHeld(RollstreamError, BlockingIOError):
    """Another process holds the lease and renews it."""


class EngineRefused(RollstreamError, ValueError):
    """The engine cannot serve this model or request; the message names the unsupported part."""


class EngineUnavailable(RollstreamError, ValueError):
    """An engine or server could not be opened; another start may succeed."""
