"""The comparison of an engine's layers: an engine that computes the model has no fault's share, one that has a fault
has its whole, and what a captured pass is filled up with, drafts and shared prefixes go to the right places."""

import sys
import types
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "layers_plugin")]
import layer_inputs  # noqa: E402
import layers_compare  # noqa: E402
import layers_rows  # noqa: E402
import layers_weights  # noqa: E402

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    layers_weights.write(folder, CONFIG, "cpu")
    return layers_compare.tensors_of(folder, "cpu")


class Engine:
    """One that computes the model in float64, or with a fault, and rounds as engines do; its passes as the plugin
    writes them."""

    def __init__(self, tensors, rules=None, noise=0.02):
        self.judge = layers_compare.Judge(CONFIG, tensors)
        self.config, self.rules, self.noise = self.judge.config, rules or Rules(), noise
        self.inputs = {}
        self.generator = torch.Generator().manual_seed(3)

    def rounded(self, f):
        error = torch.randn(f.shape, generator=self.generator, dtype=torch.float64)
        return f + self.noise * f.norm() / f.numel() ** 0.5 * error

    def one(self, kind, request, tokens, position, mode, hidden=None, rules=None):
        rules = rules or self.rules
        judge, y = self.judge, []
        embedded = judge.weights.raw("embed.weight")[tokens]
        streams = embedded.double()[:, None].expand(-1, 4, -1)
        if kind == "draft":
            mtp = judge.weights.under("mtp.0.")
            streams = model.draft_streams(self.config, mtp, embedded, hidden.view(len(tokens), 4, -1))
        for number, (weights, ratio, hashed) in enumerate(judge.sublayers(kind)):
            for part in ("attn", "ffn"):
                x, post, comb = model.mixing(self.config, weights, part, f"{part}_norm", streams)
                y.append(x.bfloat16())
                if part == "attn":
                    before = self.inputs.get((kind, request, number), x[:0])[:position]
                    every = self.inputs[kind, request, number] = torch.cat([before, x])
                    f = model.attention(self.config, weights.under("attn."), every, ratio, first=position, rules=rules)
                else:
                    f = model.experts(self.config, weights.under("ffn."), x, tokens, hashed=hashed, rules=rules)
                streams = model.behind(self.rounded(f), streams, post, comb, rules)
        of_head = judge.weights.under("mtp.0.") if kind == "draft" else judge.weights
        out = model.head(self.config, of_head, streams).bfloat16()
        positions = torch.arange(position, position + len(tokens))
        found = {"kind": kind, "mode": mode, "tokens": tokens, "positions": positions, "y": y, "out": out}
        found["requests"] = torch.tensor([request])
        if mode == "EXTEND":
            found["lengths"] = torch.tensor([len(tokens)])
        return found | ({"hidden": hidden} if kind == "draft" else {})


