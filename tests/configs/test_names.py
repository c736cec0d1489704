from __future__ import annotations

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.names import ConflictingNamesError, is_owned, looks_like_token, read_variable


def test_aliases_are_read() -> None:
    assert read_variable("BASE_IMAGE", {"MILEPOST_BASE_IMAGE": "a"}) == "a"
    assert read_variable("BASE_IMAGE", {"MILES_BASE_IMAGE": "b"}) == "b"
    assert read_variable("BASE_IMAGE", {"OI_MILES_BASE_IMAGE": "c"}) == "c"
    assert read_variable("BASE_IMAGE", {"BASE_IMAGE": "d"}) is None


def test_spellings_that_agree_are_no_conflict() -> None:
    assert read_variable("X", {"MILEPOST_X": "1", "MILES_X": "1"}) == "1"


def test_spellings_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ConflictingNamesError, match="MILEPOST_X and OI_MILES_X"):
        read_variable("X", {"MILEPOST_X": "1", "OI_MILES_X": "2"})


@pytest.mark.parametrize(
    "name", ["RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "RANK", "MASTER_ADDR", "BEAKER_REPLICA_RANK"]
)
def test_the_launcher_owns(name: str) -> None:
    assert is_owned(name)


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "HF_TOKEN", "RAYS"])
def test_the_user_owns(name: str) -> None:
    assert not is_owned(name)


@pytest.mark.parametrize(
    "name",
    [
        "my-hf-secret",
        "hf-token",
        "wandb_api_key",
        "team.alpha-2.read-only-dataset-key",
        "a-very-long-name-of-a-secret-that-somebody-made-in-2024-for-production",
    ],
)
def test_names_of_secrets_are_no_tokens(name: str) -> None:
    assert not looks_like_token(name)


@given(st.randoms(use_true_random=False))
def test_random_tokens_look_like_tokens(rng: random.Random) -> None:
    token = "a1B2" + "".join(rng.sample(string.ascii_letters + string.digits, k=36))
    assert looks_like_token(token)
    assert looks_like_token("hf_" + token)
    assert looks_like_token("sk-" + token[:20])
    assert looks_like_token(rng.randbytes(20).hex())


def test_a_uuid_is_a_token() -> None:
    assert looks_like_token("123e4567-e89b-12d3-a456-426614174000")
