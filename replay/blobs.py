"""Arrays at rest: a header, then one zstd frame with checksum. Little-endian on every machine.

Header: two magic bytes, a kind, a format number, and the count of tokens. The size a frame declares is compared
with what the header implies before anything is decompressed, so that no stored frame can inflate beyond its array.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import zstandard

from context.tokens import Segment, TokenSequence

_MAGIC = b"AL"
_FORMAT = 1
_HEADER = struct.Struct("<2sBBI")
_LEVEL = 3
_INT32, _UINT8, _LOG_PROBS = 1, 2, 3


class BlobError(ValueError):
    """A blob that is not what this module wrote."""


class _Codec(threading.local):
    """zstd contexts are costly to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_codec = _Codec()


def encode_int32(values: npt.NDArray[np.int32]) -> bytes:
    return _pack(_INT32, len(values), values.astype("<i4", copy=False).tobytes())


def decode_int32(blob: bytes, count: int) -> npt.NDArray[np.int32]:
    payload = _unpack(blob, _INT32, count, smallest=4 * count, largest=4 * count)
    return np.frombuffer(payload, "<i4").astype(np.int32, copy=False)


def encode_uint8(values: npt.NDArray[np.uint8]) -> bytes:
    return _pack(_UINT8, len(values), values.tobytes())


def decode_uint8(blob: bytes, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(_unpack(blob, _UINT8, count, smallest=count, largest=count), np.uint8)


def encode_log_probs(values: npt.NDArray[np.float32]) -> bytes:
    """[T] float32 with NaN where unknown: one bit per token, then the known values only."""
    known = ~np.isnan(values)
    return _pack(
        _LOG_PROBS,
        len(values),
        np.packbits(known).tobytes() + values[known].astype("<f4", copy=False).tobytes(),
    )


def decode_log_probs(blob: bytes, count: int) -> npt.NDArray[np.float32]:
    bits = -(-count // 8)
    payload = _unpack(blob, _LOG_PROBS, count, smallest=bits, largest=bits + 4 * count)
    known = np.unpackbits(np.frombuffer(payload, np.uint8, bits), count=count).astype(np.bool_)
    if len(payload) != bits + 4 * int(known.sum()):
        raise BlobError("a log-prob blob whose values do not fit its bits")
    values = np.full(count, np.nan, np.float32)
    values[known] = np.frombuffer(payload, "<f4", offset=bits)
    return values


def content_hash(segments: Iterable[Segment]) -> str:
    """sha256 over every segment's reason, ids, authors, log-probs and versions. Any NaN counts as the same NaN."""
    digest = hashlib.sha256()
    for segment in segments:
        tokens = segment.tokens
        reason = segment.reason.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", len(reason), len(tokens)))
        digest.update(reason)
        digest.update(tokens.token_ids.astype("<i4", copy=False).tobytes())
        digest.update(tokens.authors.tobytes())
        digest.update(canonical_nan(tokens.behavior_log_probs).astype("<f4", copy=False).tobytes())
        digest.update(tokens.policy_versions.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def canonical_nan(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Floats have millions of NaNs, and only one of them is stored."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def encode_tokens(tokens: TokenSequence) -> dict[str, bytes]:
    """One blob per column of the `segments` table."""
    return {
        "token_ids": encode_int32(tokens.token_ids),
        "authors": encode_uint8(tokens.authors),
        "behavior_log_probs": encode_log_probs(tokens.behavior_log_probs),
        "policy_versions": encode_int32(tokens.policy_versions),
    }


def _pack(kind: int, count: int, payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, kind, _FORMAT, count) + _codec.compressor.compress(payload)


def _unpack(blob: bytes, kind: int, count: int, *, smallest: int, largest: int) -> bytes:
    if len(blob) < _HEADER.size or _HEADER.unpack_from(blob) != (_MAGIC, kind, _FORMAT, count):
        raise BlobError("a blob with a wrong header")
    frame = blob[_HEADER.size :]
    try:
        # zstandard trusts a frame's declared size over any limit it is given: it has to be checked first.
        size = zstandard.frame_content_size(frame)
        if not smallest <= size <= largest:
            raise BlobError(f"a frame that declares {size} bytes where {largest} fit")
        payload = _codec.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobError(f"a damaged frame ({error})") from error
    if len(payload) != size:
        raise BlobError("a frame of another size than it declares")
    return payload
