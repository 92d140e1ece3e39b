"""A checkpoint of three small layers and the MTP block, an engine that computes it in float64, or with a fault, and
rounds as engines do, and its passes as a server records them."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "e2e")]
import layers_weights  # noqa: E402

from deepseek_v4_sm120.commands.layers import judge as judging  # noqa: E402
from deepseek_v4_sm120.commands.layers.checkpoint import Checkpoint  # noqa: E402
from deepseek_v4_sm120.commands.layers.record import Sent  # noqa: E402
from deepseek_v4_sm120.reference import model  # noqa: E402
from deepseek_v4_sm120.reference.model import Rules  # noqa: E402

HIDDEN = 128
CONFIG = {
    **{
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "hc_mult": 4,
        "vocab_size": 64,
        "compress_ratios": [0, 4, 128, 0],
    },
    **{"num_attention_heads": 2, "head_dim": 512, "o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 128},
    **{"index_n_heads": 2, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128, "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0},
    **{"rms_norm_eps": 1e-6, "hc_sinkhorn_iters": 20, "rope_theta": 10000, "compress_rope_theta": 160000},
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536},
}
PROMPT = 150


def write(folder: Path) -> Checkpoint:
    """And the answers of an engine that computes it to BATCH, whose tokens are the greatest."""
    layers_weights.write(folder, CONFIG, "cpu")
    checkpoint = Checkpoint(folder)
    BATCH[:] = [(prompt, Engine(checkpoint).answered(0, prompt, 3)[1]) for prompt, _ in BATCH]
    return checkpoint


class Engine:
    def __init__(self, tensors, rules=None, noise=0.02):
        self.judge, self.tensors = judging.Judge(getattr(tensors, "config", CONFIG), tensors), tensors
        self.config, self.rules, self.noise = self.judge.config, rules or Rules(), noise
        self.inputs, self.streams = {}, None  # streams: behind the last pass
        self.generator = torch.Generator().manual_seed(3)

    def rounded(self, f):
        error = torch.randn(f.shape, generator=self.generator, dtype=torch.float64)
        return f + self.noise * f.norm() / f.numel() ** 0.5 * error

    def begun(self, *given):
        return model.draft_streams(*given)

    def one(self, kind, request, tokens, position, mode, hidden=None, rules=None):
        rules = rules or self.rules
        judge, y, context = self.judge, [], []
        embedded = judge.weights.raw("embed.weight")[tokens]
        streams = embedded.double()[:, None].expand(-1, 4, -1)
        if kind == "draft":
            mtp = judge.weights.under("mtp.0.")
            streams = self.begun(self.config, mtp, embedded, hidden.view(len(tokens), 4, -1))
        for number, (weights, ratio, hashed) in enumerate(judge.sublayers(kind)):
            for part in ("attn", "ffn"):
                self.at = number, part
                x, post, comb = model.mixing(self.config, weights, part, f"{part}_norm", streams)
                y.append(x.bfloat16())
                if part == "attn":
                    before = self.inputs.get((kind, request, number), x[:0])[:position]
                    every = self.inputs[kind, request, number] = torch.cat([before, x])
                    f = model.attention(self.config, weights.under("attn."), every, ratio, first=position, rules=rules)
                else:
                    f = model.experts(self.config, weights.under("ffn."), x, tokens, hashed=hashed, rules=rules)
                streams = model.behind(self.rounded(f), streams, post, comb, rules)
            if judge.draft is not None and number in judge.draft.layers:
                context.append(streams.mean(dim=1))
        self.streams = streams.bfloat16().flatten(1)
        of_head = judge.weights.under("mtp.0.") if kind == "draft" else judge.weights
        out = model.head(self.config, of_head, streams).bfloat16()
        positions = torch.arange(position, position + len(tokens))
        found = {"kind": kind, "mode": mode, "tokens": tokens, "positions": positions, "y": y, "out": out}
        found["requests"] = torch.tensor([request])
        if context and kind == "target":
            found["context"] = torch.cat(context, dim=1).bfloat16()
        if mode == "EXTEND":
            found["lengths"] = torch.tensor([len(tokens)])
        return found | ({"hidden": hidden} if kind == "draft" else {})

    def best(self, out):
        """The greatest tokens of rows."""
        return (out.double() @ self.tensors["head.weight"].double().T).argmax(dim=1)

    def answered(self, request, prompt, count):
        """(passes, tokens) of a prompt whose answer's are the greatest."""
        passes, found = [self.one("target", request, prompt, 0, "EXTEND")], []
        for i in range(count):
            found.append(self.best(passes[-1]["out"])[-1:])
            if i + 1 < count:
                passes.append(self.one("target", request, found[-1], len(prompt) + i, "DECODE"))
        return passes, torch.cat(found)

    def shares(self, request, other):
        """What a prefix cache has of a request, for another one."""
        for (kind, one, number), history in list(self.inputs.items()):
            if one == request:
                self.inputs[kind, other, number] = history


