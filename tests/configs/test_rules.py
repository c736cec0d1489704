"""Each row of "What validate refuses" as a test: by which field, and what the message names."""

from __future__ import annotations

import pytest

from tests.configs.conftest import Refuse
from tests.configs.rule_models import GPUS, MOUNTED

ROWS: list[tuple[str, tuple[str, ...], str, str]] = [
    # id, settings, field, text of message or allowed
    (
        "rolling by a collective",
        ('core.publication_mode = "rolling"', 'core.publication_transport = "broadcast"'),
        "core.publication_mode",
        "one by one",
    ),
    (
        "ipc to another GPU",
        (*GPUS, 'core.publication_transport = "ipc"'),
        "core.publication_transport",
        "rollout.colocated = true",
    ),
    (
        "ipc to SGLang on CPU",
        ('core.publication_transport = "ipc"', 'rollout.engine = "sglang"'),
        "core.publication_transport",
        "on a GPU only",
    ),
    (
        "ipc over machines",
        ("launch.replicas = 2", 'core.publication_transport = "ipc"'),
        "core.publication_transport",
        "one machine",
    ),
    (
        "a collective on one GPU",
        (
            "launch.gpus_per_replica = 1",
            "rollout.colocated = true",
            'core.publication_transport = "broadcast"',
        ),
        "core.publication_transport",
        "two ranks of one collective",
    ),
    ("one sample", ("rollout.samples_per_prompt = 1",), "rollout.samples_per_prompt", "OPD"),
    (
        "top-p with TIS",
        ("rollout.top_p = 0.9",),
        "rollout.top_p",
        "core.renormalize_support",
    ),
    ("top-k with TIS", ("rollout.top_k = 5",), "rollout.top_k", "switch TIS off"),
    ("min-p with TIS", ("rollout.min_p = 0.1",), "rollout.min_p", "set top-p 1"),
    ("top-k 0", ("rollout.top_k = 0",), "rollout.top_k", "-1 (off)"),
    ("greedy", ("rollout.temperature = 0",), "rollout.temperature", "no distribution to train on"),
    (
        "behaviour with TIS",
        ('core.old_policy = "behaviour"', "core.tis = true"),
        "core.tis",
        "holds the correction already",
    ),
    (
        "reinforce with clip",
        ('core.loss = "reinforce"', "core.eps_clip = 0.2"),
        "core.eps_clip",
        "drop core.eps_clip",
    ),
    (
        "reinforce with dual clip",
        ('core.loss = "reinforce"', "core.dual_clip = 3.0"),
        "core.dual_clip",
        "drop core.dual_clip",
    ),
    (
        "stale reinforce without TIS",
        ('core.loss = "reinforce"', "core.tis = false"),
        "core.tis",
        "drop core.tis = false",
    ),
    (
        "gspo by token",
        ('core.loss = "gspo"', 'core.loss_aggregation = "token"'),
        "core.loss_aggregation",
        "core.loss",
    ),
    (
        "gspo by constant",
        ('core.loss = "gspo"', 'core.loss_aggregation = "constant"'),
        "core.loss_aggregation",
        "core.loss",
    ),
    (
        "KL twice",
        ('core.kl = "k3"', "core.kl_coef = 0.1", "core.kl_reward_coef = 0.1"),
        "core.kl_reward_coef",
        "core.kl_coef",
    ),
    ("KL without weight", ('core.kl = "k3"',), "core.kl", "weight"),
    ("weight without KL", ("core.kl_coef = 0.1",), "core.kl_coef", "estimator"),
    ("reference without KL", ("core.reference = 'm'",), "core.reference", "only when KL is used"),
    ("dual clip of 1", ("core.dual_clip = 1.0",), "core.dual_clip", "above 1"),
    ("clip of 0", ("core.eps_clip = 0.0",), "core.eps_clip", "(0, 1)"),
    ("clip of 1", ("core.eps_clip_high = 1.0",), "core.eps_clip_high", "(0, 1)"),
    ("TIS bounds", ("core.tis_clip_low = 2.0",), "core.tis_clip_low", "not below tis_clip"),
    ("OPD alone", ('algorithm = "opd"',), "algorithm", "needs a [teacher]"),
    ("teacher of GRPO", ("teacher.path = 't'",), "teacher", "GRPO has no teacher"),
    (
        "two teachers",
        ('algorithm = "opd"', "teacher.path = 't'", "teacher.url = 'http://x'"),
        "teacher.path",
        "both",
    ),
    ("no teacher", ('algorithm = "opd"', "teacher.coef = 2.0"), "teacher.path", "neither"),
    (
        "a served teacher at another temperature",
        ('algorithm = "opd"', "teacher.url = 'http://x'", "rollout.temperature = 0.7"),
        "rollout.temperature",
        "teacher.path",
    ),
    (
        "a token in place of its name",
        ('algorithm = "opd"', "teacher.url = 'http://x'", "teacher.token_env = 'sk-12-34'"),
        "teacher.token_env",
        "never stands in a file",
    ),
    (
        "a token that nobody brings",
        (
            'algorithm = "opd"',
            "teacher.url = 'http://x'",
            "teacher.token_env = 'TOKEN'",
            'launch.backend = "kuberay"',
        ),
        "teacher.token_env",
        "launch.secrets",
    ),
    (
        "a token for a held teacher",
        ('algorithm = "opd"', "teacher.path = 't'", "teacher.token_env = 'TOKEN'"),
        "teacher.token_env",
        "asked over no network",
    ),
    (
        "a deadline for a held teacher",
        ('algorithm = "opd"', "teacher.path = 't'", "teacher.deadline = '9s'"),
        "teacher.deadline",
        "teacher.url",
    ),
    (
        "a wait of p2p alone",
        ('core.publication_transport = "disk"', "core.p2p_transfer_timeout = '9s'"),
        "core.p2p_transfer_timeout",
        "drop",
    ),
    ("a momentum of AdamW", ("core.momentum = 0.9",), "core.momentum", "core.beta1"),
    (
        "a moment of SGD",
        ('core.optimizer = "sgd"', "core.beta2 = 0.99"),
        "core.beta2",
        "no moments of AdamW",
    ),
    (
        "muon on megatron",
        ('core.optimizer = "muon"', 'core.backend = "megatron"', "launch.gpus_per_replica = 2"),
        "core.optimizer",
        "torch",
    ),
    (
        "adapters on megatron",
        ("lora.rank = 8", 'core.backend = "megatron"', "launch.gpus_per_replica = 2"),
        "lora.rank",
        "torch",
    ),
    (
        "adapters to an engine that takes none",
        ("lora.rank = 8", 'lora.publish = "adapter"', 'rollout.engine = "sglang"'),
        "lora.publish",
        "embedded",
    ),
    (
        "an adapter by a collective",
        (
            "lora.rank = 8",
            'lora.publish = "adapter"',
            'core.publication_transport = "broadcast"',
        ),
        "core.publication_transport",
        "travels as files",
    ),
    (
        "an argument that a field decides",
        ('rollout.engine = "sglang"', "rollout.engine_args = { tensor-parallel-size = 2 }"),
        "rollout.engine_args.tensor-parallel-size",
        "rollout.tensor decides it",
    ),
    (
        "an abbreviated argument",
        ('rollout.engine = "sglang"', "rollout.engine_args = { base_gpu = 1 }"),
        "rollout.engine_args.base_gpu",
        "an engine sees its own only",
    ),
    (
        "a shared GPU without a split",
        (*GPUS, 'rollout.engine = "sglang"', "rollout.colocated = true"),
        "rollout.colocated",
        "mem_fraction_static",
    ),
    (
        "sleep beside nobody",
        ('rollout.engine = "sglang"', "rollout.sleep = true"),
        "rollout.sleep",
        "memory to give back",
    ),
    (
        "a key of one's own",
        ("rollout.engine_args = { api_key = 'k' }",),
        "rollout.engine_args.api_key",
        "a fresh key",
    ),
    (
        "too long",
        ("core.max_tokens_per_gpu = 2000",),
        "core.max_tokens_per_gpu",
        "core.max_tokens_per_gpu = 2048",
    ),
    ("no length", ("core.max_run_seconds = 0",), "core.max_run_seconds", "leave the key out"),
    ("negative", ("core.max_run_seconds = -1",), "core.max_run_seconds", "not negative"),
    ("not finite", ("core.max_run_seconds = inf",), "core.max_run_seconds", "finite"),
    ("no update", ("core.debug_exit_after = 0",), "core.debug_exit_after", "leave the key out"),
    ("replay, dense", ("core.routing_replay = true",), "core.routing_replay", "dense"),
    ("expert-aware, dense", ('core.packing = "expert_aware"',), "core.packing", "dense"),
    ("open cosine", ('core.lr_schedule = "cosine"',), "core.lr_schedule", "core.max_updates"),
    ("rising cosine", ("core.min_lr = 1.0",), "core.min_lr", "above lr"),
    (
        "uneven updates",
        ("core.updates_per_collection = 5",),
        "core.updates_per_collection",
        "divisor of 32",
    ),
    (
        "less than a group",
        ("async.async_max_concurrent_samples = 7",),
        "async.async_max_concurrent_samples",
        "8 or more",
    ),
    # GPU arithmetic: 8 GPUs, 1 engine -> 7 for the trainer.
    ("data", (*GPUS, "core.data = 4"), "core.data", "1 x 8 GPUs - 1 of engines"),
    (
        "megatron sizes",
        (*GPUS, 'core.backend = "megatron"', "core.tensor = 2"),
        "core.tensor",
        "= 7 for the trainer, not a multiple",
    ),
    ("no trainer", (*GPUS, "rollout.engines = 8"), "rollout.engines", "= 0 for the trainer"),
    (
        "colocated",
        (*GPUS, "rollout.engines = 9", "rollout.colocated = true"),
        "rollout.engines",
        "share 8 GPUs",
    ),
    ("torch sizes", ("core.tensor = 2",), "core.tensor", "data and context only"),
    (
        "context sizes",
        (*GPUS, "core.context = 2"),
        "core.context",
        "= 7 for the trainer, not a multiple",
    ),
    ("megatron on CPU", ('core.backend = "megatron"',), "core.backend", "needs GPUs"),
    ("embedded tensor", (*GPUS, "rollout.tensor = 3"), "rollout.tensor", "one device"),
    (
        "embedded p2p",
        ('core.publication_transport = "p2p"',),
        "core.publication_transport",
        "p2p",
    ),
    ("flash on CPU", ('core.attention_backend = "flash_3"',), "core.attention_backend", "GPU"),
    (
        "flash in float32",
        (*GPUS, 'core.attention_backend = "flash_3"', 'model.dtype = "float32"'),
        "core.attention_backend",
        "bfloat16, not float32",
    ),
    (
        "flash 4 off Blackwell",
        (*GPUS, 'core.attention_backend = "flash_4"', 'launch.cluster = "ai2/jupiter"'),
        "core.attention_backend",
        "Blackwell",
    ),
    (
        "flash 3 off Hopper",
        (*GPUS, 'core.attention_backend = "flash_3"', 'launch.cluster = "ai2/saturn"'),
        "core.attention_backend",
        "flash_3 runs on Hopper only",
    ),
    # Inputs.
    ("two models", ("model.path = 'm'",), "model.path", "both"),
    ("no model", ("model = {}",), "model.path", "neither"),
    ("two data", ("data.train = 'd'",), "data.train", "both"),
    ("tokenizer of a recipe", ("model.tokenizer = 't'",), "model.tokenizer", "its own"),
    ("no verifier", ("reward = {}",), "reward.verifier", "only OPD"),
    ("unknown verifier", ('reward.verifier = "exact"',), "reward.verifier", "exact_match"),
    ("no address", ('reward.verifier = "http"',), "reward.verifier", "reward.url"),
    ("no judge", ('reward.verifier = "judge"',), "reward.verifier", "[reward.judge]"),
    ("which judge", ("reward.judge.gpus = 2",), "reward.judge.url", "managed = true"),
    ("judge's model", ("reward.judge.managed = true",), "reward.judge.managed", "model"),
    ("upload", ('checkpoint.upload = "/x"',), "checkpoint.upload", "s3://"),
    ("address", ('reward.url = "x:80"',), "reward.url", "http://"),
    ("no sets", ("evaluation.every_updates = 5",), "evaluation.every_updates", "sets.NAME"),
    (
        "pass@k",
        ('evaluation.sets.a = { recipe = "laptop", pass_at = 2 }',),
        "evaluation.sets.a.pass_at",
        "samples",
    ),
    ("empty set", ("evaluation.sets.a = {}",), "evaluation.sets.a.prompts", "neither"),
    # Launch.
    ("local nodes", ("launch.replicas = 2",), "launch.replicas", "one node"),
    (
        "partial nodes",
        (*MOUNTED, "launch.replicas = 2", "launch.gpus_per_replica = 4", 'launch.backend = "ray"'),
        "launch.gpus_per_replica",
        "8",
    ),
    (
        "no cluster",
        (*MOUNTED, 'launch.backend = "beaker"'),
        "launch.backend",
        "cluster",
    ),
    ("no mount", ('launch.backend = "ray"',), "output.root", "under no mount"),
    (
        "CPU on holmes",
        ('launch.backend = "beaker"', 'launch.mounts = ["/"]', 'launch.cluster = "ai2/holmes"'),
        "launch.cluster",
        "CPU-only",
    ),
    (
        "too many GPUs",
        ("launch.gpus_per_replica = 16", 'launch.cluster = "ai2/jupiter"'),
        "launch.gpus_per_replica",
        "has 8 GPUs",
    ),
    ("zero deadline", ("rollout.waiting_deadline = 0",), "rollout.waiting_deadline", "above 0"),
]


@pytest.mark.parametrize(
    ("settings", "field", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_refused(refuse: Refuse, settings: tuple[str, ...], field: str, text: str) -> None:
    problems = refuse(*settings)
    found = [p for p in problems if p.field == field]
    assert found, [str(p) for p in problems]
    assert text in str(found[0])
