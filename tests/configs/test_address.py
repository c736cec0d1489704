"""Addresses: what is none, and a login in one, which no message may show again."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.address import why_no_address, without_login
from tests.configs.conftest import Load, Refuse

SECRET = "open-sesame"
OPD = 'algorithm = "opd"'


@pytest.mark.parametrize(
    "text",
    ["http://x", "https://x:1/", "http://[::1]:80", "http://10.0.0.7:8265/a/b", "http://x/a@b"],
)
def test_an_address(text: str) -> None:
    assert why_no_address(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not an address"),
        ("x:80", "not an address"),
        ("ftp://x", "not an address"),
        ("http://", "no host"),
        ("http://:80", "no host"),
        ("http://x:0", "port 0"),
        ("http://x:70000", "cannot be read"),
        ("http://x:port", "cannot be read"),
        ("http://[::1", "cannot be read"),
        ("http://x y", "blanks"),
        ("http://x\ty", "blanks"),
        ("http://u:p@x", "a user or a password"),
        ("http://u@x", "a user or a password"),
        ("http://@x", "a user or a password"),
        ("http://:p@x", "a user or a password"),
        ("http://u:p#p@x", "cannot be read"),
    ],
)
def test_no_address(text: str, why: str) -> None:
    found = why_no_address(text)
    assert found is not None
    assert why in found


@pytest.mark.parametrize("text", ["http://x?k=1", "http://x#a"])
def test_paths_are_put_behind_a_base(text: str) -> None:
    assert why_no_address(text) is None
    assert "a query or a fragment" in str(why_no_address(text, is_base=True))


ODD = st.text(alphabet="ab1:@/#?[]% \n\\", max_size=20) | st.text(max_size=20)


@given(ODD)
def test_every_odd_text_is_refused_in_words_or_has_a_host_and_no_login(rest: str) -> None:
    text = "http://" + rest
    if why_no_address(text, is_base=True) is None:
        parts = urlsplit(text)
        assert parts.hostname
        assert (parts.username, parts.password) == (None, None)


@given(ODD, ODD, ODD)
def test_whatever_stands_before_an_at_sign_is_hidden(before: str, name: str, rest: str) -> None:
    assert SECRET not in without_login(f"{before}://{name}{SECRET}@{rest}")


FIELDS = [
    ((OPD, "teacher.url = {}"), "teacher.url", "teacher.token_env"),
    ((OPD, "teacher.url = ['http://a', {}]"), "teacher.url", "teacher.token_env"),
    (("reward.url = {}",), "reward.url", "the address alone"),
    (("reward.code.url = {}",), "reward.code.url", "the address alone"),
    (("reward.judge.url = {}",), "reward.judge.url", "the address alone"),
    (("reward.arguments.there = {}",), "reward.arguments.there", "the address alone"),
    (("launch.cluster = {}", 'launch.backend = "ray"'), "launch.cluster", "the address alone"),
    (("launch.env = {{ HTTP_PROXY = {} }}",), "launch.env.HTTP_PROXY", "launch.secrets"),
    (("model = {{ path = {} }}",), "model.path", "the address alone"),
    (("data = {{ train = {} }}",), "data.train", "the address alone"),
    (("evaluation.sets.a.prompts = {}",), "evaluation.sets.a.prompts", "the address alone"),
    (("checkpoint.upload = {}",), "checkpoint.upload", "AWS_"),
    (("output.compiler_cache = {}",), "output.compiler_cache", "AWS_"),
]


@pytest.mark.parametrize(("settings", "field", "allowed"), FIELDS, ids=lambda v: str(v)[:40])
def test_a_login_in_an_address_is_refused_and_not_shown(
    refuse: Refuse, settings: tuple[str, ...], field: str, allowed: str
) -> None:
    scheme = "s3" if "AWS" in allowed else "http"
    address = f"'{scheme}://me:{SECRET}@host'"
    problems = refuse(*(each.format(address) for each in settings))
    found = [p for p in problems if p.field == field and "a user or a password" in p.message]
    assert len(found) == 1, [str(p) for p in problems]
    assert allowed in str(found[0].allowed)
    shown = "\n".join([*map(str, problems), *(json.dumps(p.as_json()) for p in problems)])
    assert SECRET not in shown
    assert "me:" not in shown


@pytest.mark.parametrize(
    "value",
    [
        f"'me:{SECRET}@host:80'",  # no http://
        f"'http://me:{SECRET}/x@host'",  # a password that ends the host too early
        f"['http://me:{SECRET}#x@host']",
        f"http://me:{SECRET}@host",  # no quotes
        f"'http://me:{SECRET}@[::1'",
        f"'http://me:{SECRET} x@host'",
    ],
)
def test_no_login_is_shown_of_what_is_malformed(refuse: Refuse, value: str) -> None:
    problems = refuse(OPD, "teacher.path = 't'", f"teacher.url = {value}")
    assert problems
    assert SECRET not in "\n".join(map(str, problems))


def test_the_bad_one_of_several_addresses_is_counted(refuse: Refuse) -> None:
    (found,) = refuse(OPD, "teacher.url = ['http://a', 'b:1', 'http://c']")
    assert found.message == "the 2. of 3: not an address"


def test_an_at_sign_elsewhere_is_no_login(load: Load) -> None:
    load("data.prompt_field = 'a@b'", "launch.env = { A = 'me@host', B = 'http://h/a@b' }")
