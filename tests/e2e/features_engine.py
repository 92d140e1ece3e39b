"""The phases `features` and `features_text` of engine_case.py: an engine is asked in rounds, and between them whatever
the stage's steps name is done to it. What it answered is written after every step, because the next one may end it."""

import asyncio
import json
import math
import os
import shutil
import time
from pathlib import Path

LENGTHS = (5, 9, 64, 130, 300, 700, 1000, 2100)
LONG_NEW = 500  # tokens of a long answer: several pages of 256, so a full pool retracts
FILL = (2500, 2501, 2502)  # other prompts, which push a small pool's entries out
BUSY_S, PAUSE_S, SETTLE_S, REST_S = 0.25, 1.0, 3.0, 0.3
FLUSHED_S = 5.0  # within which the cache must be flushed
SAVED_BYTES = 5 << 30  # of a file
GRAMMAR_LENGTHS = (7, 140)
MIN_P_LENGTHS, MIN_P = (6, 120, 800, 1400), 0.01  # of the most likely token's probability, at temperature 1
ROUNDED = 0.05  # of a logarithm: log-probabilities and the kernels' probabilities are of other sums
WORDS = (7, 8)  # tokens that the grammar allows
COUNTS = {"cached": "cached_tokens", "retracted": "num_retractions", "verified": "spec_verify_ct"}
SOURCES = ("host", "storage")


