"""Arrays at rest: a header, then one zstd frame with checksum. Little-endian on every machine.

Header: two magic bytes, a kind, a format number, and the count of tokens. The size a frame declares is compared
with what the header implies before anything is decompressed, so that no stored frame can inflate beyond its array.

Log-probs are written with NaN where no policy sampled the token: these compress to almost nothing, and only the
action tokens' float32 values take room.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from context.tokens import Segment, TokenSequence

_MAGIC = b"AL"
_FORMAT = 1
_HEADER = struct.Struct("<2sBBI")
# Level 1 makes ids of real text 9 % smaller, and takes half as long again to write and to read.
_LEVEL = -1
_KINDS = {"token_ids": 1, "authors": 2, "behavior_log_probs": 3, "policy_versions": 4}
_STORED: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "authors": np.dtype("u1"),
    "behavior_log_probs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
}


class BlobError(ValueError):
    """A blob that is not what this module wrote."""


class _Codec(threading.local):
    """zstd contexts are costly to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_codec = _Codec()


def encode_tokens(tokens: TokenSequence) -> dict[str, bytes]:
    """One blob per field, by the names of `TokenSequence`."""
    compress = _codec.compressor.compress
    return {
        name: _HEADER.pack(_MAGIC, kind, _FORMAT, len(tokens)) + compress(_stored(tokens, name).data)
        for name, kind in _KINDS.items()
    }


def encode_log_probs(values: npt.NDArray[np.float32]) -> bytes:
    """Log-probs of one segment that are no part of its tokens, as those that are."""
    header = _HEADER.pack(_MAGIC, _KINDS["behavior_log_probs"], _FORMAT, len(values))
    return header + _codec.compressor.compress(np.ascontiguousarray(values, _STORED["behavior_log_probs"]).data)


def decode_log_probs(blob: bytes, count: int) -> npt.NDArray[np.float32]:
    """`count` of them; raises BlobError for any other blob."""
    return _decode("behavior_log_probs", blob, count)


def decode_tokens(blobs: Sequence[bytes], count: int) -> TokenSequence:
    """`count` tokens from the blobs of `encode_tokens`, in its order; raises BlobError for any other blob."""
    return TokenSequence(*[_decode(name, blob, count) for name, blob in zip(_KINDS, blobs, strict=True)])


def content_hash(segments: Iterable[Segment]) -> str:
    """sha256 over every segment's reason, context, ids, authors, log-probs and versions, bit by bit."""
    digest = hashlib.sha256()
    for segment in segments:
        # A plain context leaves no trace: rows from before there were others keep their hash.
        context = "" if segment.behavior_context == "plain" else f"/{segment.behavior_context}"
        reason = f"{segment.reason}{context}".encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", len(reason), len(segment.tokens)) + reason)
        for name in _KINDS:
            digest.update(_stored(segment.tokens, name).data)
    return digest.hexdigest()


def token_hash(segments: Iterable[Segment]) -> str:
    """sha256 over ids and authors only: rows that say the same have the same, whoever sampled them and when."""
    digest = hashlib.sha256()
    for segment in segments:
        digest.update(struct.pack("<I", len(segment.tokens)))
        for name in ("token_ids", "authors"):
            digest.update(_stored(segment.tokens, name).data)
    return digest.hexdigest()


def _stored(tokens: TokenSequence, name: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(getattr(tokens, name), _STORED[name])


def _decode(name: str, blob: bytes, count: int) -> npt.NDArray[Any]:
    if blob[: _HEADER.size] != _HEADER.pack(_MAGIC, _KINDS[name], _FORMAT, count):
        raise BlobError(f"{name} with a wrong header")
    dtype = _STORED[name]
    expected = count * dtype.itemsize
    frame = memoryview(blob)[_HEADER.size :]
    try:
        # zstandard trusts a frame's declared size over any limit it is given: it has to be checked first.
        declared = zstandard.frame_content_size(frame)
        if declared != expected:
            raise BlobError(f"{name} in a frame that declares {declared} bytes where {expected} belong")
        payload = _codec.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobError(f"{name} in a damaged frame ({error})") from error
    if len(payload) != expected:
        raise BlobError(f"{name} of another size than its frame declares")
    array = np.frombuffer(payload, dtype)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))
