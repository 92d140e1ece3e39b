"""Run in a Python of its own: SGLang's pool sizes for this model, computed by each wheel's own configurator.

    python3 wheel_pools.py < {"wheels": {version: file}, "compress_ratios": [...], "cases": {version: [...]}}

(JSON.) A case has available_bytes, max_running_requests, chunked_prefill_size, prefix_tails (null: not said),
algorithm and rows of its speculation (null and 0 without), the stages of a pipeline and the layers [first, end) of the
one that is asked; the answers are printed in their order, {version: [...]}.
Of SGLang the modules of REAL run as the wheel has them; a server's state is what `Server` says, strictly: what a
release reads of it and is not there is an error, so that a new input of the sizes cannot be missed.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import zipfile
from types import SimpleNamespace

REAL = (
    "sglang.srt.model_executor.pool_configurator",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.mem_cache.allocation_sizing",
    "sglang.srt.environ",
    "sglang.kernels.ops.attention.dsv4.kv_layout",
)
UNIFIED_GATES = (
    "sglang.srt.layers.attention.dsv4.unified_kv_gate",
    "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.env_gate",
)
PAGE, WINDOW = 256, 128


def ceil_div(a, b):
    return -(-a // b)


class Algorithm:
    """SGLang's SpeculativeAlgorithm, as far as the sizes ask: MTP and DSPARK."""

    @staticmethod
    def from_string(name):
        assert name in ("EAGLE", "DSPARK")
        return SimpleNamespace(is_uno=lambda: False, has_draft_kv=lambda: True)


UTILITIES = {
    "ceil_div": ceil_div,
    "ceil_align": lambda a, b: ceil_div(a, b) * b,
    **{name: lambda: False for name in ("is_hip", "is_npu", "is_cuda", "is_gfx95_supported", "is_float4_e2m1fn_x2")},
}


class Anything(type):
    """The class of what nobody asks anything of: a name to import, to subclass, to decorate with."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make_anything(name)

    def __or__(cls, other):
        return object

    __ror__ = __or__


def make_anything(name):
    return Anything(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *a, **k: a[0]})


class Stub(types.ModuleType):
    """A module of SGLang's (or a package that it needs) of which nothing is used here."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = UTILITIES.get(name) if self.__name__.startswith("sglang.srt.utils") else None
        found = found or make_anything(name)
        setattr(self, name, found)
        return found


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules `real` from one wheel; every other one of SGLang's is a stub."""

    def __init__(self, file, real=REAL):
        self.archive, self.real = zipfile.ZipFile(file), real

    def find_spec(self, name, path=None, target=None):
        mine = name.partition(".")[0] in ("sglang", "triton", "tvm_ffi", "sgl_kernel")
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in self.real) if mine else None

    def create_module(self, spec):
        return None if spec.name in self.real else Stub(spec.name)

    def exec_module(self, module):
        name = module.__name__
        if name in self.real:
            source = self.archive.read(name.replace(".", "/") + ".py")
            exec(compile(source, name, "exec"), module.__dict__)


