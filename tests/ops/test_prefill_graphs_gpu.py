"""What SGLang's breakable prefill graphs ask of the operators: rows behind the real ones, whatever the memory holds
there, change no bit of the others; and graphs of one memory pool with launches between them give what plain calls give.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops import mhc as boundaries
from deepseek_v4_sm120.ops.bf16_linear import bf16_linear
from deepseek_v4_sm120.ops.compressor import compressor
from deepseek_v4_sm120.ops.fp8_linear import fp8_linear
from deepseek_v4_sm120.ops.index_select import index_select
from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
from deepseek_v4_sm120.ops.wo_a import wo_a
from deepseek_v4_sm120.specs.bf16_linear import make_weight as make_bf16_weight
from deepseek_v4_sm120.specs.bf16_linear import make_x as make_bf16_x
from deepseek_v4_sm120.specs.compressor import KINDS, Request, make_step
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x
from deepseek_v4_sm120.specs.index_select import Shape as Keys
from deepseek_v4_sm120.specs.index_select import make_inputs as make_keys
from deepseek_v4_sm120.specs.mhc import Shape as Streams
from deepseek_v4_sm120.specs.mhc import make_inputs as make_streams
from deepseek_v4_sm120.specs.mxfp4_moe import Shape as Experts
from deepseek_v4_sm120.specs.mxfp4_moe import make_inputs as make_experts
from deepseek_v4_sm120.specs.sparse_decode import C4, WINDOW, Shape, make_inputs
from deepseek_v4_sm120.specs.wo_a import make_wo_a

pytestmark = pytest.mark.gpu

PASSES = [(5, 8), (200, 256), (700, 1024)]  # rows, and those of the graph that they are padded to
every_pass = pytest.mark.parametrize("real, rows", PASSES, ids=[f"{real} of {rows}" for real, rows in PASSES])
WILD = (-1, 2**31 - 1, -(2**31), 7, 0)  # whole numbers that lie in a pool's memory


def same_bits(one, other) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def padded(tensor, real, wild):
    """A copy whose rows from `real` on are zeros, or what memory may hold."""
    tensor = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        tensor[real:].view(torch.uint8).fill_(0xFF if wild else 0)
        return tensor
    behind = tensor[real:]
    behind.zero_()
    if wild and tensor.is_floating_point():
        behind.view(-1)[0::3] = float("nan")
        behind.view(-1)[1::3] = float("inf")
    elif wild:
        numbers = torch.tensor(WILD, dtype=tensor.dtype, device=tensor.device)
        behind.copy_(numbers.repeat(-(-behind.numel() // len(WILD)))[: behind.numel()].view(behind.shape))
    return tensor


def check(run, real, **by_row):
    """run(**by_row) -> tensors of rows: the real ones' bits, with zeros behind them and with anything."""
    calm, wild = (run(**{name: padded(t, real, is_wild) for name, t in by_row.items()}) for is_wild in (False, True))
    for one, other in zip(calm, wild, strict=True):
        assert same_bits(one[:real], other[:real])
        assert bool(torch.isfinite(one[:real].float()).all())


@every_pass
def test_boundaries(real, rows):
    inputs = make_streams(Streams(rows), seed=1)
    parts = {
        boundaries.mhc: (inputs.boundary(), ("f", "streams", "post", "comb")),
        boundaries.mhc_pre: (inputs.pre(), ("streams",)),
        boundaries.mhc_post: (inputs.post_only(), ("f", "streams", "post", "comb")),
        boundaries.mhc_head: (inputs.head(), ("streams",)),
    }
    for operator, (given, names) in parts.items():

        def run(operator=operator, given=given, **changed):
            found = operator(**(given | changed))
            return found if isinstance(found, tuple) else (found,)

        check(run, real, **{name: given[name] for name in names})


@every_pass
def test_dense_layers(real, rows):
    generator = torch.Generator("cuda").manual_seed(2)
    weight, scale = (tensor[0] for tensor in make_weight(1, 1536, 4096, generator))
    check(lambda x: (fp8_linear(x, weight, scale),), real, x=make_x(rows, 1, 4096, generator)[:, 0].contiguous())
    weight = make_bf16_weight(256, generator)
    check(lambda x: (bf16_linear(x, weight),), real, x=make_bf16_x(rows, generator))


@every_pass
@pytest.mark.parametrize("reproducible", [False, True])
def test_wo_a(real, rows, reproducible):
    x, weight, scale, freqs_cis, positions = make_wo_a(rows, 4, torch.Generator("cuda").manual_seed(3))
    rotates = rows <= 256 or reproducible
    given = {"freqs_cis": freqs_cis, "positions": padded(positions, real, False)} if rotates else {}
    check(lambda x: (wo_a(x, weight, scale, **given, reproducible=reproducible),), real, x=x)


@every_pass
@pytest.mark.parametrize("way", [{}, {"reproducible": True}, {"activations": "mxfp8"}], ids=str)
def test_experts(real, rows, way):
    """Ids of no expert, and rows of numbers that are none at experts that real rows are at."""
    inputs = make_experts(Experts(rows, inter=512, experts=32), seed=4)
    given = inputs.arguments() | way
    names = ("hidden", "topk_ids", "topk_weights")
    check(lambda **changed: (mxfp4_moe(**(given | changed)),), real, **{name: given[name] for name in names})