def tokens(count, seed=0):
    return torch.randint(0, CONFIG["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def filled(record):
    """As a captured pass for two requests has it where one is there."""
    more = {k: torch.cat([record[k], record[k][:1] * 0]) for k in ("tokens", "positions", "requests", "out")}
    return record | more | {"y": [torch.cat([y, torch.full_like(y[:1], torch.nan)]) for y in record["y"]]}


def judged(checkpoint, rules=None, faults=None):
    """{(what, mode): group} of an engine: a prompt in two chunks, a token, and another prompt that shares a prefix."""
    engine, judge = Engine(checkpoint, rules), layers_compare.Judge(CONFIG, checkpoint, faults=faults)
    prompt = tokens(PROMPT)
    judge.take(engine.one("target", 1, prompt[:100], 0, "EXTEND"))
    judge.take(engine.one("target", 1, prompt[100:], 100, "EXTEND"))
    judge.take(filled(engine.one("target", 1, tokens(1, 1), PROMPT, "DECODE")))
    for (kind, _, number), history in list(engine.inputs.items()):
        engine.inputs[kind, 2, number] = history
    judge.take(engine.one("target", 1, tokens(7, 9), 0, "EXTEND"))  # another request in the first one's place
    judge.take(engine.one("target", 2, tokens(9, 2), 128, "EXTEND"))
    return {(g["what"], g["mode"]): g for g in judge.finish()}


def shares(groups, fault):
    return [
        g["faults"][fault]["share"]
        for g in groups.values()
        if g["faults"].get(fault, {}).get("reach", 1) < layers_rows.CLEAR
    ]


@pytest.fixture(scope="module")
def right(checkpoint):
    return judged(checkpoint)


def test_an_engine_that_computes_the_model_has_no_share_of_a_fault(right):
    every = [
        (key, name, f) for key, g in right.items() for name, f in g["faults"].items() if f["reach"] < layers_rows.CLEAR
    ]
    assert len(every) > 30
    assert {key: name for key, name, f in every if abs(f["share"]) > layers_rows.SHARE} == {}
    assert all(g["error"] < 0.03 and g["rows"] for g in right.values())
    assert {mode for _, mode in right} == {"target, extend", "target, decode"}
    assert right["attention, ratio 4", "target, decode"]["rows"] == 1  # without what fills the pass up


@pytest.mark.parametrize(
    "fault, rules",
    [
        ("not itself", Rules(sees_itself=False)),
        ("YaRN in layers without entries", Rules(yarn_without_entries=True)),
        ("an entry too late", Rules(entries_early=-1)),
        ("not by the token's number", Rules(hashed=False)),
        ("streams mixed the other way", Rules(mixing_turned=True)),
    ],
)
def test_a_fault_has_its_whole_share(checkpoint, right, fault, rules):
    found = shares(judged(checkpoint, rules, {fault}), fault)
    assert found and max(found) == pytest.approx(1, abs=0.3)
    assert all(abs(share) < layers_rows.SHARE for share in shares(right, fault))


@pytest.mark.parametrize("blind", [False, True])
def test_a_draft_behind_a_draft_is_blind_or_is_not(checkpoint, blind, monkeypatch):
    monkeypatch.setattr(layers_compare, "FAULTY", 3)
    engine, judge = Engine(checkpoint), layers_compare.Judge(CONFIG, checkpoint, faults={layers_compare.BLIND})
    prompt = tokens(PROMPT)

    def hidden(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, 4 * HIDDEN, generator=generator).bfloat16()

    judge.take(engine.one("draft", 1, prompt, 0, "EXTEND", hidden(PROMPT, 5)))
    for step in range(4):  # each drafts two behind what was verified, of which none is accepted but the next token
        begin = PROMPT + step
        for behind in range(2):
            rules = Rules(sees_before=begin) if blind else Rules()
            one = engine.one(
                "draft", 1, tokens(1, 10 * step + behind), begin + behind, "DECODE", hidden(1, behind), rules
            )
            judge.take(filled(one))
        verified = engine.one("draft", 1, tokens(2, 50 + step), begin, "DRAFT_EXTEND_V2", hidden(2, 60 + step))
        judge.take(verified)
    groups = {(g["what"], g["mode"]): g for g in judge.finish()}
    found = groups["attention, ratio 0", "draft, decode"]
    assert found["rows"] == 8
    assert found["faults"][layers_compare.BLIND]["share"] == pytest.approx(float(blind), abs=0.2)


def test_what_is_not_known_is_said(checkpoint):
    engine, judge = Engine(checkpoint), layers_compare.Judge(CONFIG, checkpoint)
    one = engine.one("target", 1, tokens(12), 0, "EXTEND")
    late = {"positions": torch.arange(8, 20), "tokens": tokens(12)}
    unknown = layers_compare.Judge(CONFIG, checkpoint)
    unknown.take(one | late)
    with pytest.raises(ValueError, match="the first 8 tokens"):
        unknown.finish()
    with pytest.raises(ValueError, match="5 inputs of sublayers, expected 6"):
        judge.take(one | {"y": one["y"][:-1]})
    with pytest.raises(ValueError, match="one after the other"):
        judge.take(one | {"positions": torch.tensor([0, 1, 1, *range(2, 11)])})


class Machine:
    """What the plugin asks of torch and SGLang: is a graph being captured, does SGLang warm one up."""

    def __init__(self, monkeypatch):
        self.capturing = self.warming = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        model = types.SimpleNamespace(get_is_capture_mode=lambda: self.warming or self.capturing)
        monkeypatch.setattr(layer_inputs.importlib, "import_module", lambda name: model)

    def synchronize(self):
        assert not self.capturing


def passed(found, mode, kind="target", at=0, rows=2):
    """A pass of the model through the plugin's hooks."""
    spec = types.SimpleNamespace(hidden_states=torch.ones(rows, 8))
    batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(name=mode), spec_info=spec)
    batch.req_pool_indices, batch.extend_seq_lens = torch.tensor([3]), torch.tensor([rows])

    def forward(self, tokens, positions, forward_batch):
        found["of_attention"](None, x=torch.full((rows, 4), float(at)), positions=positions)
        found["of_experts"](None, torch.full((rows, 4), at + 0.5))
        return (torch.full((rows, 4), at + 0.75), None), None

    positions = torch.arange(at, at + rows)
    return found["of_model" if kind == "target" else "of_draft"](forward, None, positions + 5, positions, batch)


def test_the_plugin_writes_what_ran_in_its_order(monkeypatch, tmp_path):
    machine, tap = Machine(monkeypatch), layer_inputs.Tap(tmp_path)
    found = layer_inputs.hooks(tap)
    machine.warming = True
    for at in (90, 91, 90, 91):  # SGLang runs twice what it is about to capture, two drafts of one step
        passed(found, "DECODE", at=at, rows=1)
    machine.capturing, before = True, [(one["positions"], one["y"][0], one["out"]) for one in tap.spare]
    for at in (10, 20):
        passed(found, "DECODE", at=at, rows=1)
    after = [(one["positions"], one["y"][0], one["out"]) for one in tap.captured]
    assert all(a is b for old, new in zip(before, after, strict=False) for a, b in zip(old, new, strict=True))
    with torch.inference_mode():
        for one in (*(one["stamp"] for one in tap.captured), tap.count):  # a capture runs nothing
            one.zero_()
    found["before_forward"]()  # one draft calls the next within a capture, where nothing may wait for the card
    machine.capturing = machine.warming = False
    found["before_forward"]()
    assert not list(tmp_path.iterdir())
    passed(found, "EXTEND", at=30)
    with torch.inference_mode():
        tap.count.add_(1)
        tap.captured[1]["stamp"].copy_(tap.count)  # the second graph is replayed
    passed(found, "DRAFT_EXTEND_V2", "draft", at=40)
    found["after_forward"](None)
    found["before_forward"]()
    read = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert [(one["kind"], one["mode"], one["positions"].tolist()) for one in read] == [
        ("target", "EXTEND", [30, 31]),
        ("target", "DECODE", [20]),
        ("draft", "DRAFT_EXTEND_V2", [40, 41]),
    ]
    extend, _, draft = read
    assert extend["lengths"].tolist() == [2] and "lengths" not in draft and "hidden" in draft and "hidden" not in extend
    assert [float(y[0, 0]) for y in extend["y"]] == [30, 30.5] and float(extend["out"][0, 0]) == 30.75


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_cards_the_first_one_writes(monkeypatch, tmp_path, rank):
    Machine(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    found = layer_inputs.hooks(layer_inputs.Tap(tmp_path))
    passed(found, "EXTEND")
    found["before_forward"]()
    assert len(list(tmp_path.glob("*.pt"))) == (rank == 0)


def rows_of(case, name="layers_ours", **others):
    """Of a case that has groups, those of the modes that it must have shown, too."""
    modes = layers_rows.DRAFTED if "eagle" in name else layers_rows.PLAIN
    groups = case.get("groups", [])
    case = case | {"groups": groups + [group() | {"mode": mode} for mode in modes] if groups else []}

    def row(case, impl, metric, value, bar, issue):
        met = None if bar is None else value is not None and value <= bar
        return {"case": case, "impl": impl, "metric": metric, "value": value, "bar": bar, "met": met, "issue": issue}

    base = {"exit": 0, "compared": 0, "patched": True, "groups": []}
    return layers_rows.rows(row, [{"cases": {name: base | case}}, {"cases": {k: base | v for k, v in others.items()}}])


def group(**faults):
    seen = {name: {"share": share, "reach": 0.01, "strength": 0.1} for name, share in faults.items()}
    return {
        "what": "attention",
        "mode": "decode",
        "rows": 3,
        "outliers": 0,
        "worst": 0.1,
        "error": 0.02,
        "faults": seen,
    }


def test_the_rows_tell_a_fault_and_a_case_that_broke():
    assert all(row["met"] is not False for row in rows_of({"groups": [group(a=0.1, b=-0.2)]}))
    missed = [row["metric"] for row in rows_of({"groups": [group(a=0.1, b=0.9)]}) if row["met"] is False]
    assert missed == ["greatest share of 2 known faults"]
    assert [row["met"] for row in rows_of({"compared": None})] == [False, False]
    assert [row["metric"] for row in rows_of({}) if row["met"] is False] == ["kinds of passes that nobody saw"]
    elsewhere = group() | {"outliers": 3, "error": None}  # all rows are more than OUTLIER off, or no numbers
    missed = [row["metric"] for row in rows_of({"groups": [elsewhere]}) if row["met"] is False]
    assert missed == ["rows of another choice (experts, entries)"]
    weak = group(a=0.9)
    weak["faults"]["a"]["strength"] = layers_rows.STRONG / 2
    assert all(row["met"] is not False for row in rows_of({"groups": [weak]}))
    planted = layers_rows.PLANTED["layers_eagle314_blind"]
    seen = rows_of({"groups": [group(**{planted: 0.4})]}, "layers_eagle314_blind")
    assert [row["metric"] for row in seen if row["met"] is False] == [
        f"share of the fault that is there, {planted}, off 1"
    ]
    stock = {"patched": False, "groups": [group(a=0.9) | {"error": 0.01}]}
    found = rows_of({"groups": [group(a=0.1)]}, layers_stock=stock)
    missed = [(row["metric"], row["value"]) for row in found if row["met"] is False and row["impl"].startswith("ours")]
    assert missed == [("relative error, of stock's", 2)]
    hidden = group(**{planted: 1.0})
    hidden["faults"][planted]["reach"] = 1.0
    assert any(row["met"] is False for row in rows_of({"groups": [hidden]}, "layers_eagle314_blind"))
    unseen = rows_of({"groups": [group(a=0.1)]}, "layers_eagle314_blind")
    assert [row["metric"] for row in unseen if row["met"] is False] == ["a planted fault that was not told"]
