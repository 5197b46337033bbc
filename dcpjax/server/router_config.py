"""Settings of the router."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import SplitResult, urlsplit

from dcpjax.errors import ConfigError

PrefillFallback = Literal["decode", "error"]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class RouterConfig:
    """What ``dcpjax router`` can be told. URLs are ``http://host:port``.

    With ``pipelined_prefill`` the decode engine is asked when a prompt is begun, not when it is
    computed. ``max_open_requests`` bounds what is under way at the same time; a stream holds at
    most one event of ``MAX_ANSWER_BYTES``, an answer in one piece as much. A peer is asked for its
    health every ``health_interval`` seconds and has ``health_timeout`` seconds to answer.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    prefill_fallback: PrefillFallback = "decode"
    pipelined_prefill: bool = False
    max_open_requests: int = 1024
    connect_timeout: float = 5.0
    health_interval: float = 2.0
    health_timeout: float = 5.0
    shutdown_timeout: float = 30.0
    log_level: str = "warning"

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill_urls), ("decode", self.decode_urls)):
            if not urls:
                raise ConfigError(f"the router needs the URL of at least one {role} engine")
        _check_distinct([*self.prefill_urls, *self.decode_urls])
        if self.prefill_fallback not in get_args(PrefillFallback):
            raise ConfigError(
                f"prefill_fallback is one of {', '.join(get_args(PrefillFallback))}",
                prefill_fallback=self.prefill_fallback,
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError("port is in [0, 65535], 0 for any free one", port=self.port)
        if not all(self.api_keys):
            raise ConfigError("an API key is not empty")
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.max_open_requests < 1:
            raise ConfigError(
                "max_open_requests is at least 1", max_open_requests=self.max_open_requests
            )
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                "shutdown_timeout is at least 0", shutdown_timeout=self.shutdown_timeout
            )
        for name in ("connect_timeout", "health_interval", "health_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is more than 0", **{name: getattr(self, name)})


def normal_url(url: str) -> str:
    """The URL in the one form in which two of the same engine are equal.

    Raises:
        ConfigError: it is not an address of a server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # a port that is no number, or brackets around no address
        raise ConfigError("a URL is http://host:port", url=url, reason=str(error)) from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ConfigError("a URL is http://host:port or https://host:port", url=url)
    if not _has_only_an_address(parts):
        raise ConfigError("a URL of an engine has no path, and no user", url=url)
    if port == 0:
        raise ConfigError("a port is in [1, 65535]", url=url)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or _DEFAULT_PORTS[parts.scheme]}"


def _has_only_an_address(parts: SplitResult) -> bool:
    extras = (parts.query, parts.fragment, parts.username, parts.password)
    return parts.path in ("", "/") and not any(extras)


def _check_distinct(urls: Sequence[str]) -> None:
    normal = [normal_url(url) for url in urls]
    for url in normal:
        if normal.count(url) > 1:
            raise ConfigError("every engine is named once, in one role", url=url)
