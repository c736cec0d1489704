"""What reaches the server's command line, and what never does."""

from __future__ import annotations

import pytest

from configs.engine_args import owned_because
from runtime.engines.sglang.settings import SglangSettings, command_line


def settings(**fields: object) -> SglangSettings:
    return SglangSettings.model_validate({"model_path": "/m", "python": "/p", **fields})


def test_arguments_pass_through_in_either_spelling_and_ours_come_last():
    args = {
        "attention_backend": "triton",
        "sampling-backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "enable_metrics": False,
        "mem_fraction_static": 0.5,
    }
    line = command_line(settings(args=args, tensor=2, seed=7))

    assert line[: line.index("--model-path")] == [
        "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--disable-prefill-cuda-graph", "--mem-fraction-static", "0.5",
    ]  # fmt: skip
    assert line[line.index("--tp-size") + 1] == "2"
    assert line[line.index("--random-seed") + 1] == "7"


def test_a_cpu_gets_what_it_needs_unless_the_file_says_otherwise():
    line = command_line(settings(device="cpu", args={"sampling_backend": "flashinfer"}))
    assert line[line.index("--attention-backend") + 1] == "torch_native"
    assert line[line.index("--sampling-backend") + 1] == "flashinfer"
    assert "--disable-overlap-schedule" in line
    assert "--attention-backend" not in command_line(settings())


@pytest.mark.parametrize(
    "name", ["host", "tp", "tensor_parallel_size", "--port", "api_k", "Nnodes"]
)
def test_what_is_ours_is_refused_in_every_spelling(name: str):
    assert owned_because("sglang", name)
    with pytest.raises(ValueError, match="is set by Milepost itself"):
        command_line(settings(args={name: 1}))


def test_no_key_stands_on_the_command_line():
    line = command_line(settings(api_key="s3cret-s3cret"))
    assert not any("s3cret" in word for word in line)
