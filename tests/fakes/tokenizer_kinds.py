"""Tokenizers of every kind that models come with, in miniature: one vocabulary per kind, trained on a few lines, and
every control token that a template spells.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from context.templates.model_files import spelled_controls, train_tokenizer

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
CORPUS = [
    "You are a careful agent. What is the code of pearl? The code is 78, and the next one 1024.",
    '{"name": "lookup", "arguments": {"key": "pearl", "limit": 3}, "parameters": {"type": "object"}}',
    "system user assistant tool ipython function observation think response result description properties string",
    "Hello there, how are you today? I will look it up and tell you. Thanks!\n\n    def f(x):\n        return x\n",
    "Ein paar Wörter für den Anfang, ¿qué tal? 你好，世界。今天 日本語 テスト 한국어 😀",
] * 8
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_OTHER_CONTROLS = re.compile(r"\]~!?b[\[\]]|\[e~\[|\[\|/?\w+\|\]")
"""MiniMax's and EXAONE's, which look like nobody else's."""
_SPACE = "\u2581"


def controls_of(template_source: str) -> list[str]:
    """bos, eos, and every control token a template spells."""
    return list(dict.fromkeys([*spelled_controls(template_source), *_OTHER_CONTROLS.findall(template_source)]))


def tokenizer_kinds() -> dict[str, Callable[[str], str]]:
    """Kind -> what makes its tokenizer.json for a template."""
    made: dict[str, Callable[[], str]] = {
        "byte_bpe": _byte_bpe,
        "byte_bpe_split": _byte_bpe_split,
        "sp_legacy": _sentencepiece_legacy,
        "sp_first": partial(_metaspace, "first"),
        "sp_always": partial(_metaspace, "always"),
    }
    return {
        **{kind: partial(_added, make) for kind, make in made.items()},
        "nfkc": _with_normalized_controls,
        "strips": _with_strips,
        "unk_is_eos": _with_unk_as_eos,
    }


def lossless(kind: str) -> bool:
    """Whether text survives encoding and decoding letter by letter."""
    return kind in ("byte_bpe", "byte_bpe_split", "unk_is_eos")


def _with(tokenizer_json: str, special: Sequence[str], added: Sequence[str], *, normalized: bool = False) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=normalized) for name in added])
    return tokenizer


def _added(make: Callable[[], str], template_source: str) -> str:
    """As most do it: the first tokens are special, the others only added (Qwen's <tool_call>)."""
    names = controls_of(template_source)
    half = (len(names) + 1) // 2
    return str(_with(make(), names[:half], names[half:]).to_str())


def _with_normalized_controls(template_source: str) -> str:
    tokenizer = _with(_byte_bpe(), (BOS, EOS), ())
    tokenizer.normalizer = normalizers.NFKC()
    return str(_with(tokenizer.to_str(), (), controls_of(template_source)[2:], normalized=True).to_str())


def _with_strips(template_source: str) -> str:
    """As Phi-3's: tokens that swallow white space on their right; here some on their left, and bos only as a word."""
    tokenizer = Tokenizer.from_str(_sentencepiece_legacy())
    names = controls_of(template_source)
    tokenizer.add_special_tokens(
        [
            AddedToken(name, normalized=False, rstrip=place % 4 != 3, lstrip=place % 4 == 3, single_word=place == 0)
            for place, name in enumerate(names)
        ]
    )
    return str(tokenizer.to_str())


def _with_unk_as_eos(template_source: str) -> str:
    """As GPT-2, whose one special token has all parts."""
    described = json.loads(_added(partial(_byte_bpe, EOS), template_source))
    described["model"]["unk_token"] = EOS
    return json.dumps(described)


@cache
def _byte_bpe(*special: str) -> str:
    return str(train_tokenizer(CORPUS, special, vocab_size=700 - len(special)).to_str())


@cache
def _byte_bpe_split() -> str:
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = train_tokenizer(CORPUS, [], vocab_size=800, pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]))
    tokenizer.model.ignore_merges = True
    return str(tokenizer.to_str())


@cache
def _sentencepiece() -> dict[str, Any]:
    """Vocabulary and merges as converted SentencePiece files have them: control pieces first, then all bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = [UNK, BOS, EOS, *_byte_pieces()]
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=1100, special_tokens=special, initial_alphabet=[_SPACE, *letters], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _sentencepiece_bpe() -> Tokenizer:
    model = _sentencepiece()
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    return _with(tokenizer.to_str(), (UNK, BOS, EOS), ())


@cache
def _sentencepiece_legacy() -> str:
    """As Llama 2 and Mistral convert."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return str(tokenizer.to_str())


@cache
def _metaspace(scheme: str) -> str:
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=False)]
    )
    return str(tokenizer.to_str())


def _byte_pieces() -> Sequence[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]