class Rounds:
    """case: engine_case.Case; beside: prefill_beside.Prefill, where another process prefills."""

    beside = None

    def __init__(self, case, exact, beside=None):
        self.case, self.engine, self.exact, self.beside = case, case.engine, exact, beside
        arguments = case.result["args"]
        resolved = self.engine.get_server_info()
        self.found = {name: case.result[name] for name in ("name", "sglang", "startup_s")}
        self.found |= {"asked": arguments, "resolved": {name: resolved.get(name) for name in arguments}, "steps": []}
        self.new, self.weights, self.by_tensors = case.options.new, None, None
        self.ends = []  # what the process that prefills said of the prompts of a step
        if beside is not None:
            beside.receive()  # it is up

    def run(self, steps):
        for step in steps:
            name, _, what = step.partition(":")
            started = time.perf_counter()
            self.ends = []
            did = getattr(self, f"do_{name}")(*([what] if what else []))
            if self.beside is not None:
                did["checks"] = [*did.get("checks", ()), *self.were_prefilled(len(did.get("answers", ())))]
            self.found["steps"].append({"step": step, "seconds": round(time.perf_counter() - started, 2), **did})
            self.found["ended"] = step == steps[-1] and len(self.found["steps"]) == len(steps)
            self.case.write("_features", self.found)
            print(f"[{self.case.options.name}] {step}: {self.found['steps'][-1]['seconds']} s", flush=True)

    # ---- asking

    def prompts(self, lengths=LENGTHS, seed=4):
        return [self.case.harness.ids(n, self.case.vocabulary, seed) for n in lengths]

    def arguments(self, prompts, new, **sampling):
        asked = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **sampling}
        more = {"return_logprob": True, "top_logprobs_num": self.case.options.top} if self.case.options.forced else {}
        return {"input_ids": prompts, "sampling_params": asked, **more}

    def ask(self, prompts, new, **sampling):
        asked = self.arguments(prompts, new, **sampling)
        if self.beside is None:
            return self.engine.generate(**asked)
        answers, ends = self.beside.generate(self.engine, asked)
        self.ends += ends
        return answers

    def were_prefilled(self, count):
        is_all = len(self.ends) == count and set(self.ends) == {"length"}
        return [{"what": f"of {count} prompts the process that prefills says {self.ends}", "ok": is_all}]

    def kept(self, answer):
        meta = answer["meta_info"]
        row = {"ids": answer["output_ids"], "finish": (meta.get("finish_reason") or {}).get("type")}
        row |= {name: meta.get(key) for name, key in COUNTS.items()}
        row |= {name: (meta.get("cached_tokens_details") or {}).get(name) for name in SOURCES}
        return row | (self.exact(answer) if self.case.options.forced else {})

    def answers(self, kind, given, lengths=LENGTHS):
        return {"kind": kind, "answers": {str(n): self.kept(a) for n, a in zip(lengths, given, strict=True)}}

    def do_round(self):
        return self.answers("round", self.ask(self.prompts(), self.new))

    do_again = do_flushed = do_after = do_resumed = do_restored = do_round

    def do_alone(self):
        return self.answers("round", [self.ask([prompt], self.new)[0] for prompt in self.prompts()])

    do_alone_again = do_alone

    def do_long(self):
        return self.answers("long", self.ask(self.prompts(), LONG_NEW))

    def do_full(self):
        """The same by requests that do not ignore an end, of which there is none: SGLang admits more than will fit."""
        return self.answers("long", self.ask(self.prompts(), LONG_NEW, ignore_eos=False))

    def do_grammar(self):
        """Requests with a grammar among others, twice: a grammar of two words, as many as there are new tokens."""
        bound = self.arguments(self.prompts(GRAMMAR_LENGTHS, 5), self.new, regex=self.regex())
        did = [self.at_once(self.arguments(self.prompts(), self.new), bound) for _ in range(2)]
        checks = [
            {"what": f"prompt {n}: its tokens are the grammar's", "ok": set(answer["output_ids"]) <= set(WORDS)}
            for _, answers in did
            for n, answer in zip(GRAMMAR_LENGTHS, answers, strict=True)
        ]
        ids = [[answer["output_ids"] for answer in answers] for _, answers in did]
        checks.append({"what": "the same tokens twice", "ok": ids[0] == ids[1] and len(ids[0][0]) == self.new})
        return self.answers("round", did[1][0]) | {"checks": checks}

    def do_min_p(self):
        """Requests that sample with min_p among others: no token is drawn that it leaves out, and not only one."""
        sampled = self.arguments(self.prompts(MIN_P_LENGTHS, 7), self.new, temperature=1.0, min_p=MIN_P)
        sampled |= {"return_logprob": True, "top_logprobs_num": 1}
        plain, drawn = self.at_once(self.arguments(self.prompts(), self.new), sampled)
        behind = [below_the_likeliest(answer["meta_info"]) for answer in drawn]
        checks = [
            {"what": f"prompt {n}: no token below min_p, the farthest {max(each):.3g}", "ok": self.in_min_p(each)}
            for n, each in zip(MIN_P_LENGTHS, behind, strict=True)
        ]
        others = sum(each > 0 for one in behind for each in one)
        checks.append({"what": f"{others} tokens are not the most likely", "ok": others > 0})
        return self.answers("round", plain) | {"checks": checks}

    def in_min_p(self, behind):
        """NaN is none."""
        return len(behind) == self.new and all(each <= -math.log(MIN_P) + ROUNDED for each in behind)

    def at_once(self, *asked):
        async def together():
            return await asyncio.gather(*(self.engine.async_generate(**each) for each in asked))

        return self.engine.loop.run_until_complete(together())

    def regex(self):
        return f"({'|'.join(f'w{i}' for i in WORDS)}){{{self.new}}}"

    # ---- doing

    def do_fill(self):
        for prompt in self.prompts(FILL, 6):
            self.ask([prompt], 1)
        return {}

    def do_settle(self):
        time.sleep(SETTLE_S)
        return {}

    def do_flush_cache(self):
        """The scheduler refuses while it has not seen its last batch's end, which is behind the answers."""
        said, until = self.engine.flush_cache(), time.monotonic() + FLUSHED_S
        while not said.success and time.monotonic() < until:
            time.sleep(0.1)
            said = self.engine.flush_cache()
        return {"checks": [{"what": f"flush_cache says {said}", "ok": bool(said.success)}]}

    def busy(self, do):
        """Long answers under way while `do` is done: (its answers, what `do` returned)."""

        async def run():
            task = asyncio.ensure_future(self.engine.async_generate(**self.arguments(self.prompts(), LONG_NEW)))
            await asyncio.sleep(BUSY_S)
            did = await do(task)
            return await task, did

        return self.engine.loop.run_until_complete(run())

    def do_pause(self, mode):
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        async def pause(task):
            manager, was_done = self.engine.tokenizer_manager, task.done()
            await manager.pause_generation(PauseGenerationReqInput(mode=mode))
            await asyncio.sleep(PAUSE_S)
            is_done = task.done()
            await manager.continue_generation(ContinueGenerationReqInput())
            return not was_done and not is_done

        given, was_paused = self.busy(pause)
        return self.answers("long", given) | {"checks": [{"what": "it was paused under way", "ok": was_paused}]}

    def do_abort_all(self):
        async def abort(_):
            self.engine.tokenizer_manager.abort_request(abort_all=True)

        given, _ = self.busy(abort)
        ends = [(answer["meta_info"].get("finish_reason") or {}).get("type") for answer in given]
        return {"checks": [{"what": f"answers ended by {ends}", "ok": set(ends) == {"abort"}}]}

    def do_release(self):
        self.engine.release_memory_occupation()
        time.sleep(1.0)
        self.engine.resume_memory_occupation()
        return {}

    # ---- weights

    def do_weights(self, way):
        """Other weights give other answers, and the weights from before the same bits: kind by kind as tensors, all at
        once from disk, whose answers are those of the tensors."""
        self.weights = self.weights or Weights(self.case.options, self.experts())
        return {"checks": getattr(self, f"weights_from_{way}")()}

    def digests(self):
        answers = self.ask(self.prompts((130, 700)), 8)
        time.sleep(REST_S)  # the scheduler sees its last batch's end behind the answers, and weights want it idle
        return [self.exact(answer)["digest"] for answer in answers]

    def experts(self):
        return json.loads(self.found["asked"]["json_model_override_args"])["n_routed_experts"]

    def weights_from_tensors(self):
        has_sessions = hasattr(self.engine, "begin_weight_update")  # 0.5.21 and later refuse tensors outside of one

        def give(kind, which):
            if has_sessions:
                self.expect(self.engine.begin_weight_update())
            self.expect(self.engine.update_weights_from_tensor(self.weights.tensors(kind, which)))
            if has_sessions:
                self.expect(self.engine.end_weight_update())
            return self.digests()

        for kind in Weights.KINDS:
            before = give(kind, 0)
        checks = []
        for kind in Weights.KINDS:
            others, again = give(kind, 1), give(kind, 0)
            checks.append({"what": f"{kind}: other weights, other answers", "ok": others != before})
            checks.append({"what": f"{kind}: its weights again, the same bits", "ok": again == before})
        self.by_tensors = before
        return checks

    def weights_from_disk(self):
        def give(which):
            folder = Path(self.case.options.out) / f"{self.case.options.name}_weights_{which}"
            self.weights.write(folder, which)
            self.expect(self.engine.update_weights_from_disk(str(folder), load_format="auto"))
            return self.digests()

        others, again = give(1), give(0)
        return [
            {"what": "other weights, other answers", "ok": others != again},
            {"what": "the bits of the same weights as tensors", "ok": again == self.by_tensors},
        ]

    def do_save(self):
        """The state of its layers as SGLang saves it, and behind it what else a folder needs to be loaded from."""
        folder = Path(self.case.options.out) / f"{self.case.options.name}_saved"
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save_sharded_model(path=str(folder), pattern=None, max_size=SAVED_BYTES)
        parts = sorted(path.name for path in folder.glob("model-rank-0-part-*.safetensors"))
        shutil.copy(Path(self.found["asked"]["model_path"]) / "config.json", folder)
        return {"checks": [{"what": f"SGLang saved {parts}", "ok": bool(parts)}]}

    def do_reload(self):
        """The checkpoint's weights once more, into the layers that have them."""
        self.expect(self.engine.update_weights_from_disk(os.environ["E2E_CHECKPOINT"], load_format="auto"))
        return self.do_alone()

    @staticmethod
    def expect(said):
        if not said[0]:
            raise RuntimeError(f"update_weights: {said[1]}")


