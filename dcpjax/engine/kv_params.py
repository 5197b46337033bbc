"""``kv_transfer_params``: how a request says that its KV comes from, or goes to, another engine.

The keys are those of vLLM, so that routers which speak with it speak with this engine. A prefill
engine is asked with ``do_remote_decode`` and answers with an object that a decode engine takes as
it is, with ``do_remote_prefill``. Keys that are not listed are ignored: other routers add theirs.
None always means: not given.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from dcpjax.errors import RequestError

MAX_RANKS = 65_536
MAX_PAGES = 2**20

_PARAM = "kv_transfer_params"
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Group = Annotated[list[_Count], msgspec.Meta(max_length=MAX_PAGES)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]

_NEEDED_FROM_PREFILL = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class KVTransferParams(msgspec.Struct, kw_only=True, frozen=True):
    """The object, with every value in its range.

    ``remote_block_ids`` are logical page ids of the prefill engine, one list, or one per group of
    layers. ``remote_blocks_expiry_time`` is a time of the other side's clock and compared with no
    other. ``remote_block_size`` is in tokens. This project's own are ``early_offer``, which asks
    for an answer before the prompt is computed, ``remote_is_partial``, which marks one, and
    ``remote_prompt_digest``, see :func:`dcpjax.engine.remote_kv.prompt_digest`.
    """

    do_remote_decode: bool | None = None
    early_offer: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: _Name | None = None
    remote_port: _Port | None = None
    remote_block_ids: (
        Annotated[list[_Count | _Group], msgspec.Meta(max_length=MAX_PAGES)] | None
    ) = None
    remote_block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    remote_num_tokens: _Count | None = None
    remote_is_partial: bool | None = None
    remote_prompt_digest: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    remote_blocks_expiry_time: float | None = None
    transfer_mode: Literal["pull", "push"] | None = None
    tp_size: _Ranks | None = None
    dcp_size: _Ranks | None = None
    pcp_size: _Ranks | None = None
    pp_size: _Ranks | None = None

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> "KVTransferParams":
        """From a plain mapping.

        Raises:
            RequestError: a value has the wrong type or is out of range, or they contradict.
        """
        try:
            read = msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"kv_transfer_params: {error}", param=_PARAM) from None
        read.check()
        return read

    @property
    def asks_for_transfer(self) -> bool:
        return bool(self.do_remote_decode or self.do_remote_prefill)

    def check(self) -> None:
        """Raise RequestError where single values are in range and contradict each other."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise RequestError(
                "the KV of a request goes to another engine (do_remote_decode) or comes from one "
                "(do_remote_prefill), not both",
                param=_PARAM,
            )
        ids = self.remote_block_ids or []
        if len({isinstance(item, int) for item in ids}) > 1:
            raise RequestError(
                "remote_block_ids is one list of page ids or one list for each group of layers",
                param=_PARAM,
            )
        if self.do_remote_prefill:
            self._check_source()

    def _check_source(self) -> None:
        missing = [name for name in _NEEDED_FROM_PREFILL if getattr(self, name) is None]
        if missing:
            raise RequestError(
                "do_remote_prefill says where the KV is", param=_PARAM, missing=missing
            )

    def json(self) -> dict[str, Any]:
        """What was given, as a plain mapping."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}
