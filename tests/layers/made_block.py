"""The checkpoint of made.py with DSPARK's drafts of two stages, and an engine that drafts with it, or with a fault."""

import json

import made
import torch

from deepseek_v4_sm120.commands.layers.checkpoint import Checkpoint
from deepseek_v4_sm120.reference import draft_block, model
from deepseek_v4_sm120.reference.draft_block import BlockRules
from deepseek_v4_sm120.reference.model import Rules

LAYERS, DRAFTS, RANK, MASK = [0, 2], 3, 16, 2
CONFIG = made.CONFIG | {
    "dspark_target_layer_ids": LAYERS,
    "dspark_block_size": DRAFTS,
    "dspark_noise_token_id": MASK,
    "compress_ratios": [0, 4, 128, 0, 0],
}
PROMPT = made.tokens(70, 31)
NEW = 6


def write(folder):
    made.layers_weights.write(folder, made.CONFIG, "cpu")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    writer = made.layers_weights.Writer(folder, CONFIG, "cpu")
    writer.generator.manual_seed(12)
    writer.layer("mtp.1", 0, hashed=False)
    writer.ends("mtp.1.")
    writer.fp8("mtp.0.main_proj", made.HIDDEN, len(LAYERS) * made.HIDDEN)
    writer.norm("mtp.0.main_norm", made.HIDDEN)
    writer.normal("mtp.1.markov_head.markov_w1.weight", CONFIG["vocab_size"], RANK, std=1.0)
    writer.normal("mtp.1.markov_head.markov_w2.weight", CONFIG["vocab_size"], RANK, std=2.0)
    writer.flush("model-block.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= writer.index
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Checkpoint(folder)


class Engine(made.Engine):
    def __init__(self, tensors, rules=None, block=None, markov="before", context=None):
        """context: changes what the draft is given of the target's (positions, hidden)."""
        super().__init__(tensors, noise=0.004)
        self.of_block, self.block_rules, self.markov = rules or Rules(), block or BlockRules(), markov
        self.known, self.changed = torch.empty(0, len(LAYERS) * made.HIDDEN, dtype=torch.bfloat16), context

    def block(self, anchor, start):
        """(the pass, the tokens that are drafted)."""
        weights, config = self.judge.weights, self.config
        tokens = torch.tensor([anchor, *[MASK] * (DRAFTS - 1)])
        streams, y = self.tensors["embed.weight"][tokens].double()[:, None].expand(-1, 4, -1), []
        hidden = self.known[:start][-(self.of_block.window + 1) :]
        hidden = hidden if self.changed is None else self.changed(hidden)
        first = weights.under("mtp.0.")
        for stage in range(2):
            layer = weights.under(f"mtp.{stage}.")
            for part in ("attn", "ffn"):
                x, post, comb = model.mixing(config, layer, part, f"{part}_norm", streams)
                y.append(x.bfloat16())
                if part == "attn":
                    options = {"rules": self.of_block, "block": self.block_rules}
                    f = draft_block.attention(config, layer.under("attn."), first, x, hidden, start, **options)
                else:
                    f = model.experts(config, layer.under("ffn."), x, tokens, hashed=False, rules=self.of_block)
                streams = model.behind(self.rounded(f), streams, post, comb, self.of_block)
        out = streams.bfloat16().flatten(1)
        last = weights.under("mtp.1.")
        given = draft_block.logits(
            self.tensors["head.weight"], draft_block.behind_head(config, last, out.view(-1, 4, made.HIDDEN))
        )
        drafted = [anchor]
        for i in range(DRAFTS):
            front = {"before": drafted[-1], "first": anchor}.get(self.markov)
            added = 0 if front is None else draft_block.markov(self.tensors, torch.tensor([front]))[0]
            drafted.append(int((given[i] + added).argmax()))
        found = {"kind": "block", "mode": "TARGET_VERIFY", "tokens": tokens, "y": y, "out": out}
        positions = torch.arange(start, start + DRAFTS)
        return found | {"positions": positions, "requests": torch.tensor([1])}, drafted[1:]

    def target(self, tokens, start, mode):
        found = self.one("target", 1, tokens, start, mode, rules=Rules())
        self.known = torch.cat([self.known[:start], found["context"]])
        return found

    def answers(self, prompt=PROMPT, new=NEW):
        """(passes, the request with its answer)."""
        every = [self.target(prompt, 0, "EXTEND")]
        answer = [int(self.best(every[0]["out"])[-1])]
        while len(answer) < new:
            start = len(prompt) + len(answer) - 1
            block, drafted = self.block(answer[-1], start)
            verified = self.target(torch.tensor([answer[-1], *drafted]), start, "TARGET_VERIFY")
            best = self.best(verified["out"]).tolist()
            right = next((i for i, one in enumerate(drafted) if one != best[i]), DRAFTS)
            answer += best[: right + 1]
            every += [block, verified]
        return every, {"input_ids": prompt.tolist(), "output_ids": answer[:new]}
