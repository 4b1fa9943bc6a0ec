"""The exception tree. Each error has a wire code (closed list), an HTTP status, and says whether a retry makes sense.

ChituError
|-- ConfigError                    a key, a value, a path: one sentence, before any model loads
|   |-- UnsupportedModel
|   |-- MissingDependency
|   `-- RankTaken
|-- RequestError                   the client's fault (4xx)
|   |-- InvalidRequest  ContextLengthExceeded  ModelNotFound  PayloadTooLarge  Unauthorized
|   |-- HeadersTooLarge  SlowRequest
|   `-- Forbidden  UnknownInstance  UnknownRequest  LastInstance
|-- ServiceError                   ours (5xx); `retryable` says whether a new attempt can help
|   |-- Capacity (TooManyRequests)  RateLimited  Overloaded  QueueTimeout  RequestTimeout  NoInstance
|   |-- RequestKept
|   |-- PrefillLost  DecodeLost  TokensLost  RequestLost  BootstrapTimeout
|   |-- TransferFailed  TransferTimeout  IncompatibleLayout  Integrity
|   `-- Internal  StepFailed  PoisonRequest
|-- RequestCancelled               the client is gone
`-- ProtocolError                  a bad frame from a peer; costs its own room at most
    |-- BadFrame  UnknownKind
"""

from __future__ import annotations

from typing import ClassVar


class ChituError(Exception):
    """Root of the tree. `message` is one sentence with the values in it."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    """When another try can help, where that is known."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(ChituError):
    code = "config"


class UnsupportedModel(ConfigError):
    code = "unsupported_model"


class MissingDependency(ConfigError):
    code = "missing_dependency"


class RankTaken(ConfigError):
    """Another process is that instance."""

    code = "rank_taken"


class RequestError(ChituError):
    code = "invalid_request"
    http_status = 400


class InvalidRequest(RequestError):
    """`param` names the offending field of the body, as OpenAI's error object does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404


class PayloadTooLarge(RequestError):
    code = "payload_too_large"
    http_status = 413


class HeadersTooLarge(RequestError):
    code = "headers_too_large"
    http_status = 431


class SlowRequest(RequestError):
    """Its head or body did not come in time."""

    code = "slow_request"
    http_status = 408


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(RequestError):
    """Not from there, whoever it is."""

    code = "forbidden"
    http_status = 403


class UnknownTrace(RequestError):
    """Of an admin route: there are no trace records of that request."""

    code = "unknown_trace"
    http_status = 404


class UnknownRequest(RequestError):
    """No request of this id was taken up, or it is somebody else's."""

    code = "unknown_request"
    http_status = 404


class UnknownInstance(RequestError):
    """Of an admin route: the cluster has no such instance."""

    code = "unknown_instance"
    http_status = 404


class LastInstance(RequestError):
    """Of an admin route: without that instance nothing could be served."""

    code = "last_instance"
    http_status = 409


class ServiceError(ChituError):
    http_status = 503
    retryable = True


class Capacity(ServiceError):
    code = "capacity"


class TooManyRequests(Capacity):
    """The router's own admission bound; same wire code, but the client is asked to slow down."""

    http_status = 429


class Overloaded(ServiceError):
    """The router's prediction: the request would wait too long. Nobody was asked, so nobody is asked again."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(ServiceError):
    """One client's requests come faster than `router.admission.requests_per_s`."""

    code = "rate_limited"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeout(ServiceError):
    code = "queue_timeout"


class RequestTimeout(ServiceError):
    """The whole request took longer than `router.request_timeout_s`."""

    code = "request_timeout"
    http_status = 504
    retryable = False


class NoInstance(ServiceError):
    code = "no_instance"


class RequestKept(ServiceError):
    """Its router ends, and wrote down how it goes on."""

    code = "request_kept"
    retryable = False


class PrefillLost(ServiceError):
    code = "prefill_lost"


class DecodeLost(ServiceError):
    code = "decode_lost"


class TokensLost(ServiceError):
    """Nothing of D came through to the router for long, and what was on the way is gone. D itself goes on."""

    code = "tokens_lost"


class RequestLost(ServiceError):
    """An instance lives, but what the router sends it does not come through."""

    code = "request_lost"


class BootstrapTimeout(ServiceError):
    code = "bootstrap_timeout"


class SilentLink(BootstrapTimeout):
    """P and D live, and D hears nothing of P; same wire code."""


class TransferFailed(ServiceError):
    code = "transfer_failed"


class TransferTimeout(ServiceError):
    code = "transfer_timeout"


class IncompatibleLayout(ServiceError):
    code = "incompatible_layout"
    retryable = False


class Integrity(ServiceError):
    code = "integrity"


class Internal(ServiceError):
    code = "internal"
    http_status = 500
    retryable = False


class StepFailed(ServiceError):
    """An instance could not compute this one request, alone and on a sound device: the same is to be expected of every
    other. The instance goes on, and is not to blame."""

    code = "step_failed"
    http_status = 500
    retryable = False


class PoisonRequest(ServiceError):
    """Instances, or processes that worked on its body, died under it, one after the other: another one shall not. Not
    for the client to send again either."""

    code = "poison_request"
    http_status = 500
    retryable = False


class RequestCancelled(ChituError):
    code = "cancelled"
    http_status = 499


class ProtocolError(ChituError):
    code = "protocol"


class BadFrame(ProtocolError):
    code = "bad_frame"


class UnknownKind(ProtocolError):
    code = "unknown_kind"


def _subclasses(cls: type[ChituError]) -> list[type[ChituError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]


def from_code(code: str, message: str) -> ChituError:
    """The error a peer reported by its wire code; an unknown code is `Internal` with the code in its message."""
    for cls in _subclasses(ChituError)[1:]:
        if cls.__dict__.get("code") == code:
            return cls(message)
    return Internal(f"{message} (unknown error code {code!r})")
