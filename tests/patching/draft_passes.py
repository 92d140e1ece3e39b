"""EAGLE's drafts by a release's own worker and backend, with a small draft model of ours: what each pass's attention
reads, and what is guessed, beside the same recurrence computed without pages, lists and slots.

A program of its own: without a GPU TRITON_INTERPRET=1 must be set before Triton is imported.

    python3 -m tests.patching.draft_passes 0.5.23        JSON: what holds, by name
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import sys
from types import SimpleNamespace

import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.fixes.draft_chain import replace_decode_metadata
from deepseek_v4_sm120.sglang_patches.table import BACKEND
from tests.patching.dspark_block import kernels
from tests.patching.test_wheel_wo_a import QUIET, definition, take
from tests.patching.wheels import fetch, packages, since

SPECULATIVE = "sglang.srt.speculative"
WORKER, LAYOUT = f"{SPECULATIVE}.eagle_worker_v2", f"{SPECULATIVE}.eagle_utils"
PREPARE = {  # since when: where a step's first batch of the draft is made
    "0.5.16": (f"{SPECULATIVE}.eagle_worker_common", "prepare_for_draft"),
    "0.5.14": (f"{SPECULATIVE}.base_spec_worker", "EagleDraftWorkerBase.prepare_for_draft"),
    "0.5.12": (f"{SPECULATIVE}.eagle_info_v2", "EagleDraftInputV2Mixin.prepare_for_v2_draft"),
}
DECODE, STEPS = "DeepseekV4AttnBackend.make_forward_metadata_from_raw_decode", 4
METHODS = (
    *("make_core_attn_metadata", "get_swa_page_indices", "init_forward_metadata_decode"),
    # of the pass over what was verified
    *("init_forward_metadata_draft_extend", "expand_extend_with_same_length"),
    *("init_forward_metadata_prefill", "expand_prefill_casually"),  # up to 0.5.15
)
WINDOW, SWA_PAGE, PAGE, CONTEXT, ROWS = 128, 256, 256, 1024, 5
# nothing but its first token; a window not yet full, full, and beyond; the borders of pages
LENGTHS = (1, 126, 127, 128, 255, 256, 700)
HIDDEN, VOCABULARY, THETA = 16, 97, 10_000.0


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE over all of x [..., HIDDEN] at positions [...]."""
    turn = positions.double()[..., None] * THETA ** -(torch.arange(HIDDEN // 2).double() / (HIDDEN // 2))
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turn), turn)).flatten(-2)


