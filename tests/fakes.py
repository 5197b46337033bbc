"""Stand-ins for the slow parts: an engine that counts up and a tokenizer of bytes."""

from dataclasses import dataclass, field
from typing import Any

import tokenizers

from dcpjax.config import LlamaConfig
from dcpjax.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from dcpjax.errors import ContextLengthError, RequestError
from dcpjax.text.pieces import BYTE_OF_CHARACTER, PieceSpelling
from dcpjax.text.template import ChatTemplate
from dcpjax.text.tokenizer import Tokenizer

EOS = 256
VOCAB_SIZE = 257


@dataclass
class CountUpEngine:
    """The next token is the last one plus one; after 255 comes the end of sequence.

    ``gate``, where set, is asked before every step and may block: a test that wants to act while a
    request runs holds the engine there. ``aborted`` lists what was aborted before it had ended.
    """

    max_model_len: int = 512
    max_num_seqs: int = 16
    gate: Any = None
    fail_at_step: int | None = None
    aborted: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_cache_resets: int = 0
    num_offers: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.model_config = LlamaConfig(
            architecture="fake",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            max_position_embeddings=self.max_model_len,
            eos_token_ids=(EOS,),
        )
        self._open: dict[str, Request] = {}
        self._ended: list[TokenOutput] = []
        self._seen: set[str] = set()
        self._num_prompt_tokens = 0
        self._num_generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def is_blocked(self) -> bool:
        return False

    def on_wake(self, wake) -> None:
        """Never blocked."""

    @property
    def open_requests(self) -> list[Request]:
        return list(self._open.values())

    def add(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        assert request.request_id not in self._seen, "request ids are unique"
        self._seen.add(request.request_id)
        if not prompt:
            raise RequestError("a prompt has at least one token", param="prompt")
        if not all(0 <= token < VOCAB_SIZE for token in prompt):
            raise RequestError("token ids are below the vocabulary size", param="prompt")
        wanted = len(prompt) + (request.params.max_tokens or 1)
        if wanted > self.max_model_len:
            raise ContextLengthError(
                "the prompt and max_tokens fit into the maximum context length of "
                f"{self.max_model_len} tokens",
                param="prompt",
                tokens=wanted,
            )
        self._num_prompt_tokens += len(prompt)
        self._open[request.request_id] = request

    def abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._ended.append(TokenOutput(request_id, (), FinishReason.ABORT))

    def step(self) -> list[TokenOutput]:
        if self.gate is not None and self._open:
            self.gate()
        self.num_steps += bool(self._open)
        if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
            raise RuntimeError("the device is lost")
        outputs, self._ended = self._ended, []
        running = self.open_requests[: self.max_num_seqs]
        return outputs + [self._advance(request) for request in running]

    def _advance(self, request: Request) -> TokenOutput:
        params = request.params
        token = (request.token_ids[-1] + 1) % VOCAB_SIZE
        request.output_token_ids.append(token)
        self._num_generated += 1
        count = len(request.output_token_ids)
        may_stop = count >= params.min_tokens
        is_eos = may_stop and token in request.eos_token_ids and not params.ignore_eos
        is_stop = may_stop and not is_eos and token in params.stop_token_ids
        is_full = count == params.max_tokens or request.num_tokens == self.max_model_len
        reason = None
        if is_eos or is_stop:
            reason = FinishReason.STOP
        elif is_full:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._open[request.request_id]
        logprobs = ()
        if params.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, 1, top),)
        return TokenOutput(
            request.request_id,
            (token,),
            finish_reason=reason,
            stop_token_id=token if is_stop else None,
            logprobs=logprobs,
            num_cached_tokens=len(request.prompt_token_ids) // 2,
        )

    def stats(self) -> dict[str, object]:
        running = min(len(self._open), self.max_num_seqs)
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(self._open) - running,
            "num_preemptions": 0,
            "num_recomputations": 0,
            "kv_cache_usage": 0.25,
            "kv_page_fragmentation": 0.0,
            "num_pages": 64,
            "block_size": 16,
            "prefix_cache_queries": 10,
            "prefix_cache_hits": 4,
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_generated,
            "steps": self.num_steps,
            "compilations_after_warmup": 0,
            "compiled_shapes": ["decode 8"],
            "kv_bytes_per_rank": 4096,
            "kv_tokens_capacity": 1024,
            "acceptance_length": 1.0,
            "audit": {"steps": 1, "temporary_bytes": 2048},
        }

    def reset_prefix_cache(self) -> None:
        self.num_cache_resets += 1

    def close(self) -> None:
        self.is_closed = True


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
    "{% if fail %}{{ raise_exception('no') }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8; 256 ends a sequence."""
    vocabulary = {character: byte for character, byte in BYTE_OF_CHARACTER.items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(
        backend=backend,
        spelling=PieceSpelling(),
        special_ids=frozenset({EOS}),
        bos_token_id=None,
        eos_token_id=EOS,
        templates={"default": ChatTemplate.compile(TEMPLATE, {})},
    )
