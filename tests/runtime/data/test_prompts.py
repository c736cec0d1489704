"""From a prompt file to the frozen copy: nothing dropped, nothing changed unseen."""

import hashlib
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.frozen import ROWS_PER_GROUP
from runtime.data.prompts import (
    FieldNames,
    check_unchanged,
    freeze,
    open_frozen,
    require_fingerprint,
)
from runtime.data.rows import count_rows
from runtime.data.samples import PromptId
from runtime.errors import ConfigError, ContractViolation, PartialWrite
from tests.runtime.data.sample_strategies import examples


class ByteTokenizer:
    """One token a byte; keeps what matters here: length, identity and template of a tokenizer."""

    def __init__(self, *, template: str | None = "<u>", extra: int = 0) -> None:
        self.chat_template = template
        self._extra = extra

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"

    def encode(self, text, *, add_special_tokens):
        return ([1] if add_special_tokens else []) + [b + 2 for b in text.encode()]

    def get_vocab(self):
        return {chr(i): i for i in range(258 + self._extra)}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def frozen(tmp_path, rows, name="data", **options):
    source = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    settings_ = {
        "tokenizer": ByteTokenizer(),
        "fields": FieldNames(),
        "max_prompt_tokens": 100,
        "default_verifier": "math",
    }
    return freeze(source, tmp_path / name / "data.parquet", **(settings_ | options))


def test_a_frozen_prompt_is_what_its_author_wrote(tmp_path):
    rows = [
        {"prompt": "1 + 1?", "answer": 2, "metadata": {"level": [1, None]}, "other": "ignored"},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]},
    ]
    facts = frozen(tmp_path, rows)
    with open_frozen(tmp_path / "data" / "data.parquet") as store:
        assert (len(store), store.fingerprint) == (2, facts.fingerprint)
        first, second = store.prompts(pass_=3)
    assert first.id == PromptId(3, 0)
    assert bytes(t - 2 for t in first.token_ids) == b"<user>1 + 1?<assistant>"
    assert (first.text, first.answer, first.verifier) == ("1 + 1?", "2", "math")
    assert first.metadata == {"level": [1, None]}
    assert bytes(t - 2 for t in second.token_ids) == b"<system>Be brief.<user>?<assistant>"
    assert second.text == "system: Be brief.\nuser: ?"
    assert second.answer is None


def test_raw_prompts_get_the_tokenizer_s_own_special_tokens(tmp_path):
    frozen(tmp_path, [{"prompt": "ab"}], apply_chat_template=False, default_verifier=None)
    with open_frozen(tmp_path / "data" / "data.parquet") as store:
        assert store.prompt(PromptId(0, 0)).token_ids == (1, ord("a") + 2, ord("b") + 2)
        assert store.prompt(PromptId(0, 0)).verifier == ""


def test_fields_have_the_names_the_run_file_gives_them(tmp_path):
    rows = [{"q": "a", "gold": "b", "judge": "exact_match", "info": {"x": 1}}, {"q": "c"}]
    fields = FieldNames(prompt="q", answer="gold", verifier="judge", metadata="info")
    facts = frozen(tmp_path, rows, fields=fields)
    assert facts.verifiers == ("exact_match", "math")
    with open_frozen(tmp_path / "data" / "data.parquet") as store:
        prompt = store.prompt(PromptId(0, 0))
    assert (prompt.answer, prompt.verifier, prompt.metadata) == ("b", "exact_match", {"x": 1})


JSON_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
PROMPT_ROWS = st.fixed_dictionaries(
    {"prompt": JSON_TEXT.filter(str.strip)},
    optional={
        "answer": st.none() | JSON_TEXT | st.integers(-9, 9),
        "metadata": st.dictionaries(JSON_TEXT, st.integers() | st.none() | JSON_TEXT, max_size=3),
    },
)


