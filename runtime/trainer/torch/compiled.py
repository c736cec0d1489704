"""Compiled layers: one graph per kind of layer, shared by all modules of that kind and no others.

A loaded model's modules and the functions they call never change, so the compiler is told not to
look at them before each call: looking at modules costs the host more than a layer does, and a small
model waits for the host. It then takes any graph it has for the same piece of
code, whosever modules that was made for: the policy's for a reference without adapters, the
student's for a teacher with other sizes. So each kind of module (``kind_of``) gets a piece of code
of its own: a copy of its forward function, since graphs are kept with the code object.
"""

from __future__ import annotations

import hashlib
import json
import logging
import types
from collections.abc import Callable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from transformers import PretrainedConfig

from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.trainer.torch.scorer import PackedScorer

_RECOMPILE_LIMIT = 64
"""Graphs of one kind of layer. Above torch's 8: three shapes of rows, with and without gradients,
each first for the sizes that came and then for any, and apart where a size is 0 or 1, are some 30
in ordinary use. Past it torch runs the layer uncompiled, and the log has its warning."""

_KNOWN = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model"})
"""Models whose layers are one graph each. Where a graph breaks, the functions inside a layer are
compiled by themselves, as code that all kinds share: there the compiler has to look at modules."""


class _Warnings(logging.Handler):
    """What the compiler warns of as events: torch sends its records to standard error alone."""

    def emit(self, record: logging.LogRecord) -> None:
        get_logger().warning(Event.LIBRARY_WARNED, logger=record.name, message=record.getMessage())


_warnings = _Warnings(level=logging.WARNING)
_dynamo_log = logging.getLogger("torch._dynamo.convert_frame")

_copies: dict[str, Callable[..., Any]] = {}
"""Forward functions by kind, for the life of the process: trainers of one kind share graphs."""


def compile_layers(scorer: PackedScorer, **options: Any) -> None:
    """Each layer and the last norm by themselves, with no masks in the graphs.

    Comes after everything that changes modules or the dtype and layout of weights, sharding too.
    What a sharded layer does around its forward pass, gathering and freeing its weights, stays
    outside the graph. Sets torch's limit of graphs per layer, for the process.

    Args:
        scorer: the model.
        options: for torch.compile; of tests.
    """
    # Products with inputs that are cheap to make again (norms, the gated activation) need not keep
    # them from the forward pass: 7 of 36 GiB, at no cost that could be measured.
    functorch_config.ban_recompute_materialized_backward = False
    dynamo_config.recompile_limit = _RECOMPILE_LIMIT
    _dynamo_log.addHandler(_warnings)  # once, however often it is said
    base = scorer.causal_lm.base_model
    if type(base).__name__ in _KNOWN:
        # The compiler need not look at its own tensors in every call either.
        options = {"options": {"guard_filter_fn": _guards_kept, "size_asserts": False}} | options
    norm = getattr(base, "norm", None)
    for module in (*scorer.layers, *([norm] if isinstance(norm, nn.Module) else [])):
        compiled: Any = module
        forward = types.MethodType(_forward_of(module), module)
        compiled.forward = torch.compile(forward, **options)


def _guards_kept(guards: Any) -> list[bool]:
    by_module = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    by_global = torch.compiler.skip_guard_on_globals_unsafe(guards)
    return [a and b for a, b in zip(by_module, by_global, strict=True)]


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The copy of a module's forward function that modules of its kind have in common."""
    kind = kind_of(module)
    if kind not in _copies:
        forward: Any = type(module).forward
        # Named apart: what the compiler learns of sizes it keeps by place and name of the code.
        copy = types.FunctionType(
            forward.__code__.replace(co_name=f"forward_{kind[:16]}"),
            forward.__globals__,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        _copies[kind] = copy
    return _copies[kind]


def kind_of(module: nn.Module) -> str:
    """Digest of all that a graph may have been made for, the values of weights left out.

    Classes and plain attributes of the module and those in it, the model's configuration, names,
    shapes, strides, dtypes and devices of tensors, and which of them train.
    """
    facts = [[name, *_facts(inner)] for name, inner in module.named_modules()]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _facts(module: nn.Module) -> Iterator[Any]:
    # The class itself: of two with one name each has its own functions.
    yield f"{type(module).__module__}.{type(module).__qualname__}"
    tensors = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for name, value in sorted([*vars(module).items(), *chain(*tensors)], key=itemgetter(0)):
        if isinstance(value, torch.Tensor):
            about = value.dtype, value.device, value.requires_grad
            yield name, list(value.shape), value.stride(), *about
        elif isinstance(value, PretrainedConfig):
            described = value.to_dict()
            described.pop("_name_or_path", None)
            yield name, json.dumps(described, default=str, sort_keys=True)
        # The number of a layer matters to caches alone.
        elif name != "layer_idx" and isinstance(value, bool | int | float | str | None):
            yield name, value
