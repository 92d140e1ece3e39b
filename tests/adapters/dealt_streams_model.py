"""A model of SGLang's form for `dealt_streams`, by ranks that are threads: embedding by parts of the vocabulary, layers
of two sublayers between boundaries, the mean of the streams as head. A sublayer looks at all rows, and a rank's terms
are its own; what they add up to is exact in bf16, so that no order of additions shows."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.sglang_patches.adapters import mhc_dealt_streams as adapter
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import finished

HIDDEN, LAYERS, TOKENS, ROWS = 8, 3, 32, 4  # ROWS: of a share at least
EPSILONS = (1e-6, 1e-6, 1e-6, 2.0, 3)


# ---- ranks


class Failed(Exception):
    """What a rank raises in the middle of a pass."""


class Coordinator:
    """SGLang's, of a rank that is a thread. calls: what was exchanged, in its order, as (kind, rows)."""

    ca_comm, pynccl_comm = None, SimpleNamespace(disabled=True)

    def __init__(self, ranks: Ranks, rank: int):
        self.world_size, self.rank_in_group, self._ranks, self.calls = ranks.count, rank, ranks, []
        self.device_group = self

    def meet(self, kind, x):
        self.calls.append((kind, len(x)))
        return self._ranks.meet(self.rank_in_group, kind, x)

    def all_reduce(self, x):
        return x.copy_(sum(term.float() for term in self.meet("sum", x)))

    def is_symmetric_memory_enabled(self):
        return False


class Ranks:
    """What the ranks of a group share: tensors that meet, all of one kind and size."""

    def __init__(self, count: int):
        self.count, self.parts = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def meet(self, rank, kind, x):
        self.parts[rank] = (kind, x.clone())
        self.barrier.wait()
        kinds, tensors = zip(*self.parts, strict=True)
        self.barrier.wait()
        assert set(kinds) == {kind} and {one.shape for one in tensors} == {x.shape}
        return list(tensors)

    def each(self, body) -> list:
        """body(coordinator) in a thread for each rank."""
        found: list = [None] * self.count

        def run(rank):
            _this.coordinator = coordinator = Coordinator(self, rank)
            try:
                found[rank] = body(coordinator)
            except Failed as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # what a server's ranks count is counted by processes: no `+= 1` is cut in two here
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert None not in found
        return found


_this = threading.local()  # coordinator: the rank's


class State(ModuleType):
    """SGLang's module of groups, in each thread with the rank's own."""

    _PDMUX_PREFILL_TP_GROUP, _PP = None, SimpleNamespace(world_size=1)
    _TP = property(lambda self: _this.coordinator)
    _ATTN_TP = property(lambda self: _this.coordinator)
    experts = 1

    def get_moe_ep_group(self):
        return SimpleNamespace(world_size=self.experts)


def reduce_scatter_tensor(out, x, group):
    assert x.is_contiguous() and out.is_contiguous() and len(x) == len(out) * group.world_size
    terms = group.meet("reduce-scatter", x)
    out.copy_(sum(term.float() for term in terms).chunk(group.world_size)[group.rank_in_group])


def all_gather_into_tensor(out, x, group):
    assert x.is_contiguous() and out.is_contiguous() and len(out) == len(x) * group.world_size
    out.copy_(torch.cat(group.meet("all-gather", x)))


def settle(monkeypatch):
    """The adapter as in a server that asked for it, with the sizes of this test."""
    monkeypatch.setattr(adapter.limits, "takes", lambda patch, hidden: hidden == HIDDEN)
    return among_cards(monkeypatch, adapter, ROWS)


def among_cards(monkeypatch, of, rows):
    """An adapter of passes that no card or group keeps whole, from so many rows on; nothing is counted. The groups."""
    state = State(of.PARALLEL_STATE)
    monkeypatch.setitem(sys.modules, of.PARALLEL_STATE, state)
    monkeypatch.setattr(of, "ROWS", rows)
    monkeypatch.setattr(of, "see_the_same_cards", lambda ranks: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("_seen", "_left"):
        monkeypatch.setattr(of, name, type(of._seen)())
    monkeypatch.setattr(report, "_notes", {})
    return state


def among_threads(monkeypatch):
    """`settle`, with threads for ranks."""
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", reduce_scatter_tensor)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", all_gather_into_tensor)
    return settle(monkeypatch)


# ---- a model


def by_rows(function, *tensors):
    """function of each row by itself, as the operators are: a row's bits hang on nothing else."""
    if not len(tensors[0]):
        return function(*tensors)
    parts = [function(*(x[row : row + 1] for x in tensors)) for row in range(len(tensors[0]))]
    return (
        tuple(torch.cat(part) for part in zip(*parts, strict=True)) if isinstance(parts[0], tuple) else torch.cat(parts)
    )


def fused(x, residual, post, comb, fn, scale, base, *_, norm_weight=None, norm_eps=None):
    """mhc_fused_post_pre: the reference, of each row."""

    def one(f, streams, post, comb):
        found = reference.mhc(f, streams, post, comb, fn, scale, base, iters=3)
        return found.streams.bfloat16(), found.post.float().unsqueeze(-1), found.comb.float(), found.y.bfloat16()

    assert len(x) == len(residual) == len(post) == len(comb), "rows that belong together"
    seen.rows.append(len(residual))
    return by_rows(one, finished(x), residual, post.view(-1, 4), comb)


seen = threading.local()  # rows: of each boundary


