from __future__ import annotations

import unicodedata

import pytest
from replay.inspector.server.templating import environment
from replay.inspector.text.written_out import mark, visible, visible_text


def test_every_character_that_acts_or_hides_is_marked() -> None:
    acting = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
    assert [hex(ord(c)) for c in acting if c not in "\n\t" and visible_text(c) == c] == []
    assert visible_text("\n\t") == "\n\t"


@pytest.mark.parametrize(
    ("character", "told", "title"),
    [
        ("\x00", "⟨NUL⟩", "U+0000 control character"),
        ("\r", "⟨CR⟩", "U+000D control character"),
        ("\x7f", "⟨DEL⟩", "U+007F control character"),
        ("\x9b", "⟨U+009B⟩", "U+009B control character"),
        ("\u200b", "⟨U+200B⟩", "U+200B zero-width character"),
        ("\u202e", "⟨U+202E⟩", "U+202E bidirectional control"),
        ("\u2069", "⟨U+2069⟩", "U+2069 bidirectional control"),
        ("\ufeff", "⟨U+FEFF⟩", "U+FEFF byte order mark"),
        ("\ue000", "⟨U+E000⟩", "U+E000 private use"),
        ("\ud83d", "⟨U+D83D⟩", "U+D83D half of a surrogate pair"),
        ("\U000e0041", "⟨U+E0041⟩", "U+E0041 tag or variation selector"),
    ],
)
def test_mark_of_a_character_is_seen_and_says_what_it_is(character: str, told: str, title: str) -> None:
    assert mark(character) == told
    assert visible(character) == f'<span class="unseen" title="{title}">{told}</span>'


def test_visible_text_stays_what_it_was_between_the_marks() -> None:
    text = "é 漢 😀 <b>&\"'\n\t"
    assert visible_text(text) == text
    assert visible("<script>") == "&lt;script&gt;"
    assert visible("a\x00\x00\x01b").count("<span") == 1


def test_filter_of_the_templates_escapes_once() -> None:
    shown = environment().from_string("{{ text | visible }} {{ text }}").render(text="<i>\x00")
    assert shown == '&lt;i&gt;<span class="unseen" title="U+0000 control character">⟨NUL⟩</span> &lt;i&gt;⟨NUL⟩'
