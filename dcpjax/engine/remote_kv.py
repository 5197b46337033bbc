"""KV that another engine computed or will read. Host only, no addresses.

A *load* brings the KV of a prompt into pages of this engine; an *export* keeps the pages of a
prompt that was computed here until another engine has them.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dcpjax.cache.prefix import PagePool


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Of a prompt, in hexadecimal: two engines that go on with each other's KV read the same one.

    Counting tokens is not enough: a chat template that writes the date changes them at midnight.
    """
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RemoteKV:
    """Where the KV of a prompt waits: in the pages ``page_ids`` of another engine.

    Attributes:
        engine_id: identity of the process that computed it; a restarted one has another.
        request_id: under which that engine keeps the pages.
        host, port: its side channel.
        page_ids: from the beginning of the prompt, one per virtual page of that engine.
        num_tokens: tokens of the prompt that it computed.
        prompt_digest: of the prompt as it is here, see :func:`prompt_digest`.
        is_same_prompt: whether that engine read the same tokens, as far as it has said.
        is_partial: it may still be computing them.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    page_ids: tuple[int, ...]
    num_tokens: int
    prompt_digest: str = ""
    is_same_prompt: bool = True
    is_partial: bool = False


@dataclass(frozen=True)
class KVLoad:
    """Room was made for the tokens ``[first_token, stop_token)`` of a request; nothing moved yet.

    ``page_ids`` are those of this engine, from the beginning of the sequence.
    """

    request_id: str
    remote: RemoteKV
    page_ids: tuple[int, ...]
    first_token: int
    stop_token: int


@dataclass(frozen=True)
class KVExport:
    """The ``num_tokens`` tokens of the prompt of a request are, or will be, in these pages."""

    request_id: str
    page_ids: tuple[int, ...]
    num_tokens: int
    prompt_digest: str


@dataclass
class KVEvents:
    """What the scheduler wants of other engines, each told once.

    Attributes:
        loads: to begin.
        exports: to offer, of finished requests.
        early_exports: to offer, of requests that have just begun.
        progress: of early exports, by request id: tokens that are computed.
        withdrawn: early exports whose request loses its pages.
        unwanted: requests that ended, by id, and whose KV elsewhere was not even asked for.
        abandoned: loads whose request was aborted.
    """

    loads: list[KVLoad] = field(default_factory=list[KVLoad])
    exports: list[KVExport] = field(default_factory=list[KVExport])
    early_exports: list[KVExport] = field(default_factory=list[KVExport])
    progress: dict[str, int] = field(default_factory=dict[str, int])
    withdrawn: list[str] = field(default_factory=list[str])
    abandoned: list[str] = field(default_factory=list[str])
    unwanted: dict[str, RemoteKV] = field(default_factory=dict[str, RemoteKV])


class PageHolds:
    """Pages that somebody outside the scheduler still reads or writes, by the name of the hold."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pages)

    @property
    def pages(self) -> set[int]:
        return {page for pages in self._pages.values() for page in pages}

    def hold(self, name: str, pages: Sequence[int]) -> tuple[int, ...]:
        """Keep pages, which somebody else holds now, until :meth:`release`."""
        assert name not in self._pages, f"pages are already held for {name}"
        self._pool.share(pages)
        self._pages[name] = tuple(pages)
        return self._pages[name]

    def release(self, name: str) -> bool:
        """Give the pages up. False: there was no such hold."""
        pages = self._pages.pop(name, None)
        if pages is not None:
            self._pool.release(pages)
        return pages is not None
