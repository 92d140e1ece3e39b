"""min_p where DSPARK verifies drafts: each release's own acceptance on the CPU, over stand-ins for its kernels, with
ours in it and without."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import min_p_dspark as adapter
from deepseek_v4_sm120.sglang_patches.rows.dspark import ACCEPT, ARE_NOOP, CHAIN, KERNELS, KERNELS_0_5_16
from tests.patching.test_wheel_dspark_penalties import taken
from tests.patching.wheels import every_release, since

FIRST, VOCABULARY, WIDTH = "0.5.16", 12, 3
UTILS = "sglang.srt.speculative.dflash_utils"
MIN_PS, TEMPERATURES = torch.tensor([0.3, 0.0, 0.05]), torch.tensor([[1.0], [0.7], [1.5]])
GREEDY, ALL = 1, 1 << 30
LOGITS = torch.linspace(0.0, 5.0, VOCABULARY).repeat(3 * WIDTH, 1)
OF_A_BLOCK = ("_blockwise_rejection_applies", "_draft_probs", "_note_blockwise_rejection")

pytestmark = pytest.mark.usefixtures("opened")


def softmax(*, logits, temperatures, rows_per_request):
    return torch.softmax(logits / temperatures.repeat_interleave(rows_per_request, 0), -1)


def keeps_first(probs, kept):
    """Renormalised over what `kept(sorted, their sums)` says of each row, the likeliest first."""
    ordered, places = probs.sort(-1, descending=True)
    there = kept(ordered, ordered.cumsum(-1))
    probs = torch.zeros_like(probs).scatter_(-1, places, torch.where(there, ordered, 0.0))
    return probs / probs.sum(-1, keepdim=True)


def top_p_of(probs, top_ps):
    return keeps_first(probs, lambda ordered, sums: sums - ordered < top_ps[:, None])


def top_k_of(probs, top_ks):
    return keeps_first(probs, lambda ordered, sums: torch.arange(VOCABULARY) < top_ks[:, None])


RENORMALISED = {"p": top_p_of, "k": top_k_of}


def info(top_ks=(ALL,) * 3, top_ps=(1.0,) * 3, **further):
    values = dict(temperatures=TEMPERATURES, min_ps=MIN_PS, top_ks=torch.tensor(top_ks), top_ps=torch.tensor(top_ps))
    values |= dict(need_top_k_sampling=set(top_ks) != {ALL}, need_top_p_sampling=set(top_ps) != {1.0})
    greedy = [one == GREEDY for one in top_ks]
    values |= dict(need_min_p_sampling=True, has_custom_logit_processor=False)
    values |= dict(is_all_greedy=all(greedy), is_any_greedy=any(greedy))
    return SimpleNamespace(**values | further)


class Acceptance:
    """A release's own, with what its kernels are given."""

    def __init__(self, version, *, ours):
        self.version, self.probs, self.others = version, [], []
        chain = adapter.replace_verify(self.chain) if ours else self.chain
        target_probs = "build_speculative" if since(version, "0.5.22") else "build_dflash"
        target_probs += "_verify_target_probs"
        renormalised = {f"{of}top_{kind}_renorm_prob": f for of in ("", "_dflash_") for kind, f in RENORMALISED.items()}
        renormalised["F"] = torch.nn.functional
        names = {target_probs: taken(version, f"{UTILS}:{target_probs}", **renormalised), CHAIN: chain}
        names |= {"SoftmaxTemp": SimpleNamespace(execute=softmax), "_get_or_create_chain_verify_buffers": self.buffers}
        where = KERNELS if since(version, "0.5.17") else KERNELS_0_5_16
        names["_accept_sampling_core"] = taken(version, f"{where}:_accept_sampling_core", **names)
        names["AcceptSampling"] = SimpleNamespace(execute=taken(version, f"{where}:accept_sampling", **names))
        names["AcceptGreedy"] = SimpleNamespace(execute=self.greedy)
        names["BlockwiseRejection"] = SimpleNamespace(execute=self.block)
        module = ACCEPT.partition(":")[0]
        helpers = {name: taken(version, f"{module}:{name}", **names) for name in OF_A_BLOCK}
        names |= {name: helper for name, helper in helpers.items() if helper is not None}
        self.accept = taken(version, ACCEPT, **names)
        self.is_noop = taken(version, ARE_NOOP)
        if ours:
            self.accept, self.is_noop = adapter.replace_accept(self.accept), adapter.replace_are_noop(self.is_noop)

    def chain(self, *, target_probs, accept_token_num, **_):
        self.probs.append(target_probs.clone())
        accept_token_num.zero_()

    def greedy(self, **_):
        self.others.append("greedy")
        return 0, 0, 0

    def block(self, **_):
        self.others.append("block")
        return 0, 0, 0

    @staticmethod
    def buffers(*, bs, draft_token_num, device):
        index = torch.arange(bs * draft_token_num).view(bs, draft_token_num)
        return index, index, index, torch.zeros(bs * draft_token_num, dtype=torch.int32), index, torch.zeros(bs).int()

    def __call__(self, sampling_info):
        draft = SimpleNamespace(
            corrected_logits=LOGITS.view(3, WIDTH, -1)[:, 1:], temperatures=TEMPERATURES, greedy_mask=None
        )
        draft.greedy_draft, draft.draft_tokens = False, torch.zeros(3, WIDTH - 1, dtype=torch.int64)
        top_ks = [] if sampling_info is None else sampling_info.top_ks.tolist()
        asked = {"rejection_noise": object()} if since(self.version, "0.5.23") else {}
        self.accept(
            candidates=torch.zeros(3, WIDTH, dtype=torch.int64),
            target_logits=LOGITS.clone(),
            draft_block=draft,
            sampling_info=sampling_info,
            draft_input=SimpleNamespace(max_top_k=max(top_ks, default=1), uniform_top_k_value=None),
            gamma=WIDTH - 1,
            verify_num_draft_tokens=WIDTH,
            **asked,
        )
        return self.probs[-1] if self.probs else None


