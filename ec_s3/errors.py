"""The exceptions of ec_s3, one tree.

ECS3Error
├── ConfigError (ValueError)              a setting; names key, value, source and remedy
├── InvalidKeyError (ValueError)          an object key that this library did not write
├── FrameError (ValueError)               untrusted bytes that are no valid object
│   ├── FrameMagicError                   not one of our objects at all
│   ├── FrameVersionError                 a format version that this release cannot read
│   ├── FrameTruncatedError               fewer or more bytes than the object declares
│   ├── FrameChecksumError                bytes that do not match their digest
│   ├── FrameHeaderError                  a header that contradicts itself or its schema
│   ├── FrameMismatchError                a valid object, but not the one asked for
│   ├── FrameUnsignedError                not signed with a key that the reader accepts
│   ├── FrameStaleError                   made before the time from which objects count
│   └── FrameTooLargeError                declares more than the reader's cap
├── RemoteError                           a store's failure: .operation .key .retryable
│   ├── RemoteTimeoutError (TimeoutError)
│   ├── RemoteThrottledError
│   ├── RemoteDeniedError (PermissionError)
│   ├── RemoteUnavailableError (ConnectionError)
│   └── RemoteChangedError                the object changed between two reads of it
├── ControlError (ValueError)             no control document of this version
├── IndexObjectError (ValueError)         no index of a namespace that can be used
├── CapacityError                         larger than the host tier can ever hold
└── ClosedError (RuntimeError)            used after close()

Absence is never an exception: it is `None`.
"""

from __future__ import annotations

from functools import partial


class ECS3Error(Exception):
    """Base of every exception that ec_s3 raises on purpose."""


class ConfigError(ECS3Error, ValueError):
    """A setting that cannot be used; the message names key, value, source and remedy."""


class InvalidKeyError(ECS3Error, ValueError):
    """An object key that does not follow the key scheme."""


class FrameError(ECS3Error, ValueError):
    """Untrusted bytes that are not a valid object, or not the expected one."""

    reason = "corrupt"


class FrameMagicError(FrameError):
    """The bytes do not start like an object of ours."""


class FrameVersionError(FrameError):
    """The object's format version is not one that this release reads.

    Attributes:
        version: the object's.
    """

    reason = "version"

    def __init__(self, message: str, *, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class FrameTruncatedError(FrameError):
    """The object is shorter or longer than it declares."""


class FrameChecksumError(FrameError):
    """A digest does not match the bytes that it covers."""


class FrameHeaderError(FrameError):
    """The header breaks its schema or contradicts itself."""


class FrameMismatchError(FrameError):
    """A valid object that is not the one asked for: identifier, namespace, dtype or shape."""

    reason = "mismatch"


class FrameUnsignedError(FrameError):
    """The object carries no signature by a key that the reader accepts."""

    reason = "unsigned"


class FrameStaleError(FrameError):
    """The object was made before the time from which objects count."""

    reason = "stale"


class FrameTooLargeError(FrameError):
    """The object declares more bytes than the reader's cap allows."""

    reason = "too_large"


class RemoteError(ECS3Error):
    """A store failed to answer.

    Attributes:
        operation: the store's verb, for example ``get``.
        key: the object key, or the prefix of a listing.
        retryable: whether the same call may succeed later without a change of configuration.
    """

    reason = "failed"
    retryable = True

    def __init__(self, message: str, *, operation: str, key: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        # Or another process that gets it from here could not rebuild it, and might wait for ever.
        rebuild = partial(type(self), operation=self.operation, key=self.key)
        return rebuild, self.args, self.__dict__


class RemoteTimeoutError(RemoteError, TimeoutError):
    """No complete answer within the deadline."""

    reason = "timeout"


class RemoteThrottledError(RemoteError):
    """The store asks for a slower pace (503 SlowDown, 429)."""

    reason = "throttled"


class RemoteDeniedError(RemoteError, PermissionError):
    """The store refuses: credentials or policy. Not retried."""

    reason = "denied"
    retryable = False


class RemoteUnavailableError(RemoteError, ConnectionError):
    """The endpoint cannot be reached, or answers with a server error."""

    reason = "unreachable"


class RemoteChangedError(RemoteError):
    """The object was replaced between two ranged reads of it."""

    reason = "changed"


class ControlError(ECS3Error, ValueError):
    """What lies in the place of a control document is none that this release reads."""


class IndexObjectError(ECS3Error, ValueError):
    """What lies in the place of a namespace's index is none that can be used, or is too large."""


class CapacityError(ECS3Error):
    """The item is larger than the tier can ever hold."""


class ClosedError(ECS3Error, RuntimeError):
    """The object was used after its close()."""
