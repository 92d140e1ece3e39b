"""Where grammars stand when a pass masks by them, on a release's own scheduler: what slots_random_load asks beside its
own cases. Of half of the requests a grammar allows what the model says, and nothing else."""

from types import SimpleNamespace

from tests.patching import slots_model as model
from tests.patching import slots_random_load as load
from tests.patching import slots_server
from tests.patching.slots_server import scheduler_of

CASES = {
    "plain": {"mixed": True},
    "EAGLE, mixed, one at a time": {"drafts": 4, "windows": 20, "mixed": True, "overlap": False},
}
MIXED = {"drafts": 4, "windows": 20, "mixed": True}


class Grammar:
    """SGLang's grammar of one request; start: the tokens of its prompt."""

    def __init__(self, truth, start):
        self.truth, self.start, self.taken, self.finished = truth, start, 0, False

    def accept_token(self, token):
        if token != self.truth.token(self.start + self.taken):
            raise model.Wrong(f"a grammar is given {token} as its token {self.taken}")
        self.taken += 1

    def is_terminated(self):
        return self.taken > 0 and self.truth.token(self.start + self.taken - 1) == model.STOP


class Worker(slots_server.Worker):
    """Masks when SGLang's workers do: where there are drafts, in the pass itself, of a step behind its barrier; else
    when the results of the pass before are known."""

    overlap = True

    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, **given):
        is_extend, reads_on = batch.forward_mode.is_extend(), batch.chunked_req
        masked = [
            (request, end - request.grammar.start)
            for request, end in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
            if batch.has_grammar and request.grammar is not None and not (is_extend and request is reads_on)
        ]
        result = super().forward_batch_generation(batch, on_publish=on_publish, **given)
        if self.drafts and not is_extend:
            if grammar_barrier is not None:
                grammar_barrier()
            masked = [(request, taken + 1) for request, taken in masked]  # its last token has no slot yet
        elif self.overlap and not self.drafts:
            result.delay_sample_func = lambda: self.mask(masked) or result
            return result
        self.mask(masked)
        return result

    def mask(self, masked):
        for request, taken in masked:
            grammar = request.grammar
            if not grammar.finished and not grammar.is_terminated():
                Worker.seen["masked"] += 1
                if grammar.taken != taken:
                    raise model.Wrong(f"{request.rid} is masked as behind {grammar.taken} tokens, not {taken}")


class Load(load.Load):
    def server(self, version):
        made_by = SimpleNamespace(**vars(slots_server.MADE_BY) | {"worker": Worker})
        scheduler, worker, ended = scheduler_of(version, self.case, self.chance, made_by)
        worker.overlap = self.case["overlap"]
        return scheduler, worker, ended

    def arrive(self):
        name = f"request {self.arrived}"
        super().arrive()
        request, length, _ = self.live[name]
        if self.chance.random() < 0.5:
            request.grammar = Grammar(self.worker.truths[name], length)


def alone(version):
    return {
        "cases": {name: load.outcome(version, case, range(1), 60, Load) for name, case in CASES.items()},
        "mixed": load.outcome(version, MIXED, range(1), 60, Load)["wrong"],
    }


def with_ours(version):
    return load.outcome(version, MIXED, range(1), 120, Load)
