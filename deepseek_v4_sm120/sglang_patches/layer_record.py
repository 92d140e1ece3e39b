"""What goes into every sublayer of the model and of its MTP block, kept in files while `layers` asks for it.

DSV4_SM120_LAYERS names a folder; without it nothing of this is in place. In that folder lies ASKED while something is
to be recorded: {"id": a name of the record, "rows": of a pass at most, "bytes": of the record at most}. Then
<folder>/<id>/00000.pt .. are the passes, in the order in which they ran, of the first rank alone (all have the same):

    kind         target, draft (of the MTP block) or block (of DSPARK's draft)
    mode         SGLang's ForwardMode
    tokens, positions [rows]; requests [requests] their slots; lengths [requests] of the rows of each, or None: alike
    y            a list of bf16 [rows, hidden]: the inputs of attention and experts of the layers, in turn
    out          bf16 [rows, hidden], what the vocabulary's weights are multiplied with; of a block [rows, 4 * hidden],
                 the streams behind its last stage
    context      of a target's, where DSPARK drafts: bf16 [rows, layers * hidden], what its draft is given of them
    hidden       of a draft: bf16 [rows, 4 * hidden], the streams that it goes on from

and FACTS says what the server is, and what was left out, why and how often.

How it works. A pass that SGLang launches itself is copied to the host as it runs. A captured one copies into tensors of
its own, in the graph, at every replay, with a count that tells when that was last: some launches of each sublayer, for
as long as the server runs. They are read between SGLang's calls of a model, so a pass that ran twice before the next
call would be seen once. They are made when SGLang runs the pass before it captures it: what a capture allocates lies
where the graphs before it have their scratch, and is overwritten when those are replayed. Graphs of more than
GRAPH_ROWS rows, and those of prompts, copy nothing; GRAPH_BYTES is what all copies of a process may take of the card.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepseek_v4_sm120.patching import json_file, report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.names import MODEL, PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.rows.layers import ASKED, FACTS

OF_LENGTHS = ("EXTEND", "MIXED")  # modes whose requests have rows of their own number; of others all have as many
GRAPH_ROWS = 32
GRAPH_BYTES = 512 << 20
ARGUMENTS = (  # of SGLang's that FACTS has
    *("model_path", "tp_size", "dp_size", "pp_size", "speculative_algorithm", "speculative_num_steps"),
    *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_token_map"),
    *("speculative_use_rejection_sampling", "enable_deepseek_v4_fp4_indexer"),
)


def inference(function):
    @functools.wraps(function)
    def inside(*args, **kwargs):
        with torch.inference_mode():
            return function(*args, **kwargs)

    return inside


def is_capture_mode() -> bool:
    """Whether SGLang captures graphs, or runs what it is about to capture."""
    return importlib.import_module(MODEL).get_is_capture_mode()


def is_like(one: dict, found: dict) -> bool:
    """Whether a pass has room for those tensors."""
    return all(name in one and one[name].shape == value.shape for name, value in found.items())


def size_of(value) -> int:
    return sum(map(size_of, value)) if isinstance(value, list) else getattr(value, "nbytes", 0)


class Recorder:
    """serves: whether a device's passes are recorded at all."""

    def __init__(self, folder: str | Path, serves: Callable = device_gate.serves):
        self.folder, self.serves = Path(folder), serves
        self.count, self.seen = None, 0  # on the device, of all passes; the newest that was written
        self.open, self.at = None, 0  # the pass that is under way, and which of its sublayers is next
        self.eager, self.captured = [], []
        self.spare = []  # of passes that are about to be captured
        self.graph_bytes = 0
        self.asked: dict | None = None
        self.number = self.bytes = 0  # of the files that were written for it
        self.left_out: collections.Counter = collections.Counter()
        self.facts: dict = {}
        self.is_mine = False  # what is asked for: of several servers with one folder, the first that looks has it

    # ---- a pass

    @inference
    def begin(self, kind: str, tokens, positions, batch) -> None:
        self.open, self.at = None, 0
        mode, rows = batch.forward_mode.name, int(tokens.shape[0])
        if rows == 0 or not self.serves(positions.device) or not is_first_rank():
            return
        captures = torch.cuda.is_current_stream_capturing()
        warms = not captures and is_capture_mode()
        why = self.why_not(mode, rows, captures or warms)
        if why is not None:
            self.leave_out(why)
            return
        if self.count is None:
            self.count = torch.zeros((), dtype=torch.int64, device=positions.device)
        found = tensors_of(kind, mode, tokens, positions, batch) | {"stamp": self.count}
        if not captures:
            self.open_eager(kind, mode, found, warms)
            return
        like = [one for one in self.spare if (one["kind"], one["mode"]) == (kind, mode) and is_like(one, found)]
        if not like:
            self.leave_out("graphs that were not run before they were captured")
            return
        self.open = like[0]
        self.spare = [one for one in self.spare if one is not self.open]
        self.captured.append(self.open)
        self.count.add_(1)
        for name, value in found.items():
            self.open[name].copy_(value)

    def open_eager(self, kind, mode, found, warms) -> None:
        self.count.add_(not warms)
        self.open = {name: value.clone() for name, value in found.items()}
        self.open |= {"kind": kind, "mode": mode, "y": []}
        (self.spare if warms else self.eager).append(self.open)
        if warms:
            self.open["stamp"].zero_()
        else:
            self.open["on_host"] = True

    def why_not(self, mode: str, rows: int, in_graph: bool) -> str | None:
        """Why a pass is left out; where nothing is asked for, an eager one always is, in silence."""
        if in_graph:
            if mode in OF_LENGTHS:
                return "prompts in graphs (start without prefill_graphs)"
            if rows > GRAPH_ROWS:
                return f"graphs of more than {GRAPH_ROWS} rows"
            return f"graphs above {GRAPH_BYTES >> 20} MiB" if self.graph_bytes > GRAPH_BYTES else None
        if not self.is_mine:
            return ""
        if rows > self.asked["rows"]:
            return "passes of more rows than were asked for"
        return "what is more than the bytes that were asked for" if self.bytes > self.asked["bytes"] else None

    @inference
    def note(self, y) -> None:
        if self.open is not None:
            self.keep(self.open["y"], self.at, y)
            self.at += 1

    @inference
    def end(self, result) -> None:
        if self.open is not None:
            for name, value in ends_of(result).items():
                self.keep(self.open, name, value)
        self.open = None

    def keep(self, where, name, value) -> None:
        """In what is there already, of a captured pass, or in a tensor of its own."""
        is_there = name < len(where) if isinstance(where, list) else name in where
        if is_there:
            where[name].copy_(value)
            return
        on_host = self.open.get("on_host", False)
        kept = value.cpu() if on_host else value.clone()
        self.graph_bytes += 0 if on_host else size_of(kept)
        if isinstance(where, list):
            where.append(kept)
        else:
            where[name] = kept

    # ---- between two of SGLang's calls

    @inference
    def look(self, runner=None) -> None:
        """Writes what ran since the last time, and looks whether something is asked for."""
        if is_capture_mode():
            return
        if self.is_mine:
            self.write()
        asked = self.read_asked()
        if asked != self.asked:
            self.start(asked, runner)

    def read_asked(self) -> dict | None:
        path = self.folder / ASKED
        if not path.is_file():
            return None
        try:
            found = json_file.load(path)
        except json_file.JsonFileError:  # it was taken away meanwhile
            return None
        numbers = isinstance(found, dict) and all(isinstance(found.get(name), int) for name in ("rows", "bytes"))
        return found if numbers and str(found.get("id", "")).isalnum() else None

    def start(self, asked: dict | None, runner) -> None:
        self.asked, self.number, self.bytes, self.is_mine = asked, 0, 0, False
        self.eager.clear()
        if asked is None:
            return
        if self.count is not None:
            if self.count.is_cuda:
                torch.cuda.synchronize(self.count.device)
            self.seen = int(self.count)
        self.left_out = collections.Counter({k: n for k, n in self.left_out.items() if "graphs" in k})
        self.facts = facts_of(runner)
        self.is_mine = is_first_rank() and not self.place.exists() and self.put(lambda: self.place.mkdir(mode=0o700))
        if self.is_mine:
            self.write_facts()

    @property
    def place(self) -> Path:
        return self.folder / self.asked["id"]

    def write(self) -> None:
        if self.count is None or not (self.eager or self.captured):
            return
        if self.count.is_cuda:
            torch.cuda.synchronize(self.count.device)
        every = self.eager + self.captured
        stamps = torch.stack([one["stamp"] for one in every]).tolist()
        ran = sorted((stamp, i) for i, stamp in enumerate(stamps) if stamp > self.seen)
        for stamp, i in ran:
            self.seen = stamp
            if not self.is_mine:
                break
            if "out" not in every[i]:
                self.leave_out("passes without an end (pipeline parallelism)")
            elif self.bytes > self.asked["bytes"]:
                self.leave_out("what is more than the bytes that were asked for")
            else:
                self.write_pass(every[i])
        self.eager.clear()

    def write_pass(self, one: dict) -> None:
        found = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in one.items() if k not in ("y", "on_host")}
        found["y"] = [y.cpu() for y in one["y"]]
        self.is_mine = self.is_mine and self.put(lambda: torch.save(found, self.place / f"{self.number:05d}.pt"))
        self.number, self.bytes = self.number + 1, self.bytes + sum(map(size_of, found.values()))

    def leave_out(self, why: str) -> None:
        if why:
            self.left_out[why] += 1
            if self.is_mine:
                self.write_facts()

    def write_facts(self) -> None:
        text = json.dumps({**self.facts, "left_out": dict(self.left_out)}, indent=1, default=str)
        self.put(lambda: json_file.put(self.place / FACTS, text))

    def put(self, write: Callable) -> bool:
        """Whether it was written: a folder that is not ours, or a full disk, ends the record and nothing else. What is
        missing of it is seen by who reads it."""
        try:
            write()
        except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError
            report.warn_once(f"{self.folder}: the record of the layers ends, it cannot be written ({error})")
            return False
        return True


