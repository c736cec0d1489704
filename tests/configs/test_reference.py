from __future__ import annotations

from pathlib import Path

from configs.reference import field_docs, render
from configs.run import RunSpec
from configs.section import Section, nested_section


def sections(section: type[Section]) -> list[type[Section]]:
    nested = (nested_section(info.annotation) for info in section.model_fields.values())
    return [section, *(inner for each in nested if each is not None for inner in sections(each))]


def test_the_reference_is_current() -> None:
    assert Path("docs/config.md").read_text(encoding="utf-8") == render(), (
        "run: python -m configs.reference > docs/config.md"
    )


def test_every_field_has_its_sentence() -> None:
    for section in sections(RunSpec):
        docs = field_docs(section)
        for name in section.model_fields:
            assert docs.get(name, "").endswith("."), f"{section.__name__}.{name}"


def test_the_mean_is_said_to_be_one() -> None:
    text = render()
    assert "a mean, whatever" in text
    assert "max_train_rollout_logprob_abs_diff" in text
