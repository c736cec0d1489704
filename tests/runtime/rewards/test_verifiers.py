"""What each built-in verifier says of a response."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError, UnavailableFeature
from runtime.rewards.choices import multiple_choice
from runtime.rewards.exact import exact_match
from runtime.rewards.instructions import instructions
from runtime.rewards.mathematics import math_answer
from runtime.rewards.shaping import overlong_penalty
from runtime.rewards.verifiers import VerifierSpec, check_name, load_verifier, verifier_specs


@pytest.mark.parametrize(
    ("response", "answer", "options", "reward"),
    [
        (" abc\n", "abc", {}, 1),
        (" abc", "abc", {"strip": False}, 0),
        ("ABC", "abc", {}, 0),
        ("ABC", "abc", {"ignore_case": True}, 1),
        ("it is abc.", "abc", {}, 0),
        ("it is abc.", "abc", {"whole": False}, 1),
        ("", "", {}, 1),
    ],
)
def test_exact_match(response, answer, options, reward):
    assert exact_match(response, answer, {}, **options) == reward


def test_exact_match_without_an_answer_is_a_failure_and_no_zero():
    with pytest.raises(ValueError, match="needs an answer"):
        exact_match("x", None, {})
    with pytest.raises(ValueError, match="occurs in every response"):
        exact_match("x", " ", {}, whole=False)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so the answer is $\\frac{1}{2}$", "0.5", 1),
        ("\\boxed{0.5}, not 3", "\\frac{1}{2}", 1),
        ("\\boxed{3}. Wait.\n\nThe answer is \\boxed{4}", "4", 1),
        ("\\boxed{3}, \\boxed{4}", "$\\{3, 4\\}$", 1),
        ("The answer is 42.", "42", 1),
        ("The answer is 41.", "42", 0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$", 1),
        ("$(1, 2)$", "(1,2)", 1),
        ("I do not know", "7", 0),
        ("", "7", 0),
    ],
)
def test_math_compares_values_and_not_texts(response, answer, reward):
    assert math_answer(response, answer, {}) == reward


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_math_without_a_readable_reference_is_a_failure_and_no_zero(answer):
    with pytest.raises(ValueError, match="cannot read the reference"):
        math_answer("7", answer, {})


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(b).", "B"),
        ("**C**", "C"),
        ("The answer is C.", "C"),
        ("Answer: (D)", "D"),
        ("answer is A, wait. The answer is B", "B"),
        ("\\boxed{C} although the answer is A", "C"),
        ("\\boxed{\\text{c}}", "C"),
        ("Both (A) and then (D)", "D"),
        ("A. because it is so", "A"),
        ("A good question; the answer is Beijing", None),
        ("I think so", None),
        ("", None),
    ],
)
def test_multiple_choice_reads_the_letter_a_response_settles_on(response, letter):
    chosen = [x for x in "ABCD" if multiple_choice(response, x, {"choices": 4})]
    assert chosen == ([] if letter is None else [letter])


@given(
    st.lists(st.sampled_from(["\\boxed{", "\\text{", "}", "answer", " is", ":", *"AbE() \n\t*._x"]))
)
def test_multiple_choice_reads_what_the_plainest_patterns_say(parts):
    """Those are not linear: this is about what is read, the next test about how long it takes."""
    plain = [
        r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Da-d])\)?\s*\}",
        r"(?i:answer)\s*(?i:is|:)\s*:?\s*[*_]*\(?([A-D])\)?(?![A-Za-z])",
        r"\A\s*[*_(]*([A-Da-d])[*_).]*\s*\Z",
        r"\(([A-D])\)",
        r"(?m)^\s*([A-D])[.)](?:\s|$)",
    ]
    response = "".join(parts)
    found = next(filter(None, (re.findall(p, response) for p in plain)), [None])[-1]
    chosen = [x for x in "ABCD" if multiple_choice(response, x, {"choices": 4})]
    assert chosen == ([] if found is None else [found.upper()])


INSTANT = """
import resource
from itertools import product
from runtime.rewards.verifiers import _INSTANT, VerifierSpec, load_verifier

resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
options = {"exact_match": [{}, {"whole": False, "ignore_case": True}], "multiple_choice": [{}]}
assert set(options) == _INSTANT
starts = ["", r"\\boxed{", r"\\boxed{\\text{", "answer", "answer:", "(A", "A.", "\\n"]
runs = [" ", "\\n", " \\n", "*", "(", ").", ":", " :", r"\\boxed{", "answer ", "A.", "A"]
for name in sorted(_INSTANT):
    for arguments, start, run in product(options[name], starts, runs):
        response = start + run * (100_000 // len(run)) + "!"
        answer = "A" if name == "multiple_choice" else run * (30_000 // len(run)) + "?"
        spec = VerifierSpec(name=name, arguments=arguments)
        verdicts = load_verifier(spec).judge([response], answer, {"choices": 4})
        assert all(verdict in (0, 1) for verdict in verdicts)
print("all judged")
"""


def test_instant_verifiers_are_linear_in_what_they_read():
    """In processor time: a quadratic one needs more than the limit for any one of the responses."""
    done = subprocess.run([sys.executable, "-c", INSTANT], capture_output=True, text=True)
    assert done.stdout == "all judged\n", (done.returncode, done.stderr)


def test_multiple_choice_takes_the_text_of_a_choice_as_answer():
    choices = {"choices": ["red", "green", "blue"]}
    assert multiple_choice("(B)", "green", choices) == 1
    assert multiple_choice("(D)", "green", choices) == 0
    with pytest.raises(ValueError, match="none of the choices A-C"):
        multiple_choice("(B)", "yellow", choices)
    with pytest.raises(ValueError, match="none of the choices A-C"):
        multiple_choice("(B)", "D", choices)


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("min_words", 2, "two words", "one"),
        ("max_words", 2, "two words", "now three words"),
        ("min_sentences", 2, "One. Two!", "One."),
        ("max_sentences", 1, "One.", "One. Two."),
        ("num_paragraphs", 2, "a\n\nb", "a\nb"),
        ("num_bullets", 2, "- a\n* b", "- a"),
        ("contains", "Cat", "a cat", "a dog"),
        ("excludes", "Cat", "a dog", "a cat"),
        ("starts_with", "Dear", "Dear you", "My dear"),
        ("ends_with", "Bye.", "so, Bye.", "Bye. And"),
        ("lowercase", True, "all low", "Not"),
        ("uppercase", True, "ALL", "Not"),
        ("commas", False, "none", "one, at least"),
        ("json", True, '{"a": 1}', "{a: 1}"),
    ],
)
def test_instruction_constraints(kind, value, good, bad):
    constraint = {"constraints": [{"kind": kind, "value": value}]}
    assert instructions(good, None, constraint) == 1
    assert instructions(bad, None, constraint) == 0
    both = {"constraints": [{"kind": kind, "value": value}, {"kind": "min_words", "value": 99}]}
    assert instructions(good, None, both) == 0
    assert instructions(good, None, both, partial=True) == 0.5


@pytest.mark.parametrize("metadata", [{}, {"constraints": []}, {"constraints": [{"kind": "?"}]}])
def test_instructions_that_cannot_be_checked_are_a_failure_and_no_zero(metadata):
    with pytest.raises(ValueError, match="constraint"):
        instructions("x", None, metadata)


# --- Names -----------------------------------------------------------------------------------


def test_names_that_cannot_be_loaded_are_refused_without_importing():
    check_name("exact_match")
    check_name("no.such.module:function")
    with pytest.raises(ConfigError, match="did you mean 'exact_match'"):
        check_name("exact_macth")
    with pytest.raises(ConfigError, match="unknown verifier"):
        check_name("import:module")
    with pytest.raises(UnavailableFeature, match="not available yet: verifier 'code'"):
        check_name("code")


def test_arguments_belong_to_the_default_verifier():
    specs = verifier_specs(["math"], default="exact_match", arguments={"whole": False})
    assert {s.name: dict(s.arguments) for s in specs} == {
        "exact_match": {"whole": False},
        "math": {},
    }
    with pytest.raises(ConfigError, match="batched"):
        verifier_specs([], default="math", arguments={}, batched=True)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("json:nothing", {}, "no function 'nothing'"),
        ("json:__name__", {}, "no function"),
        ("exact_match", {"stripped": True}, "cannot be called"),
        ("json:dumps", {}, "cannot be called"),
    ],
)
def test_a_verifier_that_cannot_be_called_is_refused_when_loaded(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_verifier(VerifierSpec(name=name, arguments=arguments))


# --- Shaping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)]
)
def test_overlong_penalty_is_linear_in_the_buffer(num_tokens, expected):
    got = overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20)
    assert got == pytest.approx(expected)
    half = overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20, penalty=0.5)
    assert half == pytest.approx(expected / 2)


@given(st.integers(0, 3000), st.integers(1, 2000), st.data())
def test_overlong_penalty_never_rewards_length(num_tokens, max_tokens, data):
    buffer = data.draw(st.integers(0, max_tokens))
    here = overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer)
    longer = overlong_penalty(num_tokens + 1, max_tokens=max_tokens, buffer_tokens=buffer)
    assert -1 <= longer <= here <= 0
    if num_tokens <= max_tokens - buffer or not buffer:
        assert here == 0
    elif num_tokens >= max_tokens:
        assert here == -1


@pytest.mark.parametrize("buffer", [-1, 101])
def test_overlong_buffer_lies_within_the_response(buffer):
    with pytest.raises(ValueError, match="overlong buffer"):
        overlong_penalty(1, max_tokens=100, buffer_tokens=buffer)
