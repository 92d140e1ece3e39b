"""What the parts of the table of patches share: names of SGLang's, versions, and how a row of ours is written."""

from collections.abc import Callable

from deepseek_v4_sm120.patching.contract import Bound, Contract, Parameters
from deepseek_v4_sm120.patching.spec import Target

MODEL = "sglang.srt.models.deepseek_v4"
ATTENTION = f"{MODEL}:MQALayer"
POST_LOAD = f"{MODEL}:DeepseekV4ForCausalLM.post_load_weights"  # weights of a model were loaded; the MTP draft's, too
POST_LOAD_PARAMETERS = Parameters(("self", "is_nextn=False", "weight_names=None"))
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
DSPARK = "sglang.srt.models.deepseek_v4_dspark:DeepseekV4ForCausalLMDSpark"
DSPARK_INPUT = "sglang.srt.speculative.dflash_info_v2"
DSPARK_VERIFY = "sglang.srt.speculative.dspark_components.dspark_verify"
MODEL_RUNNER, LOAD_DIRECT = "sglang.srt.model_executor.model_runner", "_model_load_weights_direct"
FIND_LOADER = "dynamic_import"  # "module.function" -> the function, where a --custom-weight-loader is asked for
EVERY, DSPARK_SINCE = ">=0.5.12,<0.6", ">=0.5.16,<0.6"
EXTENSION = "deepseek_v4_sm120.ops.shared.extension:load"
LOADER = "sglang.srt.model_loader.loader"
# 0.5.17 and later: requests are read, and answers written, by SGLang's own Rust code in place of Python's
RUST_FRONT, RUST_FRONT_SINCE, IS_TRUE = "SGLANG_RUST_SERVER", (0, 5, 17), ("true", "1", "yes", "y")
WITHOUT_FRONT = (
    "SGLang's Rust code reads the requests and writes the answers, so what ours mends there is not in place: thoughts, "
    "tools and schemas over the chat API, requests that end a server"
)
CONTEXT, SERVER_ARGS = "sglang.srt.runtime_context", "sglang.srt.server_args"
PARALLEL_STATE = "sglang.srt.distributed.parallel_state"
NCCL = "sglang.srt.distributed.device_communicators.pynccl"


def targets_of(module: str, folder: str = "adapters") -> Callable[..., Target]:
    """target(where, name, contract, sglang, caller): replaced by `replace_<name>` of this module of adapters/."""

    def target(where: str, name: str, contract: Contract, sglang: str = EVERY, caller: str | None = None, **more):
        replacement = f"deepseek_v4_sm120.sglang_patches.{folder}.{module}:replace_{name}"
        return Target(where=where, sglang=sglang, contract=contract, replacement=replacement, caller=caller, **more)

    return target


def targets_of_fix(module: str) -> Callable[..., Target]:
    """The same for a module of fixes/."""
    return targets_of(module, "fixes")


def direct_updates(target: Callable[..., Target], name: str, since: str = "0.5.12") -> tuple[Target, ...]:
    """What update_weights_from_tensor writes with past load_weights: by load_format="direct", and by a loader of the
    user's own, for which `<name>_custom` stands where it is looked up."""
    given = Parameters(("model", "named_tensors"))
    places = ((MODEL_RUNNER, f">={since},<0.5.16"), (f"{MODEL_RUNNER}_components.weight_updater", ">=0.5.16,<0.6"))
    return tuple(
        target(f"{module}:{function}", named, contract, releases)
        for module, releases in places
        for function, named, contract in ((LOAD_DIRECT, name, given), (FIND_LOADER, f"{name}_custom", Bound()))
    )


def handed_over() -> tuple[Target, ...]:
    """Where weights are loaded, or held, as SGLang's own layers have made them: adapters/handed_over.py."""
    target = targets_of("handed_over")
    of_load = Parameters(("self", "*", "model_config", "device_config"))
    loaders = {"ShardedStateLoader": EVERY, "RemoteModelLoader": EVERY, "RemoteInstanceModelLoader": EVERY}
    loaders |= {"PreshardedModelLoader": ">=0.5.17,<0.6"}
    return (
        *(target(f"{LOADER}:{name}.load_model", "load_model", of_load, sglang) for name, sglang in loaders.items()),
        target(
            "sglang.srt.weight_cache.protocol:check_ipc_quant_support",
            "quant_support",
            Parameters(("quant_method", "quant_config", "*", "where")),
            ">=0.5.17,<0.6",
        ),
    )
