"""Blocks: what is stored and shown of them, and what their clients send."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from prefect.client.orchestration import get_client
from prefect.plugins import load_prefect_collections
from prefect.settings import get_current_settings
from prefect.testing.utilities import prefect_test_harness
from pydantic import SecretStr, ValidationError

import blocks
from blocks import BeakerAccount, ImageRegistry, ObjectStore, RayCluster, Tracking
from tests.http_thread import answer_in_thread

SECRET = "not-for-anyones-eyes"
ALL = [
    RayCluster(address="http://127.0.0.1:8265", auth_token=SecretStr(SECRET)),
    Tracking(entity="team", api_key=SecretStr(SECRET)),
    ObjectStore(
        bucket="b",
        access_key_id="id",
        secret_access_key=SecretStr(SECRET),
        session_token=SecretStr(SECRET),
    ),
    ImageRegistry(host="registry.example.org", username="u", password=SecretStr(SECRET)),
    BeakerAccount(token=SecretStr(SECRET), workspace="ai2/test"),
]
SLUGS = {
    "milepost-beaker-account",
    "milepost-image-registry",
    "milepost-object-store",
    "milepost-ray-cluster",
    "milepost-tracking",
}


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=90):
        yield


def test_slugs_are_what_stored_blocks_are_filed_under() -> None:
    found = {getattr(blocks, name)._block_type_slug for name in blocks.__all__}
    assert found == SLUGS


@pytest.mark.parametrize("name", blocks.__all__)
def test_every_field_has_a_title_and_a_description(name: str) -> None:
    fields = getattr(blocks, name).model_fields
    assert [n for n, f in fields.items() if not (f.title and f.description)] == []


@pytest.mark.parametrize("block", ALL, ids=lambda block: type(block).__name__)
def test_secrets_show_nowhere(block) -> None:
    shown = (repr(block), str(block), block.model_dump_json(), str(block.model_dump(mode="json")))
    assert not any(SECRET in text for text in shown)


def test_the_entry_point_leads_here() -> None:
    assert load_prefect_collections()["milepost"] is blocks


def test_importing_the_room_loads_no_client() -> None:
    code = (
        "import blocks, sys; "
        "print([n for n in ('ray', 'boto3', 'botocore', 'wandb', 'torch') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.prefect
@pytest.mark.timeout(150)
@pytest.mark.parametrize("block", ALL, ids=lambda block: type(block).__name__)
def test_a_block_saved_is_the_block_loaded(server: None, block) -> None:
    slug = type(block)._block_type_slug
    block.save("round-trip", overwrite=True)
    loaded = type(block).load("round-trip")
    assert type(loaded) is type(block)
    assert loaded.model_dump(include=block.model_fields) == block.model_dump(
        include=block.model_fields
    )
    with get_client(sync_client=True) as client:
        stored = client._client.get(f"/block_types/slug/{slug}/block_documents/name/round-trip")
    assert SECRET not in stored.text
    assert "****" in stored.text


@pytest.mark.prefect
@pytest.mark.timeout(150)
def test_the_register_command_finds_them_all(server: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "block", "register", "-m", "blocks"],
        env=get_current_settings().to_environment_variables(exclude_unset=True) | dict(_path()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with get_client(sync_client=True) as client:
        found = client._client.post("/block_types/filter", json={}).json()
    assert {each["slug"] for each in found} >= SLUGS


def _path() -> Iterator[tuple[str, str]]:
    for name in ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV"):
        if name in os.environ:
            yield name, os.environ[name]


# -- clients -------------------------------------------------------------------------------------


def test_an_object_goes_to_the_store_and_comes_back() -> None:
    from moto import mock_aws

    with mock_aws():
        store = ObjectStore(
            bucket="runs",
            prefix="made/",
            region="us-east-1",
            access_key_id="id",
            secret_access_key=SecretStr(SECRET),
        )
        client = store.client()
        client.create_bucket(Bucket=store.bucket)
        client.put_object(Bucket=store.bucket, Key=store.key("a.txt"), Body=b"text")
        found = client.get_object(Bucket="runs", Key="made/a.txt")["Body"].read()
    assert found == b"text"


def test_a_store_that_is_away_is_asked_a_bounded_number_of_times() -> None:
    config = ALL[2].client().meta.config
    assert (config.connect_timeout, config.read_timeout) == (10, 60)
    assert config.retries["total_max_attempts"] == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"access_key_id": "id"},
        {"secret_access_key": "s"},
        {"session_token": "t"},
        {"bucket": ""},
    ],
)
def test_half_a_pair_of_keys_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ObjectStore(**{"bucket": "b", **fields})


def test_tracking_without_a_key_is_offline_and_asks_nobody() -> None:
    named = Tracking(entity="team").environment()
    assert named == {
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "milepost",
        "WANDB_ENTITY": "team",
    }
    assert ALL[1].environment()["WANDB_MODE"] == "online"
    assert ALL[1].environment()["WANDB_API_KEY"] == SECRET
    assert Tracking(mode="disabled", api_key=SecretStr("k")).settled_mode == "disabled"


def test_a_registrys_login_is_a_docker_config_of_this_user_alone() -> None:
    folder = ALL[3].docker_config()
    path = folder / "config.json"
    assert path.stat().st_mode & 0o077 == 0
    (auth,) = json.loads(path.read_text())["auths"].values()
    assert base64.b64decode(auth["auth"]).decode() == f"u:{SECRET}"
    shutil.rmtree(folder)
    with pytest.raises(ValidationError, match="together"):
        ImageRegistry(host="h", username="u")


def test_ray_says_its_auth_mode_either_way() -> None:
    assert ALL[0].environment() == {
        "RAY_ADDRESS": "http://127.0.0.1:8265",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": SECRET,
    }
    plain = RayCluster(address="http://h:1/")
    assert plain.environment() == {"RAY_ADDRESS": "http://h:1", "RAY_AUTH_MODE": "disabled"}
    with pytest.raises(ValidationError, match="job server"):
        RayCluster(address="ray://h:10001")


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (RayCluster, "address"),
        (Tracking, "base_url"),
        (ObjectStore, "endpoint_url"),
        (BeakerAccount, "agent_address"),
        (ImageRegistry, "host"),
    ],
)
@pytest.mark.parametrize("place", ["http://u:{}@h", "u:{}@h", "http://u:{}#@h"])
def test_a_login_in_an_address_is_refused_and_not_shown(
    block: type, field: str, place: str
) -> None:
    needed = {"bucket": "b"} if block is ObjectStore else {}
    needed |= {"token": "t"} if block is BeakerAccount else {}
    with pytest.raises(ValidationError, match="login has fields of its own") as caught:
        block(**needed, **{field: place.format(SECRET)})
    assert SECRET not in str(caught.value)


class JobServer(BaseHTTPRequestHandler):
    """Answers the version question as Ray's job server does, and keeps what it was sent."""

    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        body = b'{"version": "4", "ray_version": "2", "ray_commit": "c", "session_name": "s"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.ray
def test_the_job_client_carries_the_token() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), JobServer)
    thread = answer_in_thread(http)
    try:
        address = f"http://127.0.0.1:{http.server_port}"
        RayCluster(address=address, auth_token=SecretStr(SECRET)).job_client()
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
    assert JobServer.seen
    assert set(JobServer.seen) == {f"Bearer {SECRET}"}


def test_the_endpoint_of_another_store_is_used() -> None:
    store = ObjectStore(bucket="b", endpoint_url="http://127.0.0.1:9", region="r")
    assert store.client().meta.endpoint_url == "http://127.0.0.1:9"
