"""The exception tree. Each error has a wire code (closed list), an HTTP status, and a flag whether a retry makes sense.

ChituError
|-- ConfigError                    a key, a value, a path: one sentence, before any model loads
|   |-- UnsupportedModel
|   |-- MissingDependency
|   `-- RankTaken
|-- RequestError                   the client's fault (4xx)
|   |-- InvalidRequest  ContextLengthExceeded  ModelNotFound  PayloadTooLarge  Unauthorized
|   |-- HeadersTooLarge  SlowRequest  UnsupportedEncoding
|   |-- Forbidden  UnknownInstance  UnknownRequest  LastInstance  UnknownFile  InUse
|   `-- WeightsRefused  RoleRefused  SleepRefused
|-- ServiceError                   ours (5xx); `retryable`: whether a new attempt can help
|   |-- Capacity (TooManyRequests)  RateLimited  Overloaded  QueueTimeout  RequestTimeout  NoInstance
|   |-- RequestKept  WeightsChanged  RoleChanged  Asleep
|   |-- PrefillLost  DecodeLost  TokensLost  RequestLost  BootstrapTimeout
|   |-- TransferFailed (PeerUnreachable)  TransferTimeout  TransferStalled  IncompatibleLayout  Integrity
|   `-- Internal  StepFailed  PoisonRequest  DiskFull
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
    """Seconds after which a retry can help, if that is known."""

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
    """Another process already is that instance."""

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


class UnsupportedEncoding(RequestError):
    """The body is compressed."""

    code = "unsupported_encoding"
    http_status = 415


class HeadersTooLarge(RequestError):
    code = "headers_too_large"
    http_status = 431


class SlowRequest(RequestError):
    """The head or body of the request did not arrive in time."""

    code = "slow_request"
    http_status = 408


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(RequestError):
    """The client's address may not use this route, with any credentials."""

    code = "forbidden"
    http_status = 403


class UnknownTrace(RequestError):
    """There are no trace records of that request (admin route)."""

    code = "unknown_trace"
    http_status = 404


class UnknownRequest(RequestError):
    """No request of this id was accepted, or it belongs to another client."""

    code = "unknown_request"
    http_status = 404


class UnknownFile(RequestError):
    """There is no such file or batch, or it belongs to another client."""

    code = "unknown_file"
    http_status = 404


class InUse(RequestError):
    """That cannot be done in the present state of a file or batch, or while a profile is taken."""

    code = "in_use"
    http_status = 409


class UnknownInstance(RequestError):
    """The cluster has no such instance (admin route)."""

    code = "unknown_instance"
    http_status = 404


class LastInstance(RequestError):
    """Without that instance no request could be served (admin route)."""

    code = "last_instance"
    http_status = 409


class RoleRefused(RequestError):
    """That instance cannot take that role now (admin route). It keeps the one that it has."""

    code = "role_refused"
    http_status = 409


class WeightsRefused(RequestError):
    """The cluster cannot change to these weights now (admin route). It serves what it served before."""

    code = "weights_refused"
    http_status = 409


class SleepRefused(RequestError):
    """The cluster cannot sleep now, or was woken before it slept (admin route)."""

    code = "sleep_refused"
    http_status = 409


class ServiceError(ChituError):
    http_status = 503
    retryable = True


class Asleep(ServiceError):
    """The cluster sleeps, and was told to stay so whatever requests come."""

    code = "asleep"


class Capacity(ServiceError):
    code = "capacity"


class TooManyRequests(Capacity):
    """The router's own admission bound is reached; same wire code, but the client is asked to slow down."""

    http_status = 429


class Overloaded(ServiceError):
    """The router predicts that the request would wait too long. It was sent to no instance, so it is not retried."""

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
    """The router ends, and saved the request so that the next router can continue it."""

    code = "request_kept"
    retryable = False


class WeightsChanged(ServiceError):
    """An instance has other weights by now than those for which the request was sent to it. If tokens are out, the
    request cannot go on: it would have tokens of two models."""

    code = "weights_changed"


class RoleChanged(ServiceError):
    """An instance changes its role, and gives the request back: another one continues it."""

    code = "role_changed"


class PrefillLost(ServiceError):
    code = "prefill_lost"


class DecodeLost(ServiceError):
    code = "decode_lost"


class TokensLost(ServiceError):
    """The router received nothing from D for long, and what was in flight is lost. D itself continues."""

    code = "tokens_lost"


class RequestLost(ServiceError):
    """An instance is alive, but what the router sends to it does not get through."""

    code = "request_lost"


class BootstrapTimeout(ServiceError):
    code = "bootstrap_timeout"


class SilentLink(BootstrapTimeout):
    """P and D are alive, but D receives nothing from P; same wire code."""


class TransferFailed(ServiceError):
    code = "transfer_failed"


class PeerUnreachable(TransferFailed):
    """A path to a peer's memory that may come back; P and D try again."""

    code = "peer_unreachable"


class TransferTimeout(ServiceError):
    """Nothing of a transfer came for `deadlines.transfer_s`."""

    code = "transfer_timeout"


class TransferStalled(ServiceError):
    """As TransferTimeout, behind a part of the prompt that was computed or written: the machine or the link may only be
    slower than `deadlines.transfer_s` allows, so no circuit breaker counts it."""

    code = "transfer_stalled"


class IncompatibleLayout(ServiceError):
    code = "incompatible_layout"
    retryable = False


class Integrity(ServiceError):
    code = "integrity"


class DiskFull(ServiceError):
    """A file cannot be written, or may not be."""

    code = "disk_full"
    http_status = 507
    retryable = False


class Internal(ServiceError):
    code = "internal"
    http_status = 500
    retryable = False


class StepFailed(ServiceError):
    """An instance could not compute this one request, alone and on a healthy device: every other instance is expected
    to fail, too. The instance continues, and is not at fault."""

    code = "step_failed"
    http_status = 500
    retryable = False


class DamagedFeatures(StepFailed):
    """Features of an image in host memory are not those that were saved there."""


class PoisonRequest(ServiceError):
    """Instances, or processes that worked on its body, died one after the other while they had this request: it is not
    sent to another one. The client should not send it again either."""

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
    """Return the error that a peer reported by its wire code; an unknown code is `Internal` with it in its message."""
    for cls in _subclasses(ChituError)[1:]:
        if cls.__dict__.get("code") == code:
            return cls(message)
    return Internal(f"{message} (unknown error code {code!r})")