def exact(x, salt):
    """A rank's term: whole eighths below 2, of which four add up without rounding."""
    return ((x.float() * (1 + salt)).sin() * 15).round().div(8).bfloat16()


class Layer:
    """DeepseekV4DecoderLayer of 0.5.13 to 0.5.22 as far as rows count here."""

    def __init__(self, number, ranks, rank, is_fused):
        generator = torch.Generator().manual_seed(number)
        self.group, self.salt, self.is_fused = None, rank + 0.1 * number, is_fused
        self.weights = [
            (torch.randn(24, 4 * HIDDEN, generator=generator), torch.ones(3), torch.randn(24, generator=generator))
            for _ in range(2)
        ]

    def sublayer(self, y, number):
        """It looks at every row in front of a row, then asks for the sum over the ranks."""
        assert isinstance(y, torch.Tensor) and y.is_contiguous() and len(y) == seen.whole
        if seen.fails_at == (self.number, number):
            raise Failed
        looked = y.float().cumsum(0)
        return _this.coordinator.all_reduce(exact(looked, self.salt + number))

    def hc_pre(self, x, fn, scale, base, norm=None, forward_batch=None):
        def one(streams):
            y, post, comb = reference.mhc_pre(streams, fn, scale, base, iters=3)
            return y.bfloat16(), post.float(), comb.float()

        seen.rows.append(len(x))
        return (*by_rows(one, x), True)

    def hc_post(self, x, residual, post, comb):
        def one(f, streams, post, comb):
            return reference.bf16(reference.mhc_post(f, streams, post, comb)).bfloat16()

        assert len(x) == len(residual)
        return by_rows(one, finished(x), residual, post.view(-1, 4), comb)

    def forward(self, x, residual=None, post=None, comb=None):
        if residual is not None:
            residual, post, comb, y = self.boundary(x, residual, post, comb, *self.weights[0], *EPSILONS)
        else:
            residual, (y, post, comb, _) = x, self.hc_pre(x, *self.weights[0])
        f = self.sublayer(y, 0)
        if self.is_fused:
            residual, post, comb, y = self.boundary(f, residual, post, comb, *self.weights[1], *EPSILONS)
            return self.sublayer(y, 1), residual, post, comb
        residual = self.hc_post(f, residual, post, comb)
        y, post, comb, _ = self.hc_pre(residual, *self.weights[1])
        return self.hc_post(self.sublayer(y, 1), residual, post, comb), None, None, None


class Embedding:
    """VocabParallelEmbedding: a rank has its part of the vocabulary."""

    def __init__(self, ranks, rank):
        table = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
        self.table = torch.where((torch.arange(TOKENS) % ranks == rank)[:, None], table, torch.zeros_like(table))

    def forward(self, input_):
        return _this.coordinator.all_reduce(self.table[input_])

    def __call__(self, input_):
        return self.forward(input_)


class Model:
    """DeepseekV4Model."""

    hidden_size, pp_group = HIDDEN, SimpleNamespace(world_size=1)

    def __init__(self, ranks, rank, is_fused=True, embedding=Embedding, layer=Layer):
        self.embed_tokens = embedding(ranks, rank)
        self.layers = [layer(number, ranks, rank, is_fused) for number in range(LAYERS)]
        for number, one in enumerate(self.layers):
            one.number = number

    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        seen.whole, seen.rows = len(input_ids), []
        x = self.embed_tokens(input_ids)
        state = (x.unsqueeze(1).repeat(1, 4, 1), None, None, None)
        for layer in self.layers:
            state = layer.forward(*state)
        x = state[0] if state[1] is None else layer.hc_post(*state)
        return x.float().mean(1).bfloat16(), x.flatten(1)


class PatchedLayer(Layer):
    boundary = staticmethod(adapter.replace_fused_post_pre(fused))
    hc_pre = adapter.replace_hc_pre(Layer.hc_pre)
    hc_post = adapter.replace_hc_post(Layer.hc_post)


class PatchedEmbedding(Embedding):
    forward = adapter.replace_embedding_forward(Embedding.forward)


class PatchedModel(Model):
    forward = adapter.replace_model_forward(Model.forward)


Layer.boundary = staticmethod(fused)


def patched(ranks, rank, **options):
    return PatchedModel(ranks, rank, **{"embedding": PatchedEmbedding, "layer": PatchedLayer} | options)


def batch(*, is_prompt=True, captures=False, halves=None):
    mode = SimpleNamespace(is_extend_without_speculative=lambda: is_prompt)
    capture = None if captures is None else SimpleNamespace(need_capture=lambda: captures)
    return SimpleNamespace(forward_mode=mode, capture_hidden_mode=capture, tbo_children=halves)


def tokens(rows):
    return torch.arange(rows) * 11 % TOKENS


def run(model, rows, given=None, fails_at=None, **options):
    seen.fails_at = fails_at
    return model.forward(tokens(rows), None, batch(**options), given)


def both(ranks, rows, **options):
    """Of each rank: (whole, patched, rows of the boundaries, its exchanges)."""

    def body(coordinator):
        rank = coordinator.rank_in_group
        whole = run(Model(ranks, rank), rows, **options)
        coordinator.calls.clear()
        found = run(patched(ranks, rank), rows, **options)
        return whole, found, seen.rows, coordinator.calls

    return Ranks(ranks).each(body)


SUMS = 1 + 2 * LAYERS  # the embedding's and the sublayers'
