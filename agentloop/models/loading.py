"""Load a Hugging Face causal LM with its tokenizer and chat template."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agentloop.config import ModelSection, RunConfig
from agentloop.errors import UserError, needing, one_line, shortened
from context import ChatTemplate, TokenCodec
from context.templates.model_files import ModelFiles, named_controls, named_template, source_for, stop_ids_of


@dataclass(frozen=True)
class LoadedModel(ModelFiles):
    """A model with its tokenizer, chat template and stop tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary; its tokenizer may know fewer tokens."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """Facts that two runs must share so that their tokens and log-probs can be compared."""
        return {
            "tokenizer": self.codec.hash,
            "template": self.template.hash,
            "model_family": str(self.model.config.model_type),
            "vocab_size": self.vocab_size,
        }


def load_model(
    section: ModelSection,
    path: str | Path,
    *,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load from a folder or a hub id. Only safetensors are read, and the model's own code runs only if allowed.

    A folder of adapters (PEFT) is loaded on the model that it names, which stays frozen. `template` is the name, path
    or text of a chat template that replaces the model's own, and is saved with the tokenizer. `template_args` are
    further variables of the template.
    """
    if (Path(path) / "adapter_config.json").exists():
        with needing("peft", f"model.path with the adapters in {str(path)!r}"):
            import_module("peft")
    _check_shards(path)
    codec, chat, tokenizer = _load_tokenizer(section, path, template, template_args)
    with _one_line_errors(path), muted_libraries():
        load: Any = AutoModelForCausalLM.from_pretrained
        model, found = load(
            str(path),
            dtype=getattr(torch, section.dtype),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **_origin(section),
        )
    _check_weights(found, path)
    model = model.to(choose_device(section))
    if has_adapters(model):
        model.enable_adapters()  # they are loaded frozen
    model.eval()  # dropout would make the ratio of unchanged weights differ from 1
    listed = getattr(model.generation_config, "eos_token_id", None)
    return LoadedModel(codec, chat, stop_ids_of(codec, chat, tokenizer.eos_token or "", listed), model, tokenizer)


def load_files(config: RunConfig, path: str | Path) -> ModelFiles:
    """Load what `load_model` loads, but for the model."""
    section, shown, listed = config.model, config.context, None
    codec, chat, tokenizer = _load_tokenizer(section, path, shown.template, shown.template_args)
    with muted_libraries(), suppress(OSError):
        listed = AutoConfig.from_pretrained(str(path), **_origin(section)).get_text_config().eos_token_id
        listed = GenerationConfig.from_pretrained(str(path), **_origin(section)).eos_token_id
    return ModelFiles(codec, chat, stop_ids_of(codec, chat, tokenizer.eos_token or "", listed))


def _load_tokenizer(
    section: ModelSection, path: str | Path, template: str | None, template_args: Mapping[str, Any] | None
) -> tuple[TokenCodec, ChatTemplate, PreTrainedTokenizerBase]:
    with _one_line_errors(path), muted_libraries():
        tokenizer = AutoTokenizer.from_pretrained(str(path), **_origin(section))
    codec = _codec(tokenizer, path)
    if template is not None:
        tokenizer.chat_template = source_for(template, codec)
    return codec, _template(tokenizer, path, template_args), tokenizer


def _origin(section: ModelSection) -> dict[str, Any]:
    return {"revision": section.revision, "trust_remote_code": section.trust_remote_code}


def _check_shards(path: str | Path) -> None:
    """Raises UserError where the index names a file that transformers would unpickle, or a file of another folder."""
    index = Path(path) / "model.safetensors.index.json"
    if not index.is_file():
        return
    with _one_line_errors(index):
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    for name in sorted(names):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"model.path must have its weights in .safetensors files of its own folder, got {shortened(name)!r} in "
                f"{index}. Copy the model again."
            )


def _check_weights(found: Mapping[str, Any], path: str | Path) -> None:
    """Raises UserError for missing or misshapen weights, which transformers would fill with random numbers."""
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise UserError(
            f"model.path must hold weights of the shapes that its config.json says, got {list(stored)} in place of "
            f"{list(wanted)} for {name} in {str(path)!r}. Copy the model again, or correct vocab_size and sizes there."
        )
    if found["missing_keys"]:
        name, *more = sorted(found["missing_keys"])
        raise UserError(
            f"model.path must hold every weight of its architecture, got none for {name} and {len(more)} more in "
            f"{str(path)!r}. Copy the model again, or correct its config.json."
        )


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether the model has PEFT adapters (LoRA), which alone are trained then."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def choose_device(section: ModelSection) -> torch.device:
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if section.device == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device must be available, got cuda on a machine where torch sees none. Use auto or cpu.")
    return torch.device(section.device)


@contextmanager
def muted_libraries() -> Iterator[None]:
    """Mute transformers within the block: its progress bars and reports would disturb the console display."""
    logging = transformers.utils.logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _one_line_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"model.path must hold whole weights, got {str(path)!r} with files that can't be read ({error}). Copy the "
            "model again; where it is a run's checkpoint, remove that to resume from the one before."
        ) from error
    except (UserError, MemoryError):
        raise
    except Exception as error:  # libraries raise whatever comes of what a file says
        problem = one_line(error)
        if not Path(path).exists():
            is_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path))
            problem = f"there is no such folder, and as a hub id: {problem}" if is_id else "there is no such folder"
        raise UserError(
            f"model.path must be a folder or hub id of a causal LM with a tokenizer, got {str(path)!r} ({problem}). "
            "Check the path; a folder is made by save_pretrained of both model and tokenizer."
        ) from error


def _codec(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> TokenCodec:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Where a folder has none, transformers makes one that knows its special tokens only.
    if backend is None or backend.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model.path must have a fast tokenizer, got none in {str(path)!r}. Copy tokenizer.json and "
            "tokenizer_config.json there, or save it with tokenizer.save_pretrained."
        )
    return TokenCodec(backend.to_str(), special=named_controls(_special(tokenizer)))


def _template(tokenizer: PreTrainedTokenizerBase, path: str | Path, args: Mapping[str, Any] | None) -> ChatTemplate:
    found: Any = tokenizer.chat_template
    template = named_template(found if isinstance(found, Mapping) else {"default": found}, _special(tokenizer), args)
    if template is None:
        raise UserError(
            f"model.path must have a chat template, got none in {str(path)!r}. Use an instruction-tuned model, "
            "or set context.template."
        )
    return template


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The special tokens that the tokenizer names: bos_token, eos_token, ..."""
    return {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}


def check_positions(model: PreTrainedModel, max_tokens: int) -> str | None:
    """A remark if the context is longer than the positions that the model was trained with; None if it is not.

    Rotary positions continue beyond the trained ones, but mostly give nonsense. Learned positions end, which raises
    UserError.
    """
    config: Any = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is None or max_tokens <= most:
        return None
    if not any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling")):
        raise UserError(f"context.max_tokens must be at most {most}, its positions, got {max_tokens}. Lower it.")
    return (
        f"context.max_tokens {max_tokens:,} is beyond the {most:,} positions of {type(model).__name__}: what it says "
        "there may be nonsense, unless its config.json scales them (rope_scaling)"
    )
