"""Where SGLang resolves DeepSeek-V4's arguments -> the table's defaults (defaults.py).

`apply_deepseek_v4_defaults(server_args, model_arch)` runs once per server in the parent, for DeepSeek-V4 and for what
SGLang runs through the same class (DeepSeek-V4.1, from 0.5.21 on): here the model is told apart (models_served.py), and
another model than ours gets none of them. Asking for the GPU there is safe, because SGLang itself has asked by
then and its workers are spawned, not forked.

One process may start several servers, of other models too (SGLang's engine in a script or notebook), and a process that
it starts inherits its variables. So where the arguments of any model begin to be resolved, nothing is known of a server
before.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from importlib.util import find_spec

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops.all_reduce_sizes import ONE_ORDER_RANKS
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.patching.steering import ON, USER
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, host_address, models_served
from deepseek_v4_sm120.sglang_patches.adapters import torch_compile
from deepseek_v4_sm120.sglang_patches.defaults import REPRODUCIBLE
from deepseek_v4_sm120.sglang_patches.names import RUST_FRONT, WITHOUT_FRONT
from deepseek_v4_sm120.sglang_patches.stored_experts import FP8, NVFP4

MODEL_CONFIG = "sglang.srt.arg_groups.model_override_base"  # 0.5.19 and later
SERVER_ARGS, OVERRIDES = "sglang.srt.server_args", "sglang.srt.arg_groups.overrides"
ENVIRON = "sglang.srt.environ"
SAYS_FP4 = "SGLANG_DSV4_FP4_EXPERTS"  # how the user says what SGLang finds by itself
BY_ROWS = "their sums' order depends on the rows"
OTHER_EXPERTS = f"experts: SGLang's own, as they are not FP4. NOT REPRODUCIBLE: {BY_ROWS}"
DUMPER = "DUMPER_"  # variables of SGLang's dumper of what modules return
ATTENTION_BACKEND = "dsv4"  # what all releases resolve for this model


def accessors(server_args) -> tuple[Callable, Callable]:
    """(read, write) of a server argument. From 0.5.19 on they are a record, sealed from 0.5.20 on, beside a list of
    decisions, of which the last counts."""
    declarations = sys.modules.get(OVERRIDES)
    if not hasattr(declarations, "declare_resolution"):
        return functools.partial(getattr, server_args), functools.partial(setattr, server_args)
    view = declarations.resolving_view(server_args)
    return functools.partial(getattr, view), lambda name, value: declarations.declare_resolution(
        server_args, "deepseek_v4_sm120", **{name: value}
    )


def _model_config(server_args):
    """What SGLang has read of the model by now; from 0.5.19 on a function has it. None: a release that has neither."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    if MODEL_CONFIG in sys.modules or find_spec(MODEL_CONFIG) is not None:
        return importlib.import_module(MODEL_CONFIG).model_config_of(server_args)
    return None


def config_of(server_args) -> dict | None:
    """The model's config.json as SGLang read it; None: nobody is told a model, and the shapes of its calls decide."""
    found = _model_config(server_args)
    return None if found is None else found.hf_config.to_dict()


def _are_4_bits(server_args) -> bool:
    """False where SGLang has found by the checkpoint's weights that the experts are FP8."""
    found = _model_config(server_args)
    return getattr(found, "is_fp4_experts", True)


def _has_fp4_experts(server_args) -> bool:
    """DeepSeek's, that is: not NVFP4 either."""
    found = _model_config(server_args)
    return _are_4_bits(server_args) and getattr(found, "nvfp4_moe_meta", None) is None


def _others(server_args, config: Mapping) -> str | None:
    """Which operators have nothing to do in this model, on however many cards; None where each has something."""
    given = dict(config)
    if not _has_fp4_experts(server_args):  # of which the configuration may say that they are
        given[models_served.EXPERT_FORMAT] = NVFP4 if _are_4_bits(server_args) else FP8
    without = [f"{v.operator} ({v.why})" for v in models_served.verdicts(given) if not v.served]
    return f"SGLang's own code runs in place of {'; '.join(without)}" if without else None


def _surroundings(server_args) -> MutableMapping[str, str]:
    """The environment; where SGLang has found experts in FP8, it says so, too."""
    return ChainMap(os.environ, {} if _are_4_bits(server_args) else {SAYS_FP4: "0"})


def _asked(read: Callable) -> dict[str, bool | int]:
    """What of the server's arguments adapters go by in all of its processes (models_served.py)."""
    names = ("forward_hooks", "debug_tensor_dump_output_folder", "msprobe_dump_config")
    looks = [read(name, None) for name in names]
    looks += [name for name in os.environ if name.startswith(DUMPER)]
    return {
        "torch_compile": bool(read("enable_torch_compile", False)),
        "is_looked_into": any(map(bool, looks)),
        "several_hosts": read("nnodes", 1) > 1,
        "ranks_come_and_go": read("elastic_ep_backend", None) is not None,
        "summing_ranks": 0 if _puts_sums_aside(read) else read("tp_size", 0),
    }


def _left_out(engine, read: Callable) -> list[str]:
    """What a reproducible server needs, and the user's settings leave out. (What does not fit stops it; sums and
    experts that are ours, and yet not in place, tell that themselves.)"""
    if engine.steering.outcome("reproducible").state not in (ON, USER):
        return []
    in_place = engine.in_place() - ({"all_reduce"} if _puts_sums_aside(read) else set())
    needed = (*REPRODUCIBLE, *(["all_reduce"] if read("tp_size", 1) > ONE_ORDER_RANKS else []))
    return [name for name in needed if name not in in_place]


