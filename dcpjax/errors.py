"""The exceptions of dcpjax. Each names the rule that was broken and the values that broke it.

DcpjaxError
├── ConfigError (ValueError)      a setting is wrong: found at start, exit code 2
│   ├── MeshError                 ranks, devices or head counts that do not fit together
│   ├── UnsupportedCombination    two settings that are each fine and cannot be combined
│   └── CheckpointError           model files that are missing, broken or not understood
├── LayoutError (ValueError)      an argument of the layout algebra outside its domain
├── RequestError (ValueError)     one request is wrong: HTTP 400, the others go on
│   └── ContextLengthError        prompt or max_tokens beyond what the engine can hold
├── TransferError                 a KV transfer that is refused before it starts, or failed
│   ├── PlanError                 two placements between which no exact plan exists
│   └── PeerError                 another engine that is unknown, incompatible or gone
├── AuditError                    a compiled step copies the KV pool, or does not update it in place
├── EngineDeadError               the engine stopped; nothing can be served any more
│   └── ConsensusError            ranks of one engine that do not agree, or one that is silent
│
│   of the planner alone, in ``planner/trace_files.py``:
├── TraceError (ConfigError)      a file of requests that cannot be read: names the line
│
│   of the HTTP server alone, in ``server/errors.py``:
├── LegError                      an engine behind the router does not answer: HTTP 503
├── SequenceFailedError           the engine gave up one sequence: HTTP 500
├── UnavailableError              too many requests, or shutting down: HTTP 503
├── UnknownModelError             the server does not answer to this model name: HTTP 404
├── BodyTooLargeError             a body beyond the limit: HTTP 413
└── AccessError                   a missing or wrong API key: HTTP 401

Beside the tree: ``cache.pages.PageError`` (AssertionError) is a bug of ours, not of a user, and so
is no DcpjaxError; ``server.streaming.ClientLeftError`` is nobody's error.
"""

from typing import Any


class DcpjaxError(Exception):
    """Base class. ``rule`` is the sentence that was broken, ``values`` what broke it."""

    def __init__(self, rule: str, **values: Any) -> None:
        self.rule = rule
        self.values = values
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        super().__init__(f"{rule} ({shown})" if shown else rule)


class ConfigError(DcpjaxError, ValueError):
    """A setting is wrong. Raised before anything is allocated."""


class MeshError(ConfigError):
    """Ranks, devices or head counts that do not fit together."""


class UnsupportedCombination(ConfigError):
    """Two settings that cannot be combined; both are named in the rule."""


class CheckpointError(ConfigError):
    """A model file is missing, broken or not understood."""


class LayoutError(DcpjaxError, ValueError):
    """An argument of the layout algebra is outside its domain."""


class RequestError(DcpjaxError, ValueError):
    """One request is wrong. ``param`` is the API field to blame, ``code`` the reason as a word."""

    def __init__(
        self, rule: str, *, param: str | None = None, code: str | None = None, **values: Any
    ) -> None:
        super().__init__(rule, **values)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """A sequence would not fit into the context length or into the KV pool."""

    def __init__(self, rule: str, *, param: str | None = None, **values: Any) -> None:
        super().__init__(rule, param=param, code="context_length_exceeded", **values)


class TransferError(DcpjaxError):
    """A KV transfer is refused before any byte moves, or failed on the way."""


class PlanError(TransferError):
    """No exact plan exists between two placements."""


class PeerError(TransferError):
    """The engine on the other side is unknown, incompatible or gone."""


class AuditError(DcpjaxError):
    """A compiled step copies the KV pool or does not update it in place."""


class EngineDeadError(DcpjaxError):
    """The engine stopped; nothing can be served any more."""


class ConsensusError(EngineDeadError):
    """The ranks of one engine do not agree, or one of them is silent; has the values of all."""
