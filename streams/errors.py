"""Every error of the project, one tree; each class is a standard-library error too.

Raised for the world (files, brokers, configurations, bytes of others); programmer errors are
asserts. A message names what, where and what to do.
"""


class RollstreamError(Exception):
    """Base of all errors that a caller may expect and handle."""


class ConfigurationError(RollstreamError, ValueError):
    """A setting is wrong, unknown or impossible together with another one."""


class DecodeError(RollstreamError, ValueError):
    """Bytes are not a record that this reader understands; it goes to `<topic>.dead`."""


class UnknownSchema(DecodeError):
    """A well-formed record of a schema that this reader does not know."""


class NewerRelease(RollstreamError, NotImplementedError):
    """Log or store hold what only a newer release understands (invariant 14). A role that meets it
    ends without moving a position; a newer release goes on from there.
    """


class BusError(RollstreamError, OSError):
    """The log could not do what was asked; nothing acknowledged is lost."""


class BusTimeout(BusError, TimeoutError):
    """The log did not answer before the deadline; what was sent is in doubt."""


class PositionLost(BusError, LookupError):
    """A read position was truncated away; reading on from elsewhere would skip records."""


class RecordTooLarge(BusError, ValueError):
    """A record is above what its topic takes."""


class SequenceGap(BusError):
    """A single-holder role's records are not consecutive: the log lost one (invariant 7)."""


class StoreError(RollstreamError, OSError):
    """The object store could not do what was asked."""


class StoreTimeout(StoreError, TimeoutError):
    """The object store did not answer before the deadline; what was sent is in doubt."""


class ObjectMissing(StoreError, FileNotFoundError):
    """No object has this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create met an object that is already there."""


class SwapLost(StoreError):
    """A compare-and-swap met another value than the expected one."""


class CorruptObject(StoreError, ValueError):
    """Content differs from the hash that its manifest names; it was not served."""


class Fenced(RollstreamError, PermissionError):
    """A higher term holds this role: the holder of a lower one exits (invariant 7)."""


class LeaseHeld(RollstreamError, BlockingIOError):
    """Somebody else holds the lease and renews it."""


class EngineRefused(RollstreamError, ValueError):
    """The engine cannot serve this model or request; the message says which part."""