def has_rust_front() -> bool:
    """Whether this SGLang has another front than Python's, and is asked for it."""
    variable = getattr(getattr(sys.modules.get(ENVIRON), "envs", None), RUST_FRONT, None)
    return variable is not None and variable.get()


def _puts_sums_aside(read: Callable) -> bool:
    """Whether the user does without the custom sums that ours stand behind."""
    is_deterministic = read("enable_deterministic_inference", False) and not settings().reproducible
    return read("disable_custom_all_reduce", False) or is_deterministic


def replace_adjustments(original: Callable) -> Callable:
    """For handle_model_specific_adjustments(server_args), which each server of any model goes through, ahead of what is
    resolved for ours."""

    @functools.wraps(original)
    def handle_model_specific_adjustments(server_args):
        models_served.forget()
        report.forget_notes()
        host_address.forget(os.environ)
        engine = patching.active_engine()
        engine.steering.begin(os.environ)
        original(server_args)
        engine.steering.end(os.environ)

    return handle_model_specific_adjustments


def replace_adjustments_method(original: Callable) -> Callable:
    """The same up to 0.5.18, where it is a method of the arguments."""
    handle = replace_adjustments(original)

    @functools.wraps(original)
    def _handle_model_specific_adjustments(self):
        return handle(self)

    return _handle_model_specific_adjustments


def replace_apply_defaults(original: Callable) -> Callable:
    """For apply_deepseek_v4_defaults: ours first, so that SGLang's own checks see the values; then the original."""

    @functools.wraps(original)
    def apply_deepseek_v4_defaults(server_args, model_arch):
        engine = patching.active_engine()
        config, (read, write) = config_of(server_args), accessors(server_args)
        model_type = None
        if config is not None:
            models_served.announce(config, **_asked(read))
            torch_compile.keep_out()
            model_type = config.get("model_type")
        other = models_served.other_model(model_type)
        if other:
            report.info(f"deepseek_v4_sm120: SGLang's own code and defaults serve this model: {other}")
            engine.steering.set_aside(other)
            report.write(engine)
        elif device_gate.serves_current_device():
            models_served.announce_served_card()
            if has_rust_front():
                report.add_note(RUST_FRONT, lambda: f"{RUST_FRONT}: {WITHOUT_FRONT}")
                report.warn(f"deepseek_v4_sm120: {RUST_FRONT}: {WITHOUT_FRONT}")
            if (address := host_address.tell(read, os.environ)) is not None:
                report.info(f"deepseek_v4_sm120: other hosts reach this one at {address} ({host_address.VARIABLES[0]})")
            if told := extension.stale():
                report.warn(f"deepseek_v4_sm120: {told}")
            if others := engine.profile.of_other_cards(read("tp_size", None)):
                report.add_note("profile", lambda: others)
                report.warn(f"deepseek_v4_sm120: {others}")
            engine.steering.apply(_surroundings(server_args), read, write)
            applied = [f"{c.default}: {', '.join(c.applied)}" for c in engine.steering.outcomes if c.applied]
            if applied:
                report.info(f"deepseek_v4_sm120: defaults for this GPU: {'; '.join(applied)}")
            if settings().reproducible and not _has_fp4_experts(server_args):
                report.add_note("experts", lambda: OTHER_EXPERTS)
                report.warn(f"deepseek_v4_sm120: {OTHER_EXPERTS}")
            if settings().reproducible and (theirs := _left_out(engine, read)):
                told = f"{', '.join(theirs)}: SGLang's own, by the settings. NOT REPRODUCIBLE: {BY_ROWS}"
                report.add_note("reproducible", lambda: told)
                report.warn(f"deepseek_v4_sm120: {told}")
            if config is not None and (without := _others(server_args, config)):
                report.add_note("model", lambda: f"model: {without}")
                report.info(f"deepseek_v4_sm120: {without}")
            report.write(engine)
        return original(server_args, model_arch)

    return apply_deepseek_v4_defaults


def replace_deterministic(original: Callable) -> Callable:
    """For what SGLang resolves of --enable-deterministic-inference, of a reproducible server: its attention backend is
    accepted with the radix cache, and sums between the cards stay as the user had them, because ours are behind the
    object that they ask. What is not ours goes to NCCL's tree, as without us (adapters/all_reduce.py)."""

    @functools.wraps(original)
    def handle_deterministic_inference(server_args):
        read, write = accessors(server_args)
        told = models_served.announced()
        ours = told is not None and models_served.serves_this_process() and device_gate.serves_current_device()
        if not ours or not read("enable_deterministic_inference"):
            return original(server_args)
        for choices in ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"):
            accepted = getattr(importlib.import_module(SERVER_ARGS), choices)
            accepted.extend({ATTENTION_BACKEND}.difference(accepted))
        wanted = read("disable_custom_all_reduce")
        original(server_args)
        if read("disable_custom_all_reduce") != wanted:
            write("disable_custom_all_reduce", wanted)

    return handle_deterministic_inference


def replace_deterministic_method(original: Callable) -> Callable:
    """The same up to 0.5.18, where it is a method of the arguments."""
    handle = replace_deterministic(original)

    @functools.wraps(original)
    def _handle_deterministic_inference(self):
        return handle(self)

    return _handle_deterministic_inference


def replace_marlin_gate(original: Callable) -> Callable:
    """For `is_sm90_supported` as 0.5.12's Marlin experts imported it: Marlin's kernel is compiled on the machine and
    runs on SM120; 0.5.13 and later accept that GPU themselves."""

    @functools.wraps(original)
    def is_sm90_supported(*args, **kwargs):
        return device_gate.serves_current_device() or original(*args, **kwargs)

    return is_sm90_supported
