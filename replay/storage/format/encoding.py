"""Writes arrays and texts as bytes: zstd frames with a checksum, arrays little-endian.

A frame of arrays has a header: two magic bytes, a kind, a format number, and the count of tokens. Before anything is
decompressed, the size that a frame declares is compared with the header, or with a limit. A segment's four arrays share
one frame, because opening a frame takes longer than reading it.
"""

import hashlib
import struct
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from context.tokens.token_sequence import TOKEN_FIELDS, Segment, TokenSequence

_MAGIC = b"AL"
_FORMAT = 1
_HEADER = struct.Struct("<2sBBI")
_LOG_PROBS, _TOKENS = 3, 5
# Level 1 makes ids of real text 9 % smaller, but takes half as long again to write and to read.
_ARRAY_LEVEL = -1
# Level 1 makes texts a fifth smaller, for a sixth more time.
_TEXT_LEVEL = 1
_LARGEST_TEXT = 1 << 30
_STORED: dict[str, np.dtype[Any]] = {name: np.dtype(kind).newbyteorder("<") for name, kind in TOKEN_FIELDS.items()}
"""Hashes are over the arrays in this order."""
# Within a frame the widest arrays come first, so that every array is aligned.
_STARTS = {"token_ids": 0, "behavior_log_probs": 4, "policy_versions": 8, "authors": 12}
"""The offset of each array in a frame, in bytes per token."""
TOKEN_BYTES = sum(kind.itemsize for kind in _STORED.values())
FRAME_CHECKSUM_BYTES = 4
"""The size of the checksum of the content, at the end of every frame."""


class BlobError(ValueError):
    """A blob is not what this module wrote."""


class _Codec(threading.local):
    """The zstd contexts of a thread: they are costly to make, and threads must not share them."""

    def __init__(self) -> None:
        self.arrays = zstandard.ZstdCompressor(level=_ARRAY_LEVEL, write_checksum=True, write_content_size=True)
        self.texts = zstandard.ZstdCompressor(level=_TEXT_LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_codec = _Codec()


def encode_tokens(tokens: TokenSequence) -> bytes:
    arrays = b"".join([_stored(tokens, name).data for name in _STARTS])
    return _encode(_TOKENS, len(tokens), arrays)


def decode_tokens(blob: bytes, count: int) -> TokenSequence:
    """`count` tokens from a blob of `encode_tokens`; raises BlobError for any other blob."""
    payload = _decode("tokens", _TOKENS, blob, count, size=TOKEN_BYTES)
    arrays = {name: _array(name, payload, count, start * count) for name, start in _STARTS.items()}
    return TokenSequence(**arrays)


def encode_log_probs(values: npt.NDArray[np.float32]) -> bytes:
    """A blob of log-probs of one segment, under another policy than sampled it."""
    return _encode(_LOG_PROBS, len(values), np.ascontiguousarray(values, _STORED["behavior_log_probs"]).data)


def decode_log_probs(blob: bytes, count: int) -> npt.NDArray[np.float32]:
    """`count` log-probs from a blob of `encode_log_probs`; raises BlobError for any other blob."""
    name = "behavior_log_probs"
    payload = _decode("log_probs", _LOG_PROBS, blob, count, size=_STORED[name].itemsize)
    return _array(name, payload, count, 0)


def compress_text(text: str) -> bytes:
    """A text without lone surrogates, as a frame without a header."""
    return _codec.texts.compress(text.encode())


def decompress_text(frame: bytes) -> str:
    """Return the text of a frame made by `compress_text`; raises BlobError for anything else."""
    if not isinstance(frame, bytes):
        raise BlobError("text that is no frame")
    try:
        declared = zstandard.frame_content_size(frame)
        if not 0 <= declared <= _LARGEST_TEXT:
            raise BlobError(f"text in a frame that declares {declared} bytes")
        return _codec.decompressor.decompress(frame, allow_extra_data=False).decode()
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise BlobError(f"text in a damaged frame ({error})") from error


def content_hash(segments: Iterable[Segment]) -> str:
    """sha256 over every segment's reason, context, ids, authors, log-probs and versions, bit by bit."""
    digest = hashlib.sha256()
    for segment in segments:
        # A plain context is not hashed, so that rows from before there were others keep their hash.
        context = "" if segment.behavior_context == "plain" else f"/{segment.behavior_context}"
        reason = f"{segment.reason}{context}".encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", len(reason), len(segment.tokens)) + reason)
        for name in _STORED:
            digest.update(_stored(segment.tokens, name).data)
    return digest.hexdigest()


def _stored(tokens: TokenSequence, name: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(getattr(tokens, name), _STORED[name])


def _encode(kind: int, count: int, payload: bytes | memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, kind, _FORMAT, count) + _codec.arrays.compress(payload)


def _decode(name: str, kind: int, blob: bytes, count: int, *, size: int) -> bytes:
    """The content of a frame after a header, with `size` bytes per token."""
    if not (isinstance(blob, bytes) and isinstance(count, int) and 0 <= count < 1 << 32):
        raise BlobError(f"{name} that are no bytes, or a count of {count!r}")
    if blob[: _HEADER.size] != _HEADER.pack(_MAGIC, kind, _FORMAT, count):
        raise BlobError(f"{name} with a wrong header")
    expected, frame = count * size, memoryview(blob)[_HEADER.size :]
    try:
        # zstandard trusts a frame's declared size more than any limit given to it, so the size is checked first.
        declared = zstandard.frame_content_size(frame)
        if declared != expected:
            raise BlobError(f"{name} in a frame that declares {declared} bytes where {expected} belong")
        return _codec.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobError(f"{name} in a damaged frame ({error})") from error


def _array(name: str, payload: bytes, count: int, start: int) -> npt.NDArray[Any]:
    return np.frombuffer(payload, _STORED[name], count, start)