def tokens(count, seed=0):
    return torch.randint(0, CONFIG["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def filled(record):
    """As a captured pass for two requests has it where one is there."""
    more = {k: torch.cat([record[k], record[k][:1] * 0]) for k in ("tokens", "positions", "requests", "out")}
    return record | more | {"y": [torch.cat([y, torch.full_like(y[:1], torch.nan)]) for y in record["y"]]}


# prompt, and the answer: the second is another request in the first one's place, the third shares a prefix with it
ASKED = [
    (tokens(PROMPT), tokens(2, 1)),
    (tokens(7, 9), tokens(2, 11)),
    (torch.cat([tokens(PROMPT)[:128], tokens(9, 2)]), tokens(2, 12)),
]


def requests(asked=ASKED):
    return [{"input_ids": a.tolist(), "output_ids": b.tolist()} for a, b in asked]


def passes(checkpoint, rules=None) -> list:
    """A prompt in two chunks, tokens behind it, another prompt in its place, and one that shares a prefix."""
    engine = Engine(checkpoint, rules)
    prompt, answer = ASKED[0]
    found = [engine.one("target", 1, prompt[:100], 0, "EXTEND"), engine.one("target", 1, prompt[100:], 100, "EXTEND")]
    found.append(filled(engine.one("target", 1, answer[:1], PROMPT, "DECODE")))
    engine.shares(1, 2)
    for slot, start, (prompt, answer) in ((1, 0, ASKED[1]), (2, 128, ASKED[2])):
        found.append(engine.one("target", slot, prompt[start:], start, "EXTEND"))
        found.append(filled(engine.one("target", slot, answer[:1], len(prompt), "DECODE")))
    return found


def together(one, other):
    """A pass of both's rows."""
    names = ("tokens", "positions", "requests", "out", *(("lengths",) if "lengths" in one else ()))
    y = [torch.cat(both) for both in zip(one["y"], other["y"], strict=True)]
    return one | {name: torch.cat([one[name], other[name]]) for name in names} | {"y": y}


# two prompts in a batch, and two tokens of each behind them
BATCH = [(tokens(30, 21), tokens(3, 22)), (tokens(7, 26), tokens(3, 24))]


def batch(checkpoint, rules=None) -> list:
    engine, answers = Engine(checkpoint, rules), [answer for _, answer in BATCH]
    each = [[engine.one("target", slot, prompt, 0, "EXTEND")] for slot, (prompt, _) in enumerate(BATCH, 1)]
    for slot, (prompt, _) in enumerate(BATCH, 1):
        for i in range(2):
            token = answers[slot - 1][i : i + 1]
            each[slot - 1].append(engine.one("target", slot, token, len(prompt) + i, "DECODE"))
    return [together(*both) for both in zip(*each, strict=True)]


def judged(checkpoint, every, asked=None, **options):
    """(groups, what is missing)."""
    sent, judge = Sent.of(requests() if asked is None else asked), judging.Judge(CONFIG, checkpoint, **options)
    for one in every:
        judge.take(one, sent.segments(one))
    return judge.finish(), sent.missing()
