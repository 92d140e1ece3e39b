"""Groups of 128 of several requests in one step: SGLang's own planner and kernels, out of the wheel and compiled for a
CPU, beside DeepSeek's definition. Prompts in chunks that end anywhere, beside each other, then tokens one at a time;
tokens with channels and scores as large as a trained model's. What a step did not write is NaN. All releases from
0.5.15 on, whose requests have a ring each, were run with this; the suite has the last one."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.reference.accuracy import relative_error
from tests.patching.kernels_on_cpu import arguments_of, call, compiled, text_of
from tests.patching.wheels import every_release, fetch

DIM, RATIO, PAGE, REQUESTS, FLOAT32 = 512, 128, 256, 4, 1e-6
STEPS = ({1: 127, 3: 300, 2: 1}, {1: 1, 3: 84, 2: 126}, {2: 1, 1: 129, 3: 121}, {1: 119, 2: 391})
DECODED = 9
CALLS = """
CALL(plan_of_many, {
  std::vector<char> scratch(24 * n[1] + 16);
  const auto made = @plan_compress_prefill(
      view(t[0], {n[0]}), view(t[1], {@requests, 1024}), view(t[2], {1}), view(t[3], {n[0]}).on_host(),
      view(t[4], {n[0]}).on_host(), view(scratch.data(), {24 * n[1]}).on_host(), n[1], 128, 256, 128, @ring false);
  static_cast<int64_t*>(t[7])[0] = made.first.shape[0];
  static_cast<int64_t*>(t[7])[1] = made.second.shape[0];
  std::memcpy(t[5], made.first.data, 16 * made.first.shape[0]);
  std::memcpy(t[6], made.second.data, 8 * made.second.shape[0]);
})
CALL(plan_of_step, {
  const auto made = @plan_compress_decode(
      view(t[0], {n[0]}), view(t[1], {@requests, 1024}), view(t[2], {1}), view(t[3], {n[0]}), 128, 256, 128 @of_ring);
  std::memcpy(t[4], made.data, 16 * n[0]);
})
"""
POOL = """
CALL(prefill, FlashCompress128Kernel<@kernel>::run_prefill(
    view(t[0], {@requests, 128, 1024}), view(t[1], {n[0], 1024}), view(t[2], {n[1], 512}), view(t[3], {128, 512}),
    view(t[4], {n[1], 16}), view(t[5], {n[2], 8})))
CALL(decode, FlashCompress128Kernel<@kernel>::run_decode(
    view(t[0], {@requests, 128, 1024}), view(t[1], {n[0], 1024}), view(t[2], {n[0], 512}), view(t[3], {128, 512}),
    view(t[4], {n[0], 16})))
"""


@functools.cache
def kernels(version: str, old="", new=""):
    wheel = fetch(version)
    lines = text_of(wheel, "sgl_kernel/deepseek_v4/compress_v2.cuh")
    planner, pool = (text_of(wheel, f"csrc/deepseek_v4/{name}.cuh").replace(old, new) for name in ("c_plan", "c128_v2"))
    floats = dict.fromkeys(("BufferFloat", "InputFloat", "OutFloat"), "float")
    of_pool = arguments_of(pool, "FlashCompress128Kernel", floats | {"kHeadDim": str(DIM), "kUsePDL": "false"})
    place = "host::compress::plan" if "namespace sglang {" not in lines else "sglang::host::compress::plan"
    asked = "use_req_ring" in planner
    calls = CALLS.replace("@plan", place).replace("@ring", "false," if asked else "")
    calls = calls.replace("@of_ring", ", false" if asked else "").replace("@requests", str(REQUESTS))
    pool_calls = POOL.replace("@kernel", of_pool).replace("@requests", str(REQUESTS))
    return compiled((f"{lines}\n{planner}", calls), (f"{lines}\n{pool}", pool_calls))


class Server:
    def __init__(self, library):
        made = torch.Generator().manual_seed(0)
        self.library, self.ape = library, torch.randn(RATIO, DIM, generator=made)
        self.state = torch.full((REQUESTS, RATIO, 2 * DIM), float("nan"))
        self.tables = torch.zeros(REQUESTS, 1024, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        self.tokens = torch.randn(REQUESTS, 800, 2 * DIM, generator=made)
        self.tokens[..., DIM:] *= 6
        self.tokens[3, 40:60, :DIM] *= 1e4
        self.tokens[2, 200:300, DIM:] -= 200
        self.lengths, self.entries = dict.fromkeys(range(REQUESTS), 0), {}

    def prefill(self, step: dict[int, int]) -> None:
        rows = torch.cat([self.tokens[r, self.lengths[r] : self.lengths[r] + n] for r, n in step.items()])
        whose = [(r, self.lengths[r] + i) for r, n in step.items() for i in range(n)]
        for request, count in step.items():
            self.lengths[request] += count
        lengths = torch.tensor([self.lengths[request] for request in step])
        plan, writes = torch.zeros(len(rows), 4, dtype=torch.int32), torch.zeros(len(rows), 2, dtype=torch.int32)
        counts, sizes = torch.zeros(2, dtype=torch.int64), [len(step), len(rows)]
        given = [torch.tensor(list(step)), *self.tables, lengths, torch.tensor(list(step.values()))]
        call(self.library, "plan_of_many", sizes, [*given, plan, writes, counts])
        plan, writes = plan[: counts[0]], writes[: counts[1]]
        pooled = torch.full((len(plan), DIM), float("nan"))
        sizes = [len(rows), len(plan), len(writes)]
        call(self.library, "prefill", sizes, [self.state, rows, pooled, self.ape, plan, writes])
        for (length, place, *_), entry in zip(plan.tolist(), pooled, strict=True):
            request, position = whose[place & 0xFFFF]
            assert position + 1 == length and (request, length) not in self.entries
            self.entries[request, length] = entry

    def decode(self, requests: list[int]) -> None:
        rows = torch.stack([self.tokens[request, self.lengths[request]] for request in requests])
        for request in requests:
            self.lengths[request] += 1
        lengths = torch.tensor([self.lengths[request] for request in requests])
        plan = torch.zeros(len(requests), 4, dtype=torch.int32)
        call(self.library, "plan_of_step", [len(rows)], [torch.tensor(requests), *self.tables, lengths, plan])
        pooled = torch.full((len(rows), DIM), float("nan"))
        call(self.library, "decode", [len(rows)], [self.state, rows, pooled, self.ape, plan])
        for request, length, entry in zip(requests, lengths.tolist(), pooled, strict=True):
            assert entry.isnan().all() == bool(length % RATIO)
            if length % RATIO == 0:
                self.entries[request, length] = entry


def demand_the_definition(library) -> None:
    server = Server(library)
    for step in STEPS:
        server.prefill(step)
    for _ in range(DECODED):
        server.decode([3, 1])
    ended = {(r, n) for r, length in server.lengths.items() for n in range(RATIO, length + 1, RATIO)}
    assert set(server.entries) == ended and len(ended) > 8
    for (request, length), entry in server.entries.items():
        kv, score = server.tokens[request, length - RATIO : length].double().chunk(2, dim=1)
        expected = (torch.softmax(score + server.ape, dim=0) * kv).sum(dim=0)
        assert relative_error(entry, expected) < FLOAT32, (request, length)


@every_release("0.5.23")
def test_each_group_is_deepseeks(version):
    demand_the_definition(kernels(version))


FAULTS = {"a chunk's border is a token off": ("std::min(j + 1, window_size)", "std::min(j + 2, window_size)")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault):
    with pytest.raises(AssertionError):
        demand_the_definition(kernels("0.5.23", *FAULTS[fault]))