class Draft:
    """A block as the MTP block is one, of one stream and one head: embedding and hidden state, each normalised and
    projected, are added; then window attention with a sink whose keys are its values; then a head over its norm. What
    the next pass reads is in front of that norm."""

    def __init__(self):
        made = torch.Generator().manual_seed(3)
        self.embedding, self.head, self.to_hidden, self.to_embedding, self.to_key = (
            torch.randn(*shape, generator=made, dtype=torch.float64)
            for shape in ((VOCABULARY, HIDDEN), (VOCABULARY, HIDDEN), *[(HIDDEN, HIDDEN)] * 3)
        )

    def normal(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def entered(self, tokens, hidden):
        return self.normal(self.embedding[tokens]) @ self.to_embedding + self.normal(hidden) @ self.to_hidden

    def key(self, entered, positions):
        return rotate(self.normal(entered @ self.to_key), positions)

    def attended(self, entered, positions, keys, sees):
        """entered [n, HIDDEN], keys [n, w, HIDDEN], sees [n, w] -> (logits, hidden)."""
        scores = torch.einsum("nh,nwh->nw", self.key(entered, positions), keys).masked_fill(~sees, -torch.inf)
        weights = torch.cat([scores, torch.zeros(len(scores), 1)], 1).softmax(1)[:, :-1]
        summed = torch.einsum("nw,nwh->nh", weights, keys)
        hidden = entered + rotate(summed, -positions)
        return self.normal(hidden) @ self.head.T, hidden


class Cache:
    """Rows of requests, slots in no order, and a second numbering for the windows."""

    def __init__(self):
        shuffled = torch.Generator().manual_seed(1)
        slots = torch.randperm(ROWS * len(LENGTHS) * CONTEXT, generator=shuffled)
        self.slots = slots[: len(LENGTHS) * CONTEXT].reshape(len(LENGTHS), CONTEXT).int()
        self.to_window = torch.randperm(ROWS * len(LENGTHS) * CONTEXT, generator=shuffled)
        self.keys = torch.full((len(self.to_window), HIDDEN), torch.nan, dtype=torch.float64)

    def window(self, row: int, position: int) -> set[int]:
        """Where the last 128 keys lie that a token at `position` is to see, with its own."""
        seen = self.slots[row, max(0, position + 1 - WINDOW) : position + 1]
        return set(self.to_window[seen.long()].tolist())

    def write(self, slots, keys):
        self.keys[self.to_window[slots.long()]] = keys


def backend(version: str, cache: Cache, *, ours: bool):
    """The release's DeepseekV4MultiStepBackend of a draft, as far as its passes' metadata go."""
    wheel = fetch(version)
    pool = SimpleNamespace(
        full_to_swa_index_mapping=cache.to_window,
        translate_loc_from_full_to_swa=lambda slots: torch.where(slots < 0, -1, cache.to_window[slots.long()]),
        request_window=None,
        swa_req_ring_size=None,
    )

    class Pass:
        is_dspark_draft, trtllm_attn, encoder_replay, encoder_row_floor = False, False, None, None
        present_ratios, low_ratios, has_c4, has_c128, c4_topk, index_topk = (), (), False, False, 512, 512
        topk, speculative_num_steps, page_size, MAX_SEQ_LEN_FOR_CAPTURE = 1, STEPS, PAGE, CONTEXT
        swa_page_size = SWA_PAGE if since(version, "0.5.21") else WINDOW
        cuda_int32_kwargs = {"dtype": torch.int32, "device": "cpu"}
        req_to_token, token_to_kv_pool = cache.slots, pool

        def __init__(self, number):
            self.speculative_step_id = number

        def init_forward_metadata_indexer(self, core, **_):
            return None

        def _fill_cuda_graph_swa_out_cache_loc(self, slots):
            return None

        def _move_to_device(self, x):
            return torch.tensor(x, dtype=torch.int32)

    class Core(SimpleNamespace):
        init_compression_metadata = init_flashmla_related = lambda self, *_, **__: None

    names = {"torch": torch, "SWA_WINDOW": WINDOW, "PAGE_INDEX_ALIGNED_SIZE": 64, "DSV4AttnMetadata": Core}
    names |= {"DSV4Metadata": lambda core_attn_metadata, *_, **__: core_attn_metadata}
    names["envs"] = SimpleNamespace(SGLANG_PREP_IN_CUDA_GRAPH=SimpleNamespace(get=lambda: True))  # up to 0.5.17
    raw = {"torch": torch, "dataclass": dataclasses.dataclass}
    names["DSV4RawDecodeMetadata"] = take(wheel, raw, "DSV4RawDecodeMetadata", BACKEND)
    names["_pad_last_dim"] = lambda x, multiples_of: torch.nn.functional.pad(
        x, (0, -x.shape[-1] % multiples_of), value=-1
    )
    nothing = ("create_paged_compressor_data", "_create_dummy_paged_compress_data", "_create_flashmla_metadata")
    names |= dict.fromkeys(nothing, lambda **_: None)
    if since(version, "0.5.16"):
        of_kernels = kernels(version, on_gpu=True)
        names |= {name: of_kernels[name] for name in of_kernels if name.startswith(("Build", "Expand"))}
    names["GIVEN"] = {}
    for method in METHODS:
        if definition(wheel, f"DeepseekV4AttnBackend.{method}", BACKEND) is not None:
            setattr(Pass, method, take(wheel, dict(names), f"DeepseekV4AttnBackend.{method}", BACKEND))
    made = take(wheel, dict(names), DECODE, BACKEND)
    Pass.make_forward_metadata_from_raw_decode = replace_decode_metadata(made) if ours else made
    return SimpleNamespace(attn_backends=[Pass(i) for i in range(STEPS)])


class Runner:
    """The draft's model: a pass writes its keys, then reads what its backend lists."""

    canary_manager, model_config = None, SimpleNamespace(hf_config=SimpleNamespace(architectures=[""]))
    model_config.model_is_mrope = False

    def __init__(self, draft: Draft, cache: Cache):
        self.draft, self.cache, self.active, self.read = draft, cache, None, []

    def forward(self, batch, **_):
        backend = getattr(batch, "attn_backend", self.active)
        of_pass = batch.written[backend.speculative_step_id]
        raw = backend.init_forward_metadata_decode(CONTEXT, batch.req_pool_indices, batch.seq_lens, of_pass)
        core = backend.make_forward_metadata_from_raw_decode(raw_metadata=raw)
        entered = self.draft.entered(batch.input_ids, batch.spec_info.hidden_states)
        self.cache.write(batch.out_cache_loc, self.draft.key(entered, batch.positions))
        listed = core.swa_page_indices[:, :WINDOW].long()
        sees = torch.arange(WINDOW) < core.swa_topk_lengths[:, None]
        self.read.append([set(row[seen].tolist()) for row, seen in zip(listed, sees, strict=True)])
        keys = torch.where(sees[..., None], self.cache.keys[listed.clamp(min=0)], 0)
        logits, hidden = self.draft.attended(entered, batch.positions, keys, sees)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))


