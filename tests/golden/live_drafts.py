"""Drafts as transformers would make them, which has no draft layer: as a model of that one layer.

Imported only where torch and transformers are installed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import save_file
from torch.nn.functional import linear, rms_norm

from dcpjax.models.checkpoint import Checkpoint
from tests.golden import live


@dataclass(frozen=True)
class DraftOracle:
    """A model, its draft layer as another one, and what joins them.

    ``sees_state`` and ``sees_first`` are there to show that drafts depend on them: the hidden
    states, and that the token at position 0 has no embedding.
    """

    target: transformers.PreTrainedModel
    layer: transformers.PreTrainedModel
    joins: dict[str, torch.Tensor]
    sees_state: bool = True
    sees_first: bool = False

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts behind the last of ``tokens``, whose own state is not known yet."""
        known, found = torch.tensor(tokens), []
        states = self.target.model(known[None, :-1]).last_hidden_state[0]
        for _ in range(count):
            state = self.layer.model(inputs_embeds=self._join(known[1:], states)[None])
            last = state.last_hidden_state[0, -1:]
            found.append(int(self.layer.lm_head(last).argmax()))
            known = torch.cat([known, torch.tensor(found[-1:])])
            states = torch.cat([states, last])
        return found

    def _join(self, following: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T, E]: the input of the layer from the next token and the state at each position."""
        embedded = self.target.model.embed_tokens(following)
        if not self.sees_first:
            embedded[0] = 0
        parts = [self._norm("enorm", embedded), self.sees_state * self._norm("hnorm", states)]
        return linear(torch.cat(parts, dim=-1), self.joins["eh_proj"])

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        eps = self.target.config.rms_norm_eps
        return rms_norm(values, values.shape[-1:], self.joins[name], eps)


def draft_oracle(checkpoint: Checkpoint, folder: Path) -> DraftOracle:
    """The oracle for a checkpoint with a draft layer."""
    config = json.loads((Path(checkpoint.path) / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 0}
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {name: checkpoint.read(name) for name in checkpoint.shapes}
    drafting = [name for name in tensors if name.startswith(prefix)]
    of_draft = {name.removeprefix(prefix): tensors.pop(name) for name in drafting}
    joins = {
        name: torch.tensor(of_draft.pop(f"{name}.weight")) for name in ("enorm", "hnorm", "eh_proj")
    }
    shared = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shared["model.norm.weight"] = of_draft.pop("shared_head.norm.weight")
    layer = shared | {f"model.layers.0.{name}": values for name, values in of_draft.items()}
    only = {"num_hidden_layers": 1, "indexer_types": ["full"], "mlp_layer_types": ["sparse"]}
    return DraftOracle(
        _load(folder / "target", config, tensors),
        _load(folder / "layer", config | only, layer),
        joins,
    )


def _load(
    folder: Path, config: dict[str, Any], tensors: dict[str, Any]
) -> transformers.PreTrainedModel:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return live.load(folder)
