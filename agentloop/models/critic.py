"""Values of states: a value head on a copy of the policy."""

import copy

import torch
from torch import Tensor, nn

from agentloop.algorithms.log_probs import predictions
from agentloop.models.actor import Actor
from agentloop.models.backbone_passes import Passes


class Critic:
    """Values of states, read where the policy reads the logits of the token that follows.

    The head starts at zero, so a new critic says 0 of everything. It is float32 (float64 for a float64 model) whatever
    the backbone is, which is always run in evaluation mode.
    """

    def __init__(self, actor: Actor) -> None:
        self.packs = actor.packs
        self.dtype = actor.dtype
        self._backbone = copy.deepcopy(actor.model.base_model)
        self.passes = Passes(self._backbone, actor.device, actor.compute)
        self._head = nn.Linear(actor.model.config.get_text_config().hidden_size, 1)
        self._head.to(device=actor.device, dtype=actor.dtype)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self.weights = nn.ModuleDict({"backbone": self._backbone, "head": self._head})
        """What its optimizer moves and a checkpoint of the critic holds."""

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def values(self, token_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the states before each action token, [B, T], and behind each row's last token, [B]; reward units.

        0 where `response_mask` is False. Rows must be padded on the right.
        """
        if self._backbone.training:
            self._backbone.train(False)
        wanted = predictions(response_mask)
        laid = self.passes.laid(token_ids, attention_mask, packs=self.packs)
        with self.passes.open(laid):
            states: Tensor = self._backbone(**laid.inputs, use_cache=False).last_hidden_state.to(self.dtype)
        flat = states.flatten(0, 1)
        # index_select, not advanced indexing: its backward is an index_add instead of a sorting index_put.
        before = self._head(flat.index_select(0, laid.places[wanted.rows, wanted.sources]))[:, 0]
        ends = laid.places.gather(1, attention_mask.sum(dim=1)[:, None] - 1)[:, 0]
        values = torch.zeros(token_ids.shape, dtype=self.dtype, device=token_ids.device)
        return values.masked_scatter(response_mask, before), self._head(flat.index_select(0, ends))[:, 0]
