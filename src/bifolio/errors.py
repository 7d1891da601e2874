"""Every error that bifolio raises on purpose, as one small tree.

    BifolioError
    ├── ConfigError          an option, a plan or a configuration file cannot work
    │   ├── UnsupportedError it could, but this build has no code for it
    │   └── PairError        two workers cannot hand requests to each other
    ├── CheckpointError      a model's files are incomplete, damaged or contradictory
    ├── RequestError         one request is wrong (HTTP 400); names the parameter
    ├── GenerationError      the engine ended a request; `code` says why
    ├── OverloadedError      come back later (HTTP 429)
    ├── IntegrityError       a cache page is not what its request wrote (ends that request)
    └── EngineDeadError      the engine process is gone (HTTP 503)

Texts name the input and give a hint. Our own mistakes are `assert`s, not members of this tree.
"""

from __future__ import annotations


class BifolioError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(BifolioError):
    """An option, plan or configuration value that cannot work; its text names it, with a hint."""


class UnsupportedError(ConfigError):
    """A valid wish that this build or machine has no code for."""


class PairError(ConfigError):
    """Two workers cannot hand requests to each other; the text names what differs."""


class CheckpointError(BifolioError):
    """A model's files are incomplete, damaged or contradictory; the text names file and tensor."""


class RequestError(BifolioError):
    """One request is wrong. `param` is the request field at fault, as the client spelled it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class GenerationError(BifolioError):
    """The engine ended a request with an error. `code` is a `bifolio.request.ErrorCode`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class OverloadedError(BifolioError):
    """The queue is full; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class IntegrityError(BifolioError):
    """A cache page does not carry the tag or the bytes that its request expects."""


class EngineDeadError(BifolioError):
    """The engine process has ended or does not answer."""


def cause_of(error: Exception) -> str:
    """What an error says, of one of the system only why: our own texts name the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
