"""A Hugging Face sequence classifier that scores whole conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentloop.config import ModelSection
from agentloop.config.sections.reward import RewardModelSection
from agentloop.errors import UserError, one_line
from agentloop.models.loading import check_shards, choose_device, muted_libraries
from context.messages import Message, below, to_template


class SequenceClassifier:
    """Reads a conversation in its own chat template, or where it has none, as lines of `role: content`."""

    def __init__(self, section: RewardModelSection, policy: ModelSection) -> None:
        """On the policy's device. Raises UserError for what is no sequence classifier."""
        self._section = section
        check_shards(str(section.path), "reward.model.path")
        origin: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
        try:
            with muted_libraries():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(str(section.path), **origin)
                model, loading = AutoModelForSequenceClassification.from_pretrained(
                    str(section.path),
                    dtype=getattr(torch, policy.dtype),
                    use_safetensors=True,
                    output_loading_info=True,
                    **origin,
                )
        except Exception as error:  # libraries raise whatever comes of what a file says
            raise UserError(
                f"reward.model.path must be a folder or hub id of a sequence classifier, got {section.path!r} with "
                f"{one_line(error)}. Check the path."
            ) from error
        if loading["missing_keys"]:
            # transformers would make the head up, at random: any causal model could then be given by mistake.
            raise UserError(
                f"reward.model.path must hold a trained classification head, got {section.path!r} without "
                f"{sorted(loading['missing_keys'])[0]}. Name a reward model."
            )
        outputs = int(model.config.num_labels)
        if (outputs == 1) != (section.label is None) or (section.label or 0) >= outputs:
            raise UserError(
                f"reward.model.label must be null for a model with one output, else the number of one, got "
                f"{section.label} with {outputs} outputs. Change it."
            )
        most = _positions(model)
        if most is not None and section.max_tokens > most:
            raise UserError(
                f"reward.model.max_tokens must be at most {most}, the positions of {section.path!r}, got "
                f"{section.max_tokens}. Lower it."
            )
        self._tokenizer.truncation_side = "left"  # the end of a conversation decides: it is never cut
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token_id is None:
            raise UserError(
                f"reward.model.path must have a tokenizer with a padding or end token, got neither in {section.path!r}."
            )
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model: Any = model.to(choose_device(policy)).eval().requires_grad_(False)

    @torch.no_grad()
    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The one logit, or the probability of `reward.model.label`, at the end of each conversation."""
        scores: list[float] = []
        texts = [self._text(messages) for messages in conversations]
        for start in range(0, len(texts), self._section.batch):
            encoded = self._tokenizer(
                texts[start : start + self._section.batch],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self._section.max_tokens,
                # A chat template writes the special tokens itself.
                add_special_tokens=self._tokenizer.chat_template is None,
            )
            encoded.pop("token_type_ids", None)
            logits: Tensor = self._model(**encoded.to(self._model.device)).logits.float()
            column = logits[:, 0] if self._section.label is None else logits.softmax(dim=1)[:, self._section.label]
            scores += column.tolist()
        return scores

    def _text(self, messages: Sequence[Message]) -> str:
        if self._tokenizer.chat_template is None:
            return "\n".join(line for message in messages for line in _lines(message))
        text: str = self._tokenizer.apply_chat_template([to_template(m) for m in messages], tokenize=False)
        return text


def _positions(model: Any) -> int | None:
    """Longest text of a model; None: it does not say."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None or most <= 0:
        return None
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((table.padding_idx for table in tables if isinstance(table, torch.nn.Embedding)), None)
    # Models after RoBERTa count positions from behind the one of the padding.
    return int(most) if padding is None else int(most) - padding - 1


def _lines(message: Message) -> list[str]:
    """All that was said: reasoning, content and tool calls, a line each, those that there are."""
    role = message.role if message.name is None else f"{message.role} ({message.name})"
    content = below(message.content, message.note)
    lines = [] if message.reasoning is None else [f"{role} (reasoning): {message.reasoning}"]
    if content or not message.tool_calls:
        lines.append(f"{role}: {content}")
    calls = [(call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in message.tool_calls]
    return [*lines, *(f"{role} calls {name}: {arguments}" for name, arguments in calls)]
