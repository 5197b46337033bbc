"""transformers on torch, float32 on CPU. Imported only where both are installed."""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.golden.records import Continuation, Scored


def load(path: Path) -> transformers.PreTrainedModel:
    """A Hugging Face folder or a GGUF file."""
    if path.is_dir():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return loaded.eval()
    # from_pretrained reads GGUF files too, but wants one more package for it.
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and not set(missing) - {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def logits_of(model: transformers.PreTrainedModel, tokens: list[int], last: int = 0) -> np.ndarray:
    """Logits [positions, vocabulary] of the ``last`` positions, 0 for all, in one forward pass."""
    return model(torch.tensor([tokens]), logits_to_keep=last).logits[0].numpy()


@torch.no_grad()
def score(model: transformers.PreTrainedModel, tokens: list[int]) -> Scored:
    """One forward pass of a latent-cache model, and the cache that it leaves."""
    result = model(torch.tensor([tokens]), use_cache=True)
    layers = result.past_key_values.layers
    latents = [torch.cat([layer.keys, layer.values], dim=-1)[0, 0] for layer in layers]
    keys = [getattr(layer, "indexer_keys", None) for layer in layers]
    keys = [each[0] for each in keys if each is not None]
    return Scored(
        np.asarray(tokens, np.int32),
        result.logits[0].numpy(),
        torch.stack(latents).numpy(),
        torch.stack(keys).numpy() if keys else np.zeros((0, len(tokens), 0), np.float32),
    )


@torch.no_grad()
def greedy_tokens(
    model: transformers.PreTrainedModel, prompt: list[int], count: int
) -> tuple[int, ...]:
    """The ``count`` most likely next tokens, one after the other, end-of-sequence ignored."""
    cache, inputs, tokens = None, torch.tensor([prompt]), []
    for _ in range(count):
        result = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        inputs = result.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(inputs))
    return tuple(tokens)


def continue_prompt(
    model: transformers.PreTrainedModel, name: str, prompt: list[int], count: int
) -> Continuation:
    tokens = greedy_tokens(model, prompt, count)
    _, margins = choices(model, prompt, tokens)
    return Continuation(name, tuple(prompt), tokens, float(margins.min()))


def choices(
    model: transformers.PreTrainedModel, prompt: list[int], tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], np.ndarray]:
    """What one pass over prompt and ``tokens`` finds most likely at the place of each of them.

    Greedy tokens are those for which this gives the same tokens again.

    Returns:
        the tokens, and how far the best logit is above the second one.
    """
    logits = logits_of(model, [*prompt, *tokens[:-1]], last=len(tokens))
    best = np.sort(logits, axis=-1)[:, -2:]
    return tuple(logits.argmax(-1).tolist()), best[:, 1] - best[:, 0]