class Slots:
    """For the kernel that gathers the slots behind each request's length."""

    def __getitem__(self, grid):
        return self

    def __call__(self, requests, slots, lengths, out, *sizes, positions=None, mrope=None, **_):
        columns = sizes[-1]  # before it the row's width, in some releases, and topk, 1
        assert positions is None and mrope is None, "a GPU's alone"
        at = lengths[:, None] + torch.arange(columns)
        out.copy_(slots[requests[:, None], at].flatten())


def prepared(version: str, spec_info, cache: Cache, lengths):
    """The draft's batch by the release's own preparation, of a step whose requests have `lengths` verified tokens."""
    (module, name) = next(place for first, place in PREPARE.items() if since(version, first))

    def init_new(batch, *_, **__):
        return SimpleNamespace(**vars(batch) | {"batch_size": len(batch.seq_lens), "positions": spec_info.positions})

    pool = SimpleNamespace(req_to_token=cache.slots)
    batch = SimpleNamespace(
        **{"req_pool_indices": torch.arange(len(lengths)), "seq_lens": lengths, "spec_info": spec_info},
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        sampling_info=SimpleNamespace(is_all_greedy=True),
        input_ids=lengths,
        device="cpu",
    )
    runner = SimpleNamespace(spec_algorithm=SimpleNamespace(is_standalone=lambda: False))
    kernel = "assign_draft_cache_locs_"
    names = {f"{kernel}{form}": Slots() for form in ("contiguous", "contiguous_func", "page_size_1")}
    names |= {"ForwardBatch": SimpleNamespace(init_new=init_new), "CaptureHiddenMode": QUIET}
    names = {"torch": torch, "_is_cpu": False, **names, "GIVEN": dict(names)}
    owner = (SimpleNamespace(),) if module.endswith("base_spec_worker") else ()
    return take(fetch(version), names, name, module)(*owner, spec_info, pool, batch, None, runner, 1, STEPS)[0]


def by_sglang(version: str, given, cache: Cache, draft: Draft, *, ours: bool):
    """(drafts [requests, STEPS], what each pass read, of each request)."""
    wheel, runner = fetch(version), Runner(draft, cache)
    first, hidden, lengths = given

    def next_one(logits, positions, drafts, column):
        token = logits.argmax(-1, keepdim=True)
        drafts[:, column : column + 1] = token
        positions.add_(1)
        return torch.ones_like(token), token

    @contextlib.contextmanager
    def in_turn(context, **_):
        runner.active = context.attn_backend
        yield

    def select(number, weights, tokens, hidden, scores, topk):
        return tokens.flatten(), hidden, scores, (weights.unsqueeze(1), tokens, tokens)

    names = {
        "torch": torch,
        "contextlib": contextlib,
        "_is_cuda": True,
        "_is_hip": False,
        "select_top_k_tokens": select,
    }
    names |= {"draft_topk1_postprocess": next_one, "forward_context": in_turn, "ForwardContext": SimpleNamespace}
    names |= {"fast_topk": lambda x, n, dim: torch.topk(x, n, dim), "renorm_draft_probs": lambda x, *_: x.softmax(-1)}
    names |= {
        "get_spec": lambda: SimpleNamespace(speculative_use_rejection_sampling=False),
        "IndexTopKShareState": SimpleNamespace(mtp_iteration=lambda *_, **__: contextlib.nullcontext()),
        "organize_draft_results": lambda scores, tokens, parents, n: (None, None, torch.cat(tokens, 1)),
    }
    split = take(wheel, {"torch": torch}, "per_step_draft_out_cache_loc", LAYOUT)
    names["per_step_draft_out_cache_loc"] = split
    worker = SimpleNamespace(
        hot_token_id=None,
        topk=1,
        speculative_num_steps=STEPS,
        speculative_num_draft_tokens=STEPS + 1,
        draft_runner=runner,
        draft_attn_backend=backend(version, cache, ours=ours),
        index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False,
        server_args=SimpleNamespace(speculative_use_rejection_sampling=False),
        _topk1_parents_prealloc=torch.zeros(64, STEPS),
        _topk1_score_indices_prealloc=torch.zeros(64, STEPS),
    )
    spec_info = SimpleNamespace(topk_p=torch.ones(len(LENGTHS), 1), topk_index=first, hidden_states=hidden)
    batch = prepared(version, spec_info, cache, lengths)
    batch.written = batch.out_cache_loc.view(len(LENGTHS), STEPS).T
    found = take(wheel, names, "EagleDraftWorker.draft_forward", WORKER)(worker, batch)
    return found[2], runner.read


