import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from runtime.telemetry import log
from runtime.telemetry.events import Event
from runtime.telemetry.masking import Masker, is_secret_name


@pytest.fixture
def restored() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    structlog.contextvars.clear_contextvars()
    log.configure(
        None, run="", attempt=0, role="", echo=True, level="warning", capture_stdlib=False
    )
    log._Process.fields = {}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("restored")
def test_every_line_says_who_wrote_it_and_the_event_by_name(tmp_path: Path) -> None:
    path = log.log_path(tmp_path, 4, "trainer", 1)
    assert path == tmp_path / "attempts" / "4" / "trainer-1.log"
    log.configure(path, run="r", attempt=4, role="trainer", rank=1)
    log.bind(epoch=7)
    structlog.contextvars.bind_contextvars(update=12)
    log.get_logger().info(Event.UPDATE_FINISHED, elapsed_s=0.25)
    (line,) = lines(path)
    assert line["event"] == "update.finished"
    assert [line[k] for k in ("run", "attempt", "role", "rank", "epoch", "update")] == [
        "r", 4, "trainer", 1, 7, 12,
    ]  # fmt: skip
    assert line["level"] == "info"
    assert line["elapsed_s"] == 0.25


@pytest.mark.usefixtures("restored")
def test_bound_values_reach_other_threads(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "s.log"
    log.configure(path, run="r", attempt=1, role="session", epoch=2)
    thread = threading.Thread(target=lambda: log.get_logger().info(Event.SESSION_READY))
    thread.start()
    thread.join(10)
    assert lines(path)[0]["epoch"] == 2


@pytest.mark.usefixtures("restored")
def test_a_logger_made_before_configure_writes_to_the_file(tmp_path: Path) -> None:
    logger = structlog.get_logger("rollout.producer")
    path = tmp_path / "s.log"
    log.configure(path, run="r", attempt=1, role="session")
    logger.warning("group.requeued", reason="timeout")
    assert lines(path)[0]["reason"] == "timeout"


@pytest.mark.usefixtures("restored")
def test_tracebacks_and_other_libraries_are_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    log.configure(path, run="r", attempt=1, role="session")
    try:
        raise ValueError("broken")
    except ValueError:
        log.get_logger().exception(Event.STAGE_FAILED)
    logging.getLogger("some.library").warning("about %s", "this")
    logging.getLogger("some.library").info("not this")
    first, second = lines(path)
    assert "ValueError: broken" in str(first["exception"])
    assert second["event"] == "library.warned"
    assert second["message"] == "about this"


@pytest.mark.usefixtures("restored")
def test_secrets_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("S3_SECRET", 'quo"\\secret-of-s3')
    path = tmp_path / "s.log"
    log.configure(path, run="r", attempt=1, role="session")
    try:
        raise RuntimeError(f"refused {key}")
    except RuntimeError:
        log.get_logger().exception(
            Event.STAGE_FAILED,
            hf_token="whatever it is",
            nested={"headers": {"Authorization": "Bearer abcdefghijklmnop"}},
            url="https://me:hunter22@example.org/x",
            other="hf_" + "a" * 30,
            quoted='quo"\\secret-of-s3',
            num_tokens=17,
            revision="0" * 40,
        )
    text = path.read_text()
    for secret in (key, "whatever it is", "abcdefghijklmnop", "hunter22", "a" * 30, "secret-of-s3"):
        assert secret not in text, secret
    (line,) = lines(path)
    assert line["num_tokens"] == 17
    assert line["revision"] == "0" * 40
    assert line["url"] == "https://me:***@example.org/x"


@given(st.text(), st.text(min_size=8))
def test_a_known_secret_is_masked_wherever_it_stands(around: str, secret: str) -> None:
    masker = Masker({"MY_API_KEY": secret, "PATH": "/usr/bin:/bin"})
    line = json.dumps({"message": around + secret + around})
    message = json.loads(masker.mask_line(line))["message"]
    assert len(message.split("***")) > 1
    plain = masker.mask(around + secret + around)
    for part in message.split("***") + plain.split("***"):
        assert secret not in part


@given(st.dictionaries(st.sampled_from(["loss", "update", "policy", "path"]), st.integers()))
def test_masking_leaves_plain_lines_alone(fields: dict[str, int]) -> None:
    line = json.dumps(fields)
    assert Masker({}).mask_line(line) == line


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("api_key", True),
        ("authorization", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("num_tokens", False),
        ("token_ids", False),
        ("tokens_per_s", False),
        ("monkey", False),
    ],
)
def test_names_of_secrets(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret


@pytest.mark.usefixtures("restored")
def test_a_full_disk_costs_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.symlink_to("/dev/full")
    target = log.configure(path, run="r", attempt=1, role="session")
    log.get_logger().info(Event.SESSION_STARTED)
    assert target.dropped == 1
