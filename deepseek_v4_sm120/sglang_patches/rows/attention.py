"""The rows of table.py that are of what the attention reads: its sinks, its caches, how its keys come there, and a
draft's window of them."""

from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import (
    ATTENTION,
    BACKEND,
    DSPARK,
    DSPARK_SINCE,
    POST_LOAD,
    POST_LOAD_PARAMETERS,
    direct_updates,
    targets_of,
    targets_of_fix,
)

OF_ATTENTION = Parameters(
    (
        *("self", "config", "layer_id", "quant_config=None"),
        "prefix=''",
        "alt_streams=None",
        "compress_ratio_override=None",
    )
)
READ, ALIGNED = ">=0.5.16,<0.5.24", "PAGE_INDEX_ALIGNED_SIZE"
_sinks, _angles = targets_of_fix("updated_sinks"), targets_of_fix("plain_angles")
_tables = targets_of("step_tables")

UPDATED_SINKS = Patch(
    name="updated_sinks",
    why="on several cards the attention computes with a copy of its heads' sinks from the first forward: behind an "
    "update of the weights with the old ones, and nothing says so (0.5.23: the draft's, and load_format=direct)",
    targets=(
        _sinks(POST_LOAD, "loading", POST_LOAD_PARAMETERS, ">=0.5.14,<0.6"),
        # DSPARK's draft has ends of a load of its own
        _sinks(f"{DSPARK}.load_weights", "loading", Parameters(("self", "weights")), DSPARK_SINCE),
        _sinks(f"{DSPARK}.post_load_weights", "loading", POST_LOAD_PARAMETERS, ">=0.5.23,<0.6"),
        _sinks(
            "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.end_weight_update",
            "end",
            Parameters(("self", "*", "run_post_load")),
            ">=0.5.21,<0.5.23",
        ),
        *direct_updates(_sinks, "loading", "0.5.14"),
    ),
    retire="when SGLang writes every such copy again",
    absent="0.5.12 and 0.5.13 read the parameter",
)

PLAIN_ANGLES = Patch(
    name="plain_angles",
    why="queries and keys of the layers without compression are turned by YaRN's angles, with which they were not "
    "trained (sglang #34788 mended it)",
    targets=(
        _angles(f"{ATTENTION}.__init__", "attention_init", OF_ATTENTION, ">=0.5.14,<0.5.18"),
        _angles("sglang.srt.layers.deepseek_v4_rope:precompute_freqs_cis", "precompute", Bound(), ">=0.5.14,<0.5.16"),
        _angles(
            "sglang.kernels.ops.attention.deepseek_v4_rope:precompute_freqs_cis",
            "precompute",
            Bound(),
            ">=0.5.16,<0.5.18",
        ),
    ),
    retire="with SGLang 0.5.17",
    absent="0.5.12 and 0.5.13, and 0.5.18 and later, have their own angles",
)

LOADED_PREFIXES = Patch(
    name="loaded_prefixes",
    why="where prompts are in graphs, the indexer and the compressors of a layer do not wait for what a hierarchical "
    "cache is still loading of it: they read what the pages held before, and nothing says so",
    targets=(
        targets_of_fix("loaded_prefixes")(
            "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.execute",
            "execute",
            Parameters(("self", "forward_batch", "**kwargs")),
            ">=0.5.14,<0.6",
        ),
    ),
    retire="when what reads a layer's pools in a graph waits for its load",
    absent="0.5.12 and 0.5.13 have no such graphs of this model",
)

DRAFT_CHAIN = Patch(
    name="draft_chain",
    why="with EAGLE and more than one draft the passes behind the first do not see their own token, nor the drafts "
    "before it: second and later guesses are worse than the weights make them, and nothing says so (sglang #24750, "
    "closed; mended for AMD's cards alone)",
    targets=(
        targets_of_fix("draft_chain")(
            f"{BACKEND}:DeepseekV4AttnBackend.make_forward_metadata_from_raw_decode",
            "decode_metadata",
            Parameters(("self", "raw_metadata")),
            ">=0.5.12,<0.5.24",  # which lengths it is given is outside of it: read and run release by release
        ),
    ),
    only_read=True,
    absent="the lengths that a draft's passes are given were read up to 0.5.23",
    retire="when SGLang adds the pass's number and one itself",
)

STEP_TABLES = Patch(
    name="step_tables",
    why="a step's tables by launches that change nothing: copies of what is wide enough, rows counted anew, in the "
    "graph of EAGLE's drafts all tables of a pass that there is not. 18 launches of EAGLE 3/1/4's step, some 30 us",
    targets=(
        _tables(
            f"{BACKEND}:DeepseekV4AttnBackend.expand_extend_with_same_length",
            "expand",
            Parameters(("self", "*", "bs", "qo_len", "seq_lens", "req_pool_indices")),
            READ,
        ),
        _tables(f"{BACKEND}:_pad_last_dim", "pad_last_dim", Parameters(("x", f"multiples_of={ALIGNED}")), READ),
        _tables(
            f"{BACKEND}:DeepseekV4MultiStepBackend.init_forward_metadata_in_graph",
            "metadata_in_graph",
            Parameters(("self", "forward_batch")),
            READ,
        ),
    ),
    only_read=True,
    absent="who reads these tables was read from 0.5.16 to 0.5.23",
    retire="when SGLang makes them by as few launches",
)

HELD_LATENTS = Patch(
    name="held_latents",
    why="in a graph the window's keys are made on a stream of their own, and what they are made of is let go of before "
    "that stream is waited for: its memory may be something else's by then, and nothing says so",
    targets=(
        targets_of_fix("held_latents")(
            f"{ATTENTION}._forward_prepare_multi_stream",
            "prepare",
            Parameters(("self", "x", "positions", "forward_batch", "attn_backend", "q_out=None"), further="any"),
            ">=0.5.12,<0.5.19",
        ),
    ),
    absent="0.5.19 and later hold them themselves (sglang #36547)",
    retire="with the last of these releases",
)
