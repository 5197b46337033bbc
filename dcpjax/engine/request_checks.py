"""What an engine refuses of a request before it is queued. Host only."""

from collections.abc import Mapping
from typing import Any

from dcpjax.engine.kv_params import KVTransferParams
from dcpjax.engine.request import Request
from dcpjax.errors import RequestError


def check_tokens(request: Request, vocab_size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        RequestError: naming the field and its values.
    """
    named = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": request.params.stop_token_ids,
        "logit_bias": [token for token, _ in request.params.logit_bias],
    }
    for param, tokens in named.items():
        if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
            raise RequestError(
                f"token ids in {param} are in [0, {vocab_size})",
                param=param,
                lowest=min(tokens),
                highest=max(tokens),
            )


def refuse_transfer(params: Mapping[str, Any] | None) -> None:
    """Refuse a request that wants KV moved, where nobody can.

    Raises:
        RequestError: it does.
    """
    if params is not None and KVTransferParams.read(params).asks_for_transfer:
        raise RequestError(
            "an engine without --kv-transfer-config neither sends nor loads KV",
            param="kv_transfer_params",
        )
