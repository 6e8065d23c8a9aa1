"""The frame of a page: the content policy lists its scripts and styles, and texts are escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.views.page import CHARTS, Page, Section, render, tag
from kvrsim.views.timeline import SCRIPTS
from tests.building import examples
from tests.building.commands import page_data

TEXTS = st.text() | st.sampled_from(
    ["</script>", "</style>", "<!--", "]]>", "\u2028", "&lt;", "'\"`", "javascript:alert(1)"]
)


class Elements(HTMLParser):
    """Names of all elements of a page, and its content policy."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.names.append(tag)
        if "http-equiv" in about:
            self.policy = about["content"] or ""


def page_of(words: str) -> Page:
    body = tag("p", words, title=words)
    return Page(
        title=words,
        answer=words,
        facts={words: words},
        notes=[words],
        sections=[Section(title=words, body=body, lead=words, ident="one")],
        data={words: [words]},
    )


@examples(60)
@given(words=TEXTS)
def test_text_adds_no_element_and_data_come_back(words: str) -> None:
    page = render(page_of(words))
    plain = render(page_of("x" if words.strip() else words))
    assert Elements(page).names == Elements(plain).names
    assert page_data(page) == {words: [words]}


@pytest.mark.parametrize("scripts", [(), CHARTS, SCRIPTS, (*CHARTS, *SCRIPTS)])
def test_the_policy_names_every_script_and_style_and_allows_no_request(scripts: tuple[str, ...]) -> None:
    page = render(Page(title="t", scripts=scripts))
    rules = dict(rule.strip().split(" ", 1) for rule in Elements(page).policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules) <= {"default-src", "base-uri", "form-action", "img-src", "script-src", "style-src"}
    assert rules["img-src"] == "data:"
    for kind in ("script", "style"):
        content = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digests = {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in content}
        assert {f"'sha256-{digest}'" for digest in digests} == set(rules[f"{kind}-src"].split())


def test_no_address_but_that_of_the_namespace_is_in_a_page() -> None:
    page = render(Page(title="t", scripts=(*CHARTS, *SCRIPTS)))
    addresses = set(re.findall(r"(?:https?:)?//[\w./-]+\.[\w./-]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
