from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from context.tokens import Segment, TokenSequence
from replay import blobs
from tests.replay.fakes import SHORT, tokens

floats = st.one_of(st.just(float("nan")), st.floats(-90, 0, width=32))


@given(st.lists(floats, max_size=70))
def test_log_probs_come_back_bit_equal(values: list[float]) -> None:
    array = blobs.canonical_nan(np.array(values, np.float32))
    assert blobs.decode_log_probs(blobs.encode_log_probs(array), len(array)).tobytes() == array.tobytes()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70))
def test_ids_come_back_equal(values: list[int]) -> None:
    array = np.array(values, np.int32)
    assert blobs.decode_int32(blobs.encode_int32(array), len(array)).tolist() == values


def test_log_probs_store_sampled_tokens_only() -> None:
    random = np.random.default_rng(0)
    known = np.full(2000, np.nan, np.float32)
    known[::2] = -random.random(1000, dtype=np.float32)
    # 1,000 values of 4 bytes that hardly compress, 2,000 bits that do.
    assert len(blobs.encode_log_probs(known)) < 4 * 1000 + 100


def test_blob_begins_with_magic_kind_format_and_count_little_endian() -> None:
    blob = blobs.encode_int32(np.arange(258, dtype=np.int32))
    assert blob[:8] == b"AL\x01\x01\x02\x01\x00\x00"
    assert zstandard.decompress(blob[8:])[:8] == b"\x00\x00\x00\x00\x01\x00\x00\x00"


@pytest.mark.parametrize("field", ["token_ids", "authors", "behavior_log_probs", "policy_versions"])
def test_every_bit_flip_is_detected_or_harmless(field: str) -> None:
    blob = bytearray(blobs.encode_tokens(SHORT)[field])
    decode = {"authors": blobs.decode_uint8, "behavior_log_probs": blobs.decode_log_probs}.get(
        field, blobs.decode_int32
    )
    harmless = 0
    for bit in range(8 * len(blob)):
        blob[bit // 8] ^= 1 << bit % 8
        try:
            harmless += decode(bytes(blob), len(SHORT)).tobytes() == getattr(SHORT, field).tobytes()
        except blobs.BlobError:
            pass
        else:
            assert decode(bytes(blob), len(SHORT)).tobytes() == getattr(SHORT, field).tobytes()
        blob[bit // 8] ^= 1 << bit % 8
    # zstd's frame header has a bit nobody reads.
    assert harmless <= 2


def test_every_truncation_is_detected() -> None:
    blob = blobs.encode_int32(np.arange(50, dtype=np.int32))
    for size in range(len(blob)):
        with pytest.raises(blobs.BlobError):
            blobs.decode_int32(blob[:size], 50)
    with pytest.raises(blobs.BlobError):
        blobs.decode_int32(blob + b"x", 50)


def test_bomb_is_refused_before_it_inflates() -> None:
    bomb = zstandard.compress(bytes(2**28))
    header = blobs.encode_int32(np.arange(3, dtype=np.int32))[:8]
    with pytest.raises(blobs.BlobError, match="declares 268435456 bytes where 12 fit"):
        blobs.decode_int32(header + bomb, 3)


def test_frame_without_a_declared_size_is_refused() -> None:
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(12))
    with pytest.raises(blobs.BlobError):
        blobs.decode_int32(blobs.encode_int32(np.arange(3, dtype=np.int32))[:8] + undeclared, 3)


def test_log_prob_blob_needs_as_many_values_as_bits() -> None:
    blob = blobs.encode_log_probs(np.array([np.nan, -1.0, -2.0], np.float32))
    payload = bytearray(zstandard.decompress(blob[8:]))
    payload[0] = 0b11100000
    with pytest.raises(blobs.BlobError, match="do not fit its bits"):
        blobs.decode_log_probs(blob[:8] + zstandard.compress(bytes(payload)), 3)


@settings(max_examples=50)
@given(st.integers(0, 3), st.integers(0, 5))
def test_content_hash_depends_on_every_field_of_every_token(field: int, position: int) -> None:
    arrays = [SHORT.token_ids, SHORT.authors, SHORT.behavior_log_probs, SHORT.policy_versions]
    changed = [array.copy() for array in arrays]
    changed[field][position] = 1
    if changed[field].tobytes() != arrays[field].tobytes():
        other = Segment(TokenSequence(*changed))
        assert blobs.content_hash([other]) != blobs.content_hash([Segment(SHORT)])


def test_content_hash_depends_on_where_segments_end_and_why() -> None:
    first, second = tokens([1, 2], ["user", "llm"]), tokens([3], ["env"])
    joined = TokenSequence.concatenate([first, second])
    hashes = {
        blobs.content_hash([Segment(joined)]),
        blobs.content_hash([Segment(first), Segment(second)]),
        blobs.content_hash([Segment(first), Segment(second, "clipped")]),
        blobs.content_hash([Segment(second), Segment(first)]),
    }
    assert len(hashes) == 4


def test_content_hash_ignores_which_nan_stands_for_unknown() -> None:
    other = SHORT.behavior_log_probs.copy()
    other.view(np.uint32)[0] = 0x7FC00001
    assert np.isnan(other[0])
    same = TokenSequence(SHORT.token_ids, SHORT.authors, other, SHORT.policy_versions)
    assert blobs.content_hash([Segment(same)]) == blobs.content_hash([Segment(SHORT)])