def below_the_likeliest(meta):
    """How far each token's log-probability is below the greatest."""
    own = [step[0] for step in meta["output_token_logprobs"]]
    return [max(step)[0] - logprob for step, logprob in zip(meta["output_top_logprobs"], own, strict=True)]


class Weights:
    """Tensors of a checkpoint in its names, by kind, two of each (which: 0, 1), random but sane."""

    LAYERS = (2, 3)  # of C4, with an indexer, and of C128
    KINDS = ("wo_a", "dense", "experts", "shared_expert", "router", "norms", "hyper_connections", "compressor")

    def __init__(self, options, experts):
        self.config = json.loads((Path(options.models) / options.variant / "config.json").read_text())
        self.experts, self.made = experts, {}

    def tensors(self, kind, which):
        if (kind, which) not in self.made:
            self.made[kind, which] = self.make(kind, which)
        return self.made[kind, which]

    def write(self, folder, which):
        """A checkpoint's folder with these tensors alone."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        every = {name: tensor for kind in self.KINDS for name, tensor in self.tensors(kind, which)}
        save_file(every, folder / "model.safetensors")

    def make(self, kind, which):
        import torch

        generator = torch.Generator().manual_seed(10 * self.KINDS.index(kind) + which)
        made, config = {}, self.config
        hidden, inter = config["hidden_size"], config["moe_intermediate_size"]
        heads = config["num_attention_heads"] * config["head_dim"]

        def normal(*shape, std, mean=0.0, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=torch.float32).normal_(mean, std, generator=generator).to(dtype)

        def exponents(rows, columns, middle):
            drawn = torch.randint(middle - 1, middle + 2, (rows, columns), generator=generator)
            return (drawn + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

        def fp8(name, rows, columns):
            codes = normal(rows, columns, std=64.0, dtype=torch.float32).clamp_(-448, 448)
            made[f"{name}.weight"] = codes.to(torch.float8_e4m3fn)
            middle = round(math.log2(1 / (64.0 * math.sqrt(columns))))
            made[f"{name}.scale"] = exponents(rows // 128, columns // 128, middle)

        def fp4(name, rows, columns):
            codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            made[f"{name}.weight"] = codes.view(torch.int8)
            middle = round(math.log2(1 / (2.93 * math.sqrt(columns))))
            made[f"{name}.scale"] = exponents(rows, columns // 32, middle)

        for layer in self.LAYERS:
            of, groups = f"layers.{layer}", config["o_groups"]
            if kind == "wo_a":
                fp8(f"{of}.attn.wo_a", groups * config["o_lora_rank"], heads // groups)
            elif kind == "dense":
                fp8(f"{of}.attn.wq_b", heads, config["q_lora_rank"])
                fp8(f"{of}.attn.wo_b", hidden, groups * config["o_lora_rank"])
            elif kind == "experts" and layer == self.LAYERS[0]:  # there are many
                for expert in range(self.experts):
                    for name, rows, columns in (("w1", inter, hidden), ("w3", inter, hidden), ("w2", hidden, inter)):
                        fp4(f"{of}.ffn.experts.{expert}.{name}", rows, columns)
            elif kind == "shared_expert":
                for name, rows, columns in (("w1", inter, hidden), ("w3", inter, hidden), ("w2", hidden, inter)):
                    fp8(f"{of}.ffn.shared_experts.{name}", rows, columns)
            elif kind == "router":
                made[f"{of}.ffn.gate.weight"] = normal(self.experts, hidden, std=1 / math.sqrt(hidden))
            elif kind == "norms":
                for name in ("attn_norm", "ffn_norm"):
                    made[f"{of}.{name}.weight"] = normal(hidden, std=0.1, mean=1.0)
            elif kind == "hyper_connections":
                streams = config["hc_mult"]
                wide, mixes = streams * hidden, (2 + streams) * streams
                for name in ("attn", "ffn"):
                    made[f"{of}.hc_{name}_fn"] = normal(mixes, wide, std=1 / math.sqrt(wide), dtype=torch.float32)
            elif kind == "compressor":
                ratio = config["compress_ratios"][layer]
                width = config["head_dim"] * (2 if ratio == 4 else 1)
                for name in ("wkv", "wgate"):
                    made[f"{of}.attn.compressor.{name}.weight"] = normal(width, hidden, std=1 / math.sqrt(hidden))
        return list(made.items())
