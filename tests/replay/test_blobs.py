from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from context.tokens import Segment, TokenSequence
from replay import blobs
from tests.replay.fakes import SHORT, tokens

FIELDS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
ENCODED = list(blobs.encode_tokens(SHORT).values())


def with_blob(field: str, blob: bytes) -> list[bytes]:
    return [blob if name == field else kept for name, kept in zip(FIELDS, ENCODED, strict=True)]


def rows(element: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(element, min_size=9, max_size=9)


@given(
    rows(st.integers(0, 2**31 - 1)),
    rows(st.integers(0, 255)),
    rows(st.one_of(st.just(float("nan")), st.floats(-90, 0, width=32))),
    rows(st.integers(-1, 2**31 - 1)),
)
def test_tokens_come_back_bit_equal(
    ids: list[float], authors: list[float], log_probs: list[float], versions: list[float]
) -> None:
    given_tokens = TokenSequence(
        np.array(ids, np.int32),
        np.array(authors, np.uint8),
        np.array(log_probs, np.float32),
        np.array(versions, np.int32),
    )
    found = blobs.decode_tokens(list(blobs.encode_tokens(given_tokens).values()), 9)
    assert found.equals(given_tokens)


def test_log_probs_take_room_for_sampled_tokens_only() -> None:
    random = np.random.default_rng(0)
    sequence = tokens([1] * 2000, (["llm"] * 20 + ["env"] * 20) * 50)
    sampled = np.isfinite(sequence.behavior_log_probs)
    noise = np.where(sampled, -random.random(2000, dtype=np.float32), np.float32(np.nan))
    blob = blobs.encode_tokens(replace(sequence, behavior_log_probs=noise))["behavior_log_probs"]
    # 1,000 values of 4 bytes that hardly compress, in 50 stretches.
    assert len(blob) < 4 * 1000 + 50 * 4


def test_blob_begins_with_magic_kind_format_and_count_little_endian() -> None:
    sequence = TokenSequence.constant(range(258), 0)
    blob = blobs.encode_tokens(sequence)["token_ids"]
    assert blob[:8] == b"AL\x01\x01\x02\x01\x00\x00"
    assert zstandard.decompress(blob[8:])[:8] == b"\x00\x00\x00\x00\x01\x00\x00\x00"


@pytest.mark.parametrize("field", FIELDS)
def test_every_bit_flip_is_detected_or_harmless(field: str) -> None:
    blob = bytearray(ENCODED[FIELDS.index(field)])
    harmless = 0
    for bit in range(8 * len(blob)):
        blob[bit // 8] ^= 1 << bit % 8
        try:
            found = blobs.decode_tokens(with_blob(field, bytes(blob)), len(SHORT))
        except blobs.BlobError:
            pass
        else:
            assert found.equals(SHORT)
            harmless += 1
        blob[bit // 8] ^= 1 << bit % 8
    # zstd's frame header has bits nobody reads.
    assert harmless <= 2


def test_every_truncation_is_detected() -> None:
    blob = ENCODED[0]
    for damaged in [*(blob[:size] for size in range(len(blob))), blob + b"x"]:
        with pytest.raises(blobs.BlobError, match="^token_ids "):
            blobs.decode_tokens(with_blob("token_ids", damaged), len(SHORT))


def test_bomb_is_refused_before_it_inflates() -> None:
    bomb = ENCODED[0][:8] + zstandard.compress(bytes(2**28))
    with pytest.raises(blobs.BlobError, match="declares 268435456 bytes where 24 belong"):
        blobs.decode_tokens(with_blob("token_ids", bomb), len(SHORT))


def test_frame_without_a_declared_size_is_refused() -> None:
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(24))
    with pytest.raises(blobs.BlobError):
        blobs.decode_tokens(with_blob("token_ids", ENCODED[0][:8] + undeclared), len(SHORT))


def test_blob_of_another_field_is_refused() -> None:
    with pytest.raises(blobs.BlobError, match="token_ids with a wrong header"):
        blobs.decode_tokens(with_blob("token_ids", ENCODED[3]), len(SHORT))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("position", range(6))
def test_content_hash_depends_on_every_field_of_every_token(field: str, position: int) -> None:
    values = getattr(SHORT, field).copy()
    values[position] = 77
    other = Segment(replace(SHORT, **{field: values}))
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
