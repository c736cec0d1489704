import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.errors import ConfigError, ManifestConflict
from runtime.recipes import laptop, warm_up
from runtime.recipes.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer, prompt_ids
from runtime.recipes.reverse_task import split_questions
from runtime.recipes.tiny_model import SHAPES, new_model, sample


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> laptop.Laptop:
    return laptop.make(tmp_path_factory.mktemp("recipe") / "laptop", seed=1, prompts=50)


def test_same_seed_gives_the_same_files(made: laptop.Laptop, tmp_path: Path) -> None:
    again = laptop.make(tmp_path / "again", seed=1, prompts=50)
    assert files(again.model.parent) == files(made.model.parent)


def test_another_seed_gives_other_weights_and_data(made: laptop.Laptop, tmp_path: Path) -> None:
    other = laptop.make(tmp_path / "other", seed=2, prompts=50, warm_up_until=None)
    mine, theirs = files(made.model.parent), files(other.model.parent)
    changed = {name for name in mine if mine[name] != theirs[name]}
    assert {"model/model.safetensors", "train.jsonl", "holdout.jsonl"} <= changed


def test_model_loads_in_transformers_and_answers_some_questions(made: laptop.Laptop) -> None:
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    assert 250_000 < sum(p.numel() for p in model.parameters()) < 350_000
    assert len(tokenizer) == VOCAB_SIZE
    assert made.record.sampled_exact_match is not None
    assert made.record.sampled_exact_match >= 0.2
    unseen = list(split_questions(1, 256).holdout)
    accuracy = warm_up.exact_match(model, tokenizer, unseen, temperature=1.0, seed=5)
    assert accuracy >= 0.1  # 0.2 was seen on other prompts; chance is 1/4096


def test_holdout_shares_no_string_with_training(made: laptop.Laptop) -> None:
    train = [json.loads(line) for line in made.train.read_text().splitlines()]
    holdout = [json.loads(line) for line in made.holdout.read_text().splitlines()]
    assert len(train) == 50
    assert len(holdout) == 256
    assert all(set(row) == {"prompt", "answer"} for row in train + holdout)
    assert all(row["prompt"] == row["answer"][::-1] for row in train + holdout)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in holdout}


def test_made_twice_is_made_once(made: laptop.Laptop) -> None:
    before = made.model.stat().st_mtime_ns
    again = laptop.make(made.model.parent, seed=1, prompts=50)
    assert again == made
    assert again.model.stat().st_mtime_ns == before


def test_another_order_in_the_same_folder_is_refused(made: laptop.Laptop) -> None:
    with pytest.raises(ManifestConflict, match="was made with"):
        laptop.make(made.model.parent, seed=2, prompts=50)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ManifestConflict, match=r"no recipe\.json"):
        laptop.make(tmp_path, seed=1)
    assert files(tmp_path) == {"mine.txt": b"keep"}


def test_a_failed_warm_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop, "WarmUp", lambda until: warm_up.WarmUp(until=until, max_steps=2))
    with pytest.raises(ConfigError, match="after 2 steps"):
        laptop.make(tmp_path / "laptop", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_template_costs_two_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert prompt_ids(tokenizer, "hdbe") == [259, *tokenizer("hdbe")["input_ids"], 260]
    assert len(prompt_ids(tokenizer, "hdbe")) == 6


def test_sampled_logprobs_are_the_models_own() -> None:
    model = new_model(SHAPES["300k"], seed=0)
    prompts = torch.tensor(
        [prompt_ids(byte_tokenizer(), text) for text in ("abcd", "hgfe", "aaaa")]
    )
    state = torch.get_rng_state()
    drawn = sample(model, prompts, max_new_tokens=5, temperature=0.7, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn == sample(model, prompts, max_new_tokens=5, temperature=0.7, seed=3)
    for prompt, tokens, logprobs in zip(
        prompts.tolist(), drawn.token_ids, drawn.logprobs, strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
        want = logits.log_softmax(-1)[range(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-5, rtol=1e-5)
        assert EOS_ID not in tokens[:-1]


def test_responses_of_fixed_length_never_end() -> None:
    model = new_model(SHAPES["300k"], seed=0)
    prompts = torch.tensor([prompt_ids(byte_tokenizer(), "abcd")] * 64)
    drawn = sample(model, prompts, max_new_tokens=16, temperature=1.0, seed=1, ignore_end=True)
    assert {len(row) for row in drawn.token_ids} == {16}
    assert not any(EOS_ID in row for row in drawn.token_ids)
