from dataclasses import replace

import pytest
import zstandard

from context.tokens.token_sequence import Segment, TokenSequence
from replay.storage.format import encoding
from tests.fakes.records import SHORT

FIELDS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
ENCODED = encoding.encode_tokens(SHORT)


def test_blob_begins_with_magic_kind_format_and_count_little_endian() -> None:
    sequence = TokenSequence.constant(range(258), 0)
    blob = encoding.encode_tokens(sequence)
    assert blob[:8] == b"AL\x05\x01\x02\x01\x00\x00"
    payload = zstandard.decompress(blob[8:])
    # Of each token 4 bytes of id, 4 of log-prob, 4 of version and 1 of author, field by field.
    assert len(payload) == 258 * 13
    assert payload[:8] == b"\x00\x00\x00\x00\x01\x00\x00\x00"


def test_every_bit_flip_is_detected_or_harmless() -> None:
    blob = bytearray(ENCODED)
    harmless = 0
    for bit in range(8 * len(blob)):
        blob[bit // 8] ^= 1 << bit % 8
        try:
            found = encoding.decode_tokens(bytes(blob), len(SHORT))
        except encoding.BlobError:
            pass
        else:
            assert found.equals(SHORT)
            harmless += 1
        blob[bit // 8] ^= 1 << bit % 8
    # zstd's frame header has bits nobody reads.
    assert harmless <= 2


def test_bomb_is_refused_before_it_inflates() -> None:
    bomb = ENCODED[:8] + zstandard.compress(bytes(2**28))
    # 6 tokens of 13 bytes.
    with pytest.raises(encoding.BlobError, match="declares 268435456 bytes where 78 belong"):
        encoding.decode_tokens(bomb, len(SHORT))


def test_text_comes_back_and_a_damaged_or_boundless_one_does_not() -> None:
    frame = encoding.compress_text("in der Küche 鍵")
    assert encoding.decompress_text(frame) == "in der Küche 鍵"
    huge = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + frame[6:]
    for damaged in (frame[:-1], frame + b"x", b"", b"plain", huge):
        with pytest.raises(encoding.BlobError, match="^text in a "):
            encoding.decompress_text(damaged)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("position", range(6))
def test_content_hash_depends_on_every_field_of_every_token(field: str, position: int) -> None:
    values = getattr(SHORT, field).copy()
    values[position] = 77
    other = Segment(replace(SHORT, **{field: values}))
    assert encoding.content_hash([other]) != encoding.content_hash([Segment(SHORT)])