ASKED = {"": {}, "top_k": {"top_ks": (5, ALL, 4)}, "few": {"top_ks": (5, 3, 4)}, "top_p": {"top_ps": (0.9, 0.8, 1.0)}}


def alone(asked):
    """What is drawn from without min_p."""
    given = info(**asked)
    probs = softmax(logits=LOGITS, temperatures=TEMPERATURES, rows_per_request=WIDTH)
    probs = top_k_of(probs, given.top_ks.repeat_interleave(WIDTH))
    return top_p_of(probs, given.top_ps.repeat_interleave(WIDTH)).view(3, WIDTH, -1)


@every_release(FIRST)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_min_p_forbids_is_not_drawn(version, asked):
    accept, stock = Acceptance(version, ours=True), alone(asked)
    allowed = torch.where(stock >= MIN_PS[:, None, None] * stock.amax(-1, keepdim=True), stock, 0.0)
    torch.testing.assert_close(accept(info(**asked)), allowed / allowed.sum(-1, keepdim=True))
    assert not accept.others and bool((allowed != stock).any())
    assert not accept.is_noop(info(**asked))


@every_release(FIRST)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_sglang_draws_it(version, asked):
    accept = Acceptance(version, ours=False)
    probs = accept(info(**asked))
    if since(version, "0.5.23") and not asked:
        assert accept.others == ["block"]
    else:
        torch.testing.assert_close(probs, alone(asked))
    assert accept.is_noop(info(**asked))


@every_release(FIRST)
def test_batches_that_ask_for_none_are_verified_as_without_us(version):
    for asked in (info(need_min_p_sampling=False), info(top_ks=(GREEDY,) * 3), None):
        accept, theirs = Acceptance(version, ours=True), Acceptance(version, ours=False)
        found = accept(asked), theirs(asked)
        assert accept.others == theirs.others and (found[0] is None) == (found[1] is None)
        assert found[0] is None or torch.equal(*found)
        assert accept.is_noop(asked)


def test_the_next_batch_knows_nothing_of_this_one():
    def breaks(*, target_probs, **_):
        raise OSError("no kernel")

    kernel, probs = adapter.replace_verify(breaks), torch.eye(VOCABULARY).repeat(3, 1, 1) + 0.1
    accept = adapter.replace_accept(lambda **_: kernel(target_probs=probs.clone()))
    before = probs.clone()
    for call in (lambda: accept(**OF_A_BATCH, sampling_info=info()), lambda: kernel(target_probs=probs)):
        with pytest.raises(OSError, match="no kernel"):
            call()
    assert torch.equal(probs, before)


OF_A_BATCH = dict.fromkeys(("candidates", "target_logits", "draft_block"))


def test_what_a_graph_is_captured_with_has_no_min_p():
    captured = info()
    del captured.need_min_p_sampling
    asked = Acceptance("0.5.23", ours=True)
    asked(captured)
    assert asked.others == ["block"]


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    accept = Acceptance("0.5.23", ours=True)
    torch.testing.assert_close(accept(info(**ASKED["top_k"])), alone(ASKED["top_k"]))
    accept(info())
    assert accept.others == ["block"] and accept.is_noop(info())


def test_what_sglang_has_adjusted_is_no_less_adjusted():
    assert adapter.replace_are_noop(lambda info: False)(None) is False