@every_pass
def test_index(real, rows):
    """Rows behind the real ones have no entries, as SGLang's metadata says; four rows share a page's keys."""
    shape = Keys(rows, lengths=(700, 701, 90, 3000), rows_per_request=rows)
    inputs = make_keys(shape, seed=5)
    given = inputs.arguments() | {"lengths": padded(inputs.lengths, real, False)}
    names = ("q", "weights", "page_table")

    def run(**changed):
        return (index_select(**(given | changed), k=512, rows_per_request=4),)

    check(run, real, **{name: given[name] for name in names})


@pytest.mark.parametrize("kind", KINDS)
def test_compressor(kind):
    """The rows that no line of the plan names: neither state nor cache is other."""
    inputs = make_step(kind, [Request(60, 100), Request(0, 29)], padding=127, seed=6)
    found = []
    for wild in (False, True):
        made = inputs.copy()
        compressor(**(made.arguments() | {"kv_score": padded(inputs.kv_score, 129, wild)}))
        found.append((made.state, made.cache))
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)


# ---- a layer in two graphs, attention between them


HEADS, GROUPS, SIZES = 16, 2, (8, 300)


class Address:
    """A tensor's memory without a share in its life, as SGLang holds what a graph has made for a break."""

    def __init__(self, tensor):
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        self.__cuda_array_interface__ = {
            **{"shape": tuple(tensor.shape), "strides": strides, "typestr": "<i2"},
            **{"data": (tensor.data_ptr(), False), "version": 3},
        }


def weak(tensor):
    return torch.as_tensor(Address(tensor), device="cuda").view(tensor.dtype)


class Layer:
    """Boundary, query, attention, output, boundary, experts, of `rows` padded rows."""

    def __init__(self, rows):
        generator = torch.Generator("cuda").manual_seed(7)
        self.rows, self.streams = rows, make_streams(Streams(rows), seed=8)
        self.query = [tensor[0] for tensor in make_weight(1, HEADS * 512, 4096, generator)]
        _, *self.output, self.freqs_cis, self.positions = make_wo_a(rows, GROUPS, generator)
        self.down = [tensor[0] for tensor in make_weight(1, 4096, GROUPS * 1024, generator)]
        experts = make_experts(Experts(max(SIZES), inter=512, experts=32), seed=9)  # of which all are at some row
        by_row = {name: getattr(experts, name)[:rows].clone() for name in ("hidden", "topk_ids", "topk_weights")}
        self.experts = dataclasses.replace(experts, **by_row)
        self.attention, self.real = None, rows

    def load(self, real, seed):
        """Another pass: `real` rows, anything behind them."""
        streams = make_streams(Streams(self.rows), seed=seed)
        experts = make_experts(Experts(self.rows, inter=512, experts=32), seed=seed)
        for name in ("f", "streams", "post", "comb"):
            getattr(self.streams, name).copy_(padded(getattr(streams, name), real, True))
        for name in ("topk_ids", "topk_weights"):
            getattr(self.experts, name).copy_(padded(getattr(experts, name), real, True))
        self.attention, self.real = make_inputs(Shape(real, HEADS, WINDOW, C4), seed=seed), real

    def first(self):
        streams, post, comb, y = boundaries.mhc(**self.streams.boundary())
        q = fp8_linear(y, *self.query).view(self.rows, 1, HEADS, 512)
        return streams, post, comb, q, torch.empty_like(q)

    def between(self, q, out):
        given = dataclasses.replace(self.attention, q=q[: self.real]).arguments()
        sparse_decode(**given, out=out[: self.real])

    def second(self, streams, post, comb, out):
        x = out.view(self.rows, GROUPS, 4096)
        x = wo_a(x, *self.output, freqs_cis=self.freqs_cis, positions=self.positions, reproducible=True)
        given = self.streams.boundary() | {"f": fp8_linear(x.flatten(1), *self.down)}
        streams, _, _, y = boundaries.mhc(**(given | {"streams": streams, "post": post, "comb": comb}))
        return streams, mxfp4_moe(**(self.experts.arguments() | {"hidden": y}))

    def plainly(self):
        streams, post, comb, q, out = self.first()
        self.between(q, out)
        return self.second(streams, post, comb, out)


class Captured:
    """A layer in two graphs of a pool that others share."""

    def __init__(self, layer, pool, stream):
        self.layer, self.graphs = layer, (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        for _ in range(2):
            layer.plainly()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.graphs[0].capture_begin(pool=pool)
            streams, post, comb, q, out = layer.first()
            self.graphs[0].capture_end()
            layer.between(q, out)
            self.q, self.out = weak(q), weak(out)
            del q
            self.graphs[1].capture_begin(pool=pool)
            found = layer.second(streams, post, comb, out)
            self.graphs[1].capture_end()
        torch.cuda.synchronize()
        self.found = tuple(weak(tensor) for tensor in found)

    def replay(self):
        self.graphs[0].replay()
        self.layer.between(self.q, self.out)
        self.graphs[1].replay()
        return self.found


def test_a_layer_in_two_graphs(device):
    """Passes of two sizes in turn, each with other rows and another number of them, through one pool."""
    layers, pool, stream = [Layer(rows) for rows in SIZES], torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    for layer in layers:
        layer.load(layer.rows, seed=10)
    small, large = (Captured(layer, pool, stream) for layer in layers)
    passes = ((large, 300), (small, 5), (large, 151), (large, 299), (small, 8), (small, 1), (large, 300))
    for seed, (captured, real) in enumerate(passes, 11):
        captured.layer.load(real, seed)
        expected = captured.layer.plainly()
        found = captured.replay()
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one[:real], other[:real]), (seed, real)
            assert bool(torch.isfinite(one[:real].float()).all()), (seed, real)