def read_by_rows(core) -> list[set[int]]:
    return [set(row[:n].tolist()) for row, n in zip(core.swa_page_indices, core.swa_topk_lengths, strict=True)]


def of_verified(version: str, cache: Cache) -> list[set[int]]:
    """What the pass over STEPS verified rows of each request reads, row by row."""
    first = backend(version, cache, ours=False).attn_backends[0]
    after = torch.tensor(LENGTHS) + STEPS
    slots = torch.stack([cache.slots[row, n : n + STEPS] for row, n in enumerate(LENGTHS)])
    given = {"max_seq_len": CONTEXT, "req_pool_indices": torch.arange(len(LENGTHS)), "out_cache_loc": slots.flatten()}
    given |= {"seq_lens": after, "seq_lens_cpu": after.tolist(), "use_prefill_cuda_graph": False}
    given |= dict.fromkeys(("num_tokens_per_bs", "num_tokens_per_req"), STEPS)
    make = first.init_forward_metadata_draft_extend
    asked = inspect.signature(make).parameters
    return read_by_rows(make(**{name: value for name, value in given.items() if name in asked}))


def alone(given, history, draft: Draft) -> torch.Tensor:
    """The same drafts of each request by itself: all keys in their order, a window of the last 128 with its own."""
    every = []
    for (token,), hidden, length, keys in zip(*given, history, strict=True):
        chain, hidden = [token], hidden[None]
        for position in range(int(length), int(length) + STEPS - 1):
            at = torch.tensor([position])
            entered = draft.entered(chain[-1][None], hidden)
            keys = torch.cat([keys, draft.key(entered, at)])
            window = keys[-WINDOW:][None]
            logits, hidden = draft.attended(entered, at, window, torch.ones(window.shape[:2], dtype=torch.bool))
            chain.append(logits.argmax(-1)[0])
        every.append(torch.stack(chain))
    return torch.stack(every)


def main(version: str) -> dict[str, bool]:
    if importlib.util.find_spec("msgspec") is None:
        sys.path.append(str(packages()))
    device_gate.serves = lambda device: True
    made, draft, lengths = torch.Generator().manual_seed(2), Draft(), torch.tensor(LENGTHS)
    first = torch.randint(VOCABULARY, (len(LENGTHS), 1), generator=made)
    given = first, torch.randn(len(LENGTHS), HIDDEN, generator=made, dtype=torch.float64), lengths
    history = [rotate(torch.randn(n, HIDDEN, generator=made, dtype=torch.float64), torch.arange(n)) for n in LENGTHS]
    right, found = alone(given, history, draft), {}
    for ours in (False, True):
        cache = Cache()
        for row, keys in enumerate(history):
            cache.write(cache.slots[row, : len(keys)], keys)
        drafts, read = by_sglang(version, given, cache, draft, ours=ours)
        windows = [[cache.window(row, n + step) for row, n in enumerate(LENGTHS)] for step in range(STEPS - 1)]
        whose = "ours" if ours else "stock"
        found |= {f"{whose}: each pass reads its own window": read == windows}
        found |= {f"{whose}: drafts are the recurrence's": torch.equal(drafts, right)}
        found |= {f"{whose}: the first draft is": torch.equal(drafts[:, :1], first)}
    verified = [cache.window(row, n + step) for row, n in enumerate(LENGTHS) for step in range(STEPS)]
    return found | {"what was verified reads its own windows": of_verified(version, cache) == verified}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