def ends_of(result) -> dict:
    """What a pass gave: (hidden, streams); where DSPARK drafts ((hidden, streams), context), up to 0.5.22 a list of the
    layers'; of DSPARK's draft its output, whose hidden states are the streams."""
    found = {}
    if isinstance(result, tuple) and isinstance(result[0], tuple):
        context = result[1]
        found["context"] = torch.cat(list(context), dim=-1) if isinstance(context, (tuple, list)) else context
    while isinstance(result, (tuple, list)):
        result = result[0]
    result = getattr(result, "hidden_states", result)
    found["out"] = result.flatten(1) if isinstance(result, torch.Tensor) else None
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def tensors_of(kind: str, mode: str, tokens, positions, batch) -> dict:
    found = {"tokens": tokens, "positions": positions, "requests": batch.req_pool_indices}
    if mode in OF_LENGTHS:
        found["lengths"] = batch.extend_seq_lens
    if kind == "draft":
        found["hidden"] = batch.spec_info.hidden_states
    return {name: value for name, value in found.items() if value is not None}


def is_first_rank() -> bool:
    """Of a server's processes the one that records. Under pipeline parallelism none sees all layers."""
    state = importlib.import_module(PARALLEL_STATE)
    return state._TP is None or state._TP.rank_in_group == 0


