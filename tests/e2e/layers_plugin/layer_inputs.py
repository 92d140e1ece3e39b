"""SGLang plugin (entry point group sglang.srt.plugins): what goes into every sublayer of each forward pass, of the
model and of its MTP block, in $E2E_LAYERS/00000.pt .. in the order in which the passes ran:

    kind         target or draft
    tokens, positions [rows]; requests [requests] their slots; lengths [requests] of the rows of each, or None: alike
    y            a list of bf16 [rows, hidden]: the inputs of attention and experts of the layers, in turn
    out          bf16 [rows, hidden], what the vocabulary's weights are multiplied with
    hidden       of a draft: bf16 [rows, 4 * hidden], the streams that it goes on from

A captured pass copies into tensors of its own, in the graph, with a count that tells when it was replayed last; they
are read between SGLang's calls of a model, so a pass that ran twice before the next call would be seen once. They are
made when SGLang runs the pass before it captures it: what a capture allocates lies where the graphs before it have
their scratch, and is overwritten when those are replayed.
"""

import functools
import importlib
import os
import pathlib

TARGET, DRAFT = "sglang.srt.models.deepseek_v4", "sglang.srt.models.deepseek_v4_nextn"
OF_LENGTHS = ("EXTEND", "MIXED")  # modes whose requests have rows of their own number; of others all have as many
HOOKED = (
    (f"{TARGET}.DeepseekV4Model.forward", "of_model", "AROUND"),
    (f"{DRAFT}.DeepseekV4ModelNextN.forward", "of_draft", "AROUND"),
    (f"{TARGET}.MQALayer.forward", "of_attention", "BEFORE"),
    ("sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward", "of_experts", "BEFORE"),
    ("sglang.srt.model_executor.model_runner.ModelRunner.forward", "before_forward", "BEFORE"),
    ("sglang.srt.model_executor.model_runner.ModelRunner.forward", "after_forward", "AFTER"),
)


def inference(function):
    @functools.wraps(function)
    def inside(*args, **kwargs):
        import torch

        with torch.inference_mode():
            return function(*args, **kwargs)

    return inside


def is_capture_mode():
    """Whether SGLang captures graphs, or runs what it is about to capture."""
    return importlib.import_module(TARGET).get_is_capture_mode()


def is_first_rank():
    """Of several cards: all are given the same inputs of sublayers, one writes them."""
    import torch.distributed

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def like(one, found):
    """Whether a pass has room for those tensors."""
    return all(name in one and one[name].shape == value.shape for name, value in found.items())


class Tap:
    def __init__(self, folder):
        self.folder, self.count, self.seen, self.number = pathlib.Path(folder), None, 0, 0
        self.open, self.at = None, 0  # the pass that is under way, and which of its sublayers is next
        self.eager, self.captured = [], []
        self.spare = []  # of passes that are about to be captured

    @inference
    def begin(self, kind, tokens, positions, batch):
        import torch

        if self.count is None:
            self.count = torch.zeros((), dtype=torch.int64, device=positions.device)
        if tokens.shape[0] == 0 or not is_first_rank():
            return
        mode = batch.forward_mode.name
        lengths = batch.extend_seq_lens if mode in OF_LENGTHS else None
        hidden = batch.spec_info.hidden_states if kind == "draft" else None
        found = dict(tokens=tokens, positions=positions, requests=batch.req_pool_indices, lengths=lengths)
        found |= dict(hidden=hidden, stamp=self.count)
        found = {name: value for name, value in found.items() if value is not None}
        self.at = 0
        if not torch.cuda.is_current_stream_capturing():
            warms = is_capture_mode()
            self.count.add_(not warms)
            self.open = {name: value.clone() for name, value in found.items()}
            self.open |= {"kind": kind, "mode": mode, "y": []}
            (self.spare if warms else self.eager).append(self.open)
            if warms:
                self.open["stamp"].zero_()
            return
        self.open = next(one for one in self.spare if (one["kind"], one["mode"]) == (kind, mode) and like(one, found))
        self.spare = [one for one in self.spare if one is not self.open]
        self.captured.append(self.open)
        self.count.add_(1)
        for name, value in found.items():
            self.open[name].copy_(value)

    @inference
    def note(self, y):
        if self.open is not None:
            self.keep(self.open["y"], self.at, y)
            self.at += 1

    @inference
    def end(self, result):
        while isinstance(result, (tuple, list)):
            result = result[0]
        if self.open is not None:
            self.keep(self.open, "out", result)
            self.open = None

    @staticmethod
    def keep(where, name, value):
        """In what is there already, of a captured pass, or in a tensor of its own."""
        if isinstance(where, list) and name == len(where):
            where.append(value.clone())
        elif isinstance(where, dict) and name not in where:
            where[name] = value.clone()
        else:
            where[name].copy_(value)

    @inference
    def write(self):
        """What ran since the last time."""
        import torch

        if self.count is None or is_capture_mode() or not (self.eager or self.captured):
            return
        torch.cuda.synchronize()
        every = self.eager + self.captured
        stamps = torch.stack([one["stamp"] for one in every]).tolist()
        ran = sorted((stamp, i) for i, stamp in enumerate(stamps) if stamp > self.seen and "out" in every[i])
        for stamp, i in ran:
            on_host = {k: v.cpu() if hasattr(v, "cpu") else v for k, v in every[i].items() if k != "y"}
            torch.save(on_host | {"y": [y.cpu() for y in every[i]["y"]]}, self.folder / f"{self.number:05d}.pt")
            self.number, self.seen = self.number + 1, stamp
        self.eager.clear()


def hooks(tap):
    def around(kind):
        def forward(original, self, input_ids, positions, forward_batch, *args, **kwargs):
            tap.begin(kind, input_ids, positions, forward_batch)
            result = original(self, input_ids, positions, forward_batch, *args, **kwargs)
            tap.end(result)
            return result

        return forward

    return {
        "of_model": around("target"),
        "of_draft": around("draft"),
        "of_attention": lambda self, x, *args, **kwargs: tap.note(x),
        "of_experts": lambda self, hidden_states, *args, **kwargs: tap.note(hidden_states),
        "before_forward": lambda *args, **kwargs: tap.write(),
        "after_forward": lambda result, *args, **kwargs: tap.write(),
    }


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if folder := os.environ.get("E2E_LAYERS"):
        found = hooks(Tap(folder))
        for target, name, kind in HOOKED:
            HookRegistry.register(target, found[name], getattr(HookType, kind))
