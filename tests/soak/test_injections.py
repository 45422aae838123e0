"""Every added token of every kind of tokenizer, in every content of every template."""

from __future__ import annotations

import pytest

from tests.fakes.injections import InjectionCase, ways_in
from tests.fakes.real_templates import real_template, real_templates
from tests.fakes.template_subjects import subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds
from tests.real_template_table import REPRESENTATIVE

ALL = [(template.name, kind) for template in real_templates() for kind in ("byte_bpe", "nfkc")]
REST = [(name, kind) for name in REPRESENTATIVE for kind in tokenizer_kinds() if kind not in ("byte_bpe", "nfkc")]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), [*ALL, *REST])
def test_no_added_token_comes_of_any_content_of_any_template(name: str, kind: str) -> None:
    assert ways_in(InjectionCase(subject(real_template(name), kind)), every=2) == {}