def facts_of(runner) -> dict:
    arguments = getattr(runner, "server_args", None)
    found = {name: getattr(arguments, name, None) for name in ARGUMENTS}
    config = getattr(getattr(runner, "model_config", None), "hf_text_config", None)
    found |= {"num_hidden_layers": getattr(config, "num_hidden_layers", None)}
    found |= {"hidden_size": getattr(config, "hidden_size", None), "pid": os.getpid(), "time": time.time()}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found["deepseek_v4_sm120"] = report.our_version()
    return found


# ---- SGLang's functions


@functools.cache
def recorder() -> Recorder:
    """This process's."""
    return Recorder(settings().layers)


def hooks_of(own: Callable[[], Recorder]) -> dict:
    """{name: replace(original)}, of a recorder that is asked for at the first call."""

    def around(kind: str) -> Callable:
        def replace(original: Callable) -> Callable:
            @functools.wraps(original)
            def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
                if torch.compiler.is_compiling():
                    return original(self, input_ids, positions, forward_batch, *args, **kwargs)
                own().begin(kind, input_ids, positions, forward_batch)
                result = original(self, input_ids, positions, forward_batch, *args, **kwargs)
                own().end(result)
                return result

            return forward

        return replace

    def attention(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self, x, *args, **kwargs):
            if not torch.compiler.is_compiling():
                own().note(x)
            return original(self, x, *args, **kwargs)

        return forward

    def draft_attention(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self, positions, hidden_states, *args, **kwargs):
            if not torch.compiler.is_compiling():
                own().note(hidden_states)
            return original(self, positions, hidden_states, *args, **kwargs)

        return forward

    def experts(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self, hidden_states, *args, **kwargs):
            if not torch.compiler.is_compiling():
                own().note(hidden_states)
            return original(self, hidden_states, *args, **kwargs)

        return forward

    def runner(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self, forward_batch, *args, **kwargs):
            own().look(self)
            result = original(self, forward_batch, *args, **kwargs)
            own().look(self)
            return result

        return forward

    passes = {"model": around("target"), "draft": around("draft"), "block": around("block")}
    return passes | {
        "attention": attention,
        "draft_attention": draft_attention,
        "experts": experts,
        "runner": runner,
    }


_replacements = hooks_of(recorder)
replace_model_forward = _replacements["model"]
replace_draft_forward = _replacements["draft"]
replace_block_forward = _replacements["block"]
replace_draft_attention_forward = _replacements["draft_attention"]
replace_attention_forward = _replacements["attention"]
replace_experts_forward = _replacements["experts"]
replace_runner_forward = _replacements["runner"]
