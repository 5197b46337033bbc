"""What the text side and the server need of an engine. :class:`dcpjax.engine.engine.Engine` has it,
and so has the fake of the tests."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from dcpjax.config import ModelConfig
from dcpjax.engine.request import Request, TokenOutput


@runtime_checkable
class TokenEngine(Protocol):
    """Token ids in, token ids out; one thread."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_blocked(self) -> bool:
        """Whether a step would do nothing before the function of :meth:`on_wake` is called."""
        ...

    @property
    def num_offers(self) -> int:
        """Prompts whose KV other engines may still take, which ends when the engine closes."""
        ...

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when something outside unblocks the engine."""
        ...

    def add(self, request: Request) -> None:
        """Raises RequestError when it cannot be served; then nothing has changed."""
        ...

    def abort(self, request_id: str) -> None:
        """An output that says so follows from the next step; unknown ids are ignored."""
        ...

    def step(self) -> list[TokenOutput]:
        """Run at most one step; nothing when there is no work."""
        ...

    def stats(self) -> dict[str, object]: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None:
        """Release everything; more than once is fine."""
        ...