@examples(30)
@given(rows=st.lists(PROMPT_ROWS, min_size=1, max_size=20), repeats=st.integers(1, 30))
def test_every_row_comes_back_at_its_index(tmp_path_factory, rows, repeats):
    tmp_path = tmp_path_factory.mktemp("rows")
    rows = rows * repeats
    facts = frozen(tmp_path, rows)
    assert facts.num_prompts == len(rows)
    with open_frozen(tmp_path / "data" / "data.parquet") as store:
        for index in {0, len(rows) - 1, len(rows) // 2, min(ROWS_PER_GROUP, len(rows) - 1)}:
            prompt = store.prompt(PromptId(0, index))
            row = rows[index]
            answer = row.get("answer")
            assert prompt.text == row["prompt"]
            assert prompt.answer == (None if answer is None else str(answer))
            assert prompt.metadata == row.get("metadata", {})
        with pytest.raises(IndexError):
            store.prompt(PromptId(0, len(rows)))


def test_jsonl_and_parquet_with_the_same_rows_have_one_fingerprint(tmp_path):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": None}]
    one = frozen(tmp_path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "same.parquet")
    other = freeze(
        tmp_path / "same.parquet",
        tmp_path / "other" / "data.parquet",
        tokenizer=ByteTokenizer(),
        fields=FieldNames(),
        max_prompt_tokens=100,
        default_verifier="math",
    )
    assert other == one


# --- What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a row is an object"),
        ('{"answer": "x"}', "no field 'prompt'"),
        ('{"prompt": "  "}', "is empty"),
        ('{"prompt": 3}', "a text or a list of messages"),
        ('{"prompt": []}', "a text or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', "a message in 'prompt'"),
        ('{"prompt": "x", "answer": [1]}', "a text or a number"),
        ('{"prompt": "x", "answer": true}', "a text or a number"),
        ('{"prompt": "x", "metadata": "y"}', "is an object"),
        ('{"prompt": "x", "metadata": {"y": NaN}}', "NaN"),
        ('{"prompt": "\\ud800"}', "not text"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, message):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "good"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"rows.jsonl:3: .*{re.escape(message)}") as caught:
        count_rows(source, FieldNames())
    assert caught.value.detail["num_rows"] == 1


def test_bytes_that_are_no_utf8_are_named_by_their_line(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"prompt": "good"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not JSON"):
        count_rows(source, FieldNames())


def test_all_overlong_prompts_are_listed_and_nothing_is_left_behind(tmp_path):
    rows = [{"prompt": "x" * (n if n % 2 else 200)} for n in range(1, 60)]
    with pytest.raises(ConfigError, match="29 prompts longer than max_prompt_tokens 100") as caught:
        frozen(tmp_path, rows)
    assert "data.jsonl:2: 217 tokens" in str(caught.value)
    assert "and 9 more" in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    source = tmp_path / "none.jsonl"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match="no prompts"):
        count_rows(source, FieldNames())


def test_files_that_are_missing_or_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl does not exist"):
        count_rows(tmp_path / "gone.jsonl", FieldNames())
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    with pytest.raises(ConfigError, match=r"rows\.csv"):
        count_rows(tmp_path / "rows.csv", FieldNames())
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"torn\.parquet is not a readable Parquet file"):
        count_rows(tmp_path / "torn.parquet", FieldNames())


def test_messages_without_a_template_are_refused(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "x"}]}]
    with pytest.raises(ConfigError, match=r"messages need data\.apply_chat_template"):
        frozen(tmp_path, rows, apply_chat_template=False)


# --- What must not change --------------------------------------------------------------------


def test_freezing_again_keeps_the_copy_and_a_changed_file_is_named(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    facts = frozen(tmp_path, rows)
    copy = tmp_path / "data" / "data.parquet"
    before = (copy.stat().st_ino, copy.stat().st_mtime_ns)
    assert frozen(tmp_path, rows) == facts
    assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == before
    with pytest.raises(ConfigError, match=f"rows: frozen {facts.rows_digest}, now [0-9a-f]{{64}}"):
        frozen(tmp_path, rows[::-1])
    with pytest.raises(ConfigError, match="tokenizer: frozen"):
        frozen(tmp_path, rows, tokenizer=ByteTokenizer(extra=1))
    with pytest.raises(ConfigError, match="chat template: frozen"):
        frozen(tmp_path, rows, tokenizer=ByteTokenizer(template="<v>"))


def test_a_source_that_is_gone_is_no_change(tmp_path):
    facts = frozen(tmp_path, [{"prompt": "a"}])
    (tmp_path / "data.jsonl").unlink()
    check_unchanged(facts, tmp_path / "data.jsonl", ByteTokenizer(), FieldNames())


def test_each_part_of_the_data_is_in_the_fingerprint(tmp_path):
    base = {"prompt": "a", "answer": "b", "metadata": {"k": 1}}
    variants = [
        frozen(tmp_path, [base], "v0"),
        frozen(tmp_path, [base | {"prompt": "c"}], "v1"),
        frozen(tmp_path, [base | {"answer": None}], "v2"),
        frozen(tmp_path, [base | {"metadata": {"k": 2}}], "v3"),
        frozen(tmp_path, [base, base], "v4"),
        frozen(tmp_path, [base], "v5", tokenizer=ByteTokenizer(extra=1)),
        frozen(tmp_path, [base], "v6", tokenizer=ByteTokenizer(template="<v>")),
        frozen(tmp_path, [base], "v7", apply_chat_template=False),
    ]
    assert len({facts.fingerprint for facts in variants}) == len(variants)


def test_a_commit_made_with_other_data_is_a_contract_violation():
    one, other = (hashlib.sha256(x).hexdigest() for x in (b"1", b"2"))
    require_fingerprint(one, one)
    with pytest.raises(ContractViolation, match=f"{one}.*{other}"):
        require_fingerprint(one, other)


def test_a_copy_without_its_facts_does_not_count_and_is_written_again(tmp_path):
    facts = frozen(tmp_path, [{"prompt": "a"}])
    (tmp_path / "data" / "data.json").unlink()  # killed between the two renames
    with pytest.raises(PartialWrite):
        open_frozen(tmp_path / "data" / "data.parquet")
    assert frozen(tmp_path, [{"prompt": "a"}]) == facts


@examples(60)
@given(data=st.data())
def test_damage_to_the_frozen_copy_never_goes_unseen(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("damage")
    frozen(tmp_path, [{"prompt": f"prompt number {i}"} for i in range(40)])
    copy = tmp_path / "data" / "data.parquet"
    blob = bytearray(copy.read_bytes())
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    copy.write_bytes(blob)
    with pytest.raises(PartialWrite, match="not what was written"):
        open_frozen(copy)
