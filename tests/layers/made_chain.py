"""An engine that drafts by the MTP block behind its own drafts, as EAGLE does, or with a fault, and the passes that it
records: the prompt and the block over it, then drafts, their verification, and the block over what was verified."""

import made
import torch

STEPS, NEW = 3, 5
PROMPT = made.tokens(24, 41)


class Engine(made.Engine):
    """streams, given: change the streams and the tokens that a pass of the block has, by its mode; guesses: which of
    the best is drafted; begins: how the block's layer begins; right: prompt and answer of an earlier run, of which its
    guesses are."""

    def __init__(self, tensors, streams=None, given=None, guesses=0, begins=None, right=()):
        super().__init__(tensors, noise=0.004)
        self.changed, self.given, self.guesses, self.begins = streams or {}, given or {}, guesses, begins
        self.right, self.passes = right, []

    def begun(self, config, weights, embedded, hidden):
        return made.model.draft_streams(config, weights, embedded, hidden, draft=self.begins)

    def target(self, tokens, start, mode):
        self.passes.append(self.one("target", 1, tokens, start, mode))
        return self.best(self.passes[-1]["out"]), self.streams

    def draft(self, tokens, start, mode, hidden):
        """(what it guesses behind each row, its streams)"""
        hidden = self.changed.get(mode, lambda one: one)(hidden)
        tokens = self.given.get(mode, lambda one: one)(tokens)
        self.passes.append(self.one("draft", 1, tokens, start, mode, hidden))
        logits = self.passes[-1]["out"].double() @ self.tensors["head.weight"].double().T
        guess = logits.argsort(dim=1, descending=True)[:, self.guesses]
        known = self.right[start + 2 : start + 2 + len(guess)]
        return torch.cat([torch.tensor(known, dtype=torch.long), guess[len(known) :]]), self.streams

    def answers(self, new=NEW):
        """(passes, the request with its answer)."""
        best, streams = self.target(PROMPT, 0, "EXTEND")
        answer = [int(best[-1])]
        guess, own = self.draft(torch.cat([PROMPT[1:], best[-1:]]), 0, "EXTEND", streams)
        last = -1
        while len(answer) < new:
            start = len(PROMPT) + len(answer) - 1
            drafts, own = [guess[last : last + 1 or None]], own[last : last + 1 or None]
            for step in range(STEPS - 1):
                guess, own = self.draft(drafts[-1], start + step, "DECODE", own)
                drafts.append(guess)
            verified = torch.cat([torch.tensor(answer[-1:]), *drafts])
            best, streams = self.target(verified, start, "TARGET_VERIFY")
            last = next((i for i in range(STEPS) if drafts[i] != best[i]), STEPS)
            answer += best[: last + 1].tolist()
            tokens = torch.where(torch.arange(STEPS + 1) <= last, best, 0)
            guess, own = self.draft(tokens, start, "DRAFT_EXTEND_V2", streams)
        return self.passes, {"input_ids": PROMPT.tolist(), "output_ids": answer[:new]}
