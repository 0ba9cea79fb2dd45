"""The domain's errors: what can go wrong with a request, said in the domain's words and without HTTP.

QuartetError
 +-- ClientError                  the caller can change something
 |    +-- InvalidRequest          a parameter is wrong; `param` names it
 |    +-- ContextLengthExceeded   prompt (+ max_tokens) is longer than the model's context
 |    |    +-- CacheTooSmall      it fits the context and could never fit the KV cache
 |    +-- ModelNotFound
 |    +-- DeadlineExceeded        the request's own timeout passed
 |    +-- QueueFull               no more requests are taken now
 |    +-- RequestTooLarge         the body is over the limit
 +-- ServerError                  we, or the machine
      +-- Loading                 the model is being loaded
      +-- Draining                the service is shutting down
      +-- EngineDead              the worker could not be brought back
      +-- VllmUnavailable         no GPU, or vLLM is not installed
      +-- ModelUnavailable        a model of the catalogue can't be loaded now; says why
      +-- SequenceFailed          this one request made the engine fail
      +-- ModelRefused            the model can't be served rightly; says why
      +-- WorkerDied              the worker process ended or hung (never reaches a caller)
"""

from collections.abc import Sequence as Many


class QuartetError(Exception):
    """`code` is the stable word in an error body; `param` the parameter at fault; `retry_after` in seconds."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ClientError(QuartetError):
    code = "invalid_request"


class ServerError(QuartetError):
    pass


class InvalidRequest(ClientError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class ContextLengthExceeded(ClientError):
    code = "context_length_exceeded"

    def __init__(
        self, prompt_tokens: int, max_tokens: int, context: int, *, param: str = "prompt", counted: bool = True
    ) -> None:
        """`counted` is False where the prompt was not tokenized because it is far too long: then it has at least these."""
        super().__init__(
            f"the prompt has {'' if counted else 'at least '}{prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's context of {context} tokens",
            param=param,
        )
        self.prompt_tokens, self.max_tokens, self.context = prompt_tokens, max_tokens, context


class CacheTooSmall(ContextLengthExceeded):
    def __init__(self, prompt_tokens: int, max_tokens: int, capacity: int, *, param: str = "prompt") -> None:
        super().__init__(prompt_tokens, max_tokens, capacity, param=param)
        self.message = (
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"together more than the KV cache of {capacity} tokens can ever hold"
        )


class ModelNotFound(ClientError):
    code = "model_not_found"

    def __init__(self, model: str, known: Many[str], *, param: str = "model") -> None:
        super().__init__(f"there is no model {model!r} here; there is: {', '.join(known) or 'none'}", param=param)


class DeadlineExceeded(ClientError):
    code = "timeout"

    def __init__(self, timeout: float) -> None:
        super().__init__(f"the request was not answered within its timeout of {timeout:g} s", param="timeout")


class QueueFull(ClientError):
    code = "queue_full"

    def __init__(self, asked: int, free: int, retry_after: int) -> None:
        super().__init__(
            f"{asked} sequences were asked for and the queue has room for {free}; try again in {retry_after} s",
            retry_after=retry_after,
        )


class RequestTooLarge(ClientError):
    code = "request_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")


class Loading(ServerError):
    code = "loading"

    def __init__(self, what: str, retry_after: int = 5) -> None:
        super().__init__(f"the model is not ready: {what}", retry_after=retry_after)


class Draining(ServerError):
    code = "draining"

    def __init__(self, retry_after: int = 10) -> None:
        super().__init__("the service is shutting down and takes no new request", retry_after=retry_after)


class EngineDead(ServerError):
    code = "engine_dead"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has given up: {reason}")


class VllmUnavailable(ServerError):
    code = "vllm_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(f"vLLM can't serve here: {reason}")


class ModelUnavailable(ServerError):
    code = "model_unavailable"

    def __init__(self, model: str, reason: str, retry_after: int | None = None) -> None:
        super().__init__(f"{model} is not available: {reason}", param="model_id", retry_after=retry_after)
        self.reason = reason


class SequenceFailed(ServerError):
    """The message is shown to the caller: it holds no internals; those are in the log under the request's id."""

    def __init__(self, message: str = "the model failed on this request") -> None:
        super().__init__(message)


class ModelRefused(ServerError):
    pass


class WorkerDied(ServerError):
    pass