class Server:
    """What the configurators read of a server: of SGLang up to 0.5.19 from its arguments, then from bags of state."""

    def __init__(self, case, ratios):
        speculative, rows = case["algorithm"], case["rows"]
        stages, (first, end) = case["stages"], case["layers"]
        self.schedule = SimpleNamespace(
            max_running_requests=case["max_running_requests"],
            chunked_prefill_size=case["chunked_prefill_size"],
            swa_full_tokens_ratio=0.1,
            _swa_full_tokens_ratio_explicitly_set=False,
            swa_prefix_tails=case["prefix_tails"],
            disable_overlap_schedule=stages > 1,
            page_size=PAGE,
        )
        self.spec = SimpleNamespace(
            speculative_algorithm=speculative,
            speculative_num_steps={None: None, "EAGLE": rows - 1, "DSPARK": 1}[speculative],
            speculative_eagle_topk=1 if speculative else None,
            speculative_num_draft_tokens=rows or None,
        )
        self.memory = SimpleNamespace(enable_hisparse=False, disable_radix_cache=False)
        self.disagg = SimpleNamespace(disaggregation_mode="null", disaggregation_decode_extra_slots=0)
        self.parallel = SimpleNamespace(attn_dcp_size=1, dcp_size=1)
        self.exec = SimpleNamespace(
            kernel=SimpleNamespace(
                dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False, dsv4_kv_layout=None
            ),
            features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        )
        self.platform = SimpleNamespace(is_sm120=True, is_hip=False, is_npu=False, is_gfx95=False)
        config = SimpleNamespace(
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            index_head_dim=128,
            compress_ratios=ratios,
            window_size=WINDOW,
            context_len=1_048_576,
            hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], kv_source_layer_ids=[]),
        )
        algorithm = SimpleNamespace(
            is_none=lambda: not speculative,
            is_eagle=lambda: speculative == "EAGLE",
            is_dspark=lambda: speculative == "DSPARK",
        )
        ranks = SimpleNamespace(pp_size=stages, attn_dp_size=1)
        arguments = SimpleNamespace(
            swa_full_tokens_ratio=0.1,
            speculative_algorithm=self.spec.speculative_algorithm,
            speculative_num_draft_tokens=self.spec.speculative_num_draft_tokens,
            max_speculative_num_draft_tokens=self.spec.speculative_num_draft_tokens,
            max_running_requests=case["max_running_requests"],
            dp_size=1,
            enable_dp_attention=False,
            enable_hisparse=False,
            disaggregation_mode="null",
            disaggregation_decode_extra_slots=0,
        )
        self.runner = SimpleNamespace(
            model_config=config,
            server_args=arguments,
            spec_algorithm=algorithm,
            kv_cache_dtype_str="fp8_e4m3",
            layer_info=SimpleNamespace(start_layer=first, end_layer=end),
            start_layer=first,
            end_layer=end,
            pp_size=stages,
            pp_group=SimpleNamespace(rank_in_group=0),
            ps=ranks,
            attn_dp_size=1,
            dp_size=1,
            enable_hisparse=False,
            sliding_window_size=WINDOW,
            page_size=PAGE,
        )

    def publish(self, module):
        """Put this server behind SGLang's getters, where the module has imported them."""
        bags = ("schedule", "spec", "memory", "disagg", "parallel", "exec", "platform")
        getters = {f"get_{name}": functools.partial(getattr, self, name) for name in bags}
        getters["max_speculative_num_draft_tokens"] = lambda: self.spec.speculative_num_draft_tokens
        for name, getter in getters.items():
            if name in vars(module):
                setattr(module, name, getter)


def sizes(configurator, case):
    found = configurator.calculate_pool_sizes(case["available_bytes"], PAGE)
    found.max_running_requests = case["max_running_requests"]
    if hasattr(configurator, "finalize_with_max_running_requests"):
        found = configurator.finalize_with_max_running_requests(found)
    return {
        "tokens": found.full_max_total_num_tokens,
        "window_tokens": found.swa_max_total_num_tokens,
        "c128_state_rows": found.c128_state_pool_size,
        "bytes_per_full_token": configurator.bytes_per_full_token,
    }


def answers(file, ratios, cases):
    for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    wheel = Wheel(file)
    sys.meta_path.insert(0, wheel)
    try:
        modules = [importlib.import_module(name) for name in REAL if has(wheel.archive, name)]
        importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm = Algorithm
        for home in UNIFIED_GATES:  # another layout of the caches, for AMD's GPUs
            gate = importlib.import_module(home)
            gate.is_unified_kv_triton = gate.is_unified_kv_fp8 = lambda: False
        found = []
        for case in cases:
            server = Server(case, ratios)
            for module in modules:
                server.publish(module)
            found.append(sizes(modules[0].DSV4PoolConfigurator(server.runner), case))
        return found
    finally:
        sys.meta_path.remove(wheel)


@functools.cache
def members(archive):
    return set(archive.namelist())


def has(archive, name):
    return name.replace(".", "/") + ".py" in members(archive)


def main():
    asked = json.load(sys.stdin)
    found = {v: answers(file, asked["compress_ratios"], asked["cases"][v]) for v, file in asked["wheels"].items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
