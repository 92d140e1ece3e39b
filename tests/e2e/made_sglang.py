"""A harness and an SGLang that are stand-ins, as sources: what test_scripts.py puts in place of the real ones.

ANY_HARNESS is what each has, whatever its options.
"""

ANY_HARNESS = """
import argparse, os, sys
def reexec(a):
    if os.environ.get("E2E_REEXEC") != "1":
        os.environ["E2E_REEXEC"] = "1"
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__)] + sys.argv[1:], os.environ)
def vocab_of(model):
    return 100
def ids(n, vocab, seed):
    return [seed % vocab] * n
"""
HARNESS = (
    ANY_HARNESS
    + """
def parse(argv):
    p = argparse.ArgumentParser()
    p.add_argument("mode")
    for name in ("name", "out", "patch", "variant", "prompts", "batch-prompts", "moe"):
        p.add_argument("--" + name)
    for name, default in (("repeat", 2), ("new", 4), ("top", 2), ("prompt-positions", 3), ("out-len", 4), ("reps", 1)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--max-total-tokens", type=int)
    p.add_argument("--max-running", type=int)
    p.add_argument("--chunk", type=int)
    p.add_argument("--radix", action="store_true")
    p.add_argument("--mem", type=float)
    p.add_argument("--context", type=int)
    for name in ("bs", "graph-bs", "in-len"):
        p.add_argument("--" + name, type=int, nargs="+", default=[1])
    p.add_argument("--set", action="append", default=[])
    return p.parse_args(argv)
def engine_args(a):
    model = os.path.join(os.environ["MODELS"], a.variant or "flash6h")
    os.makedirs(model, exist_ok=True)
    return {"name": a.name, "patch": a.patch, "set": " ".join(a.set)}, model
def slim(o):
    return o
def compare(p, q):
    d = [abs(x - y) for x, y in zip(p["logprobs"], q["logprobs"])]
    return len(d), 1.0, sum(d) / len(d), max(d)
"""
)

# of a server over HTTP; what a stage's has beside it says answer_to(asked), by answer(value)
ANSWERING = """
import json
from http.server import BaseHTTPRequestHandler
class Answering(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        self.answer_to(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
"""

SGLANG = """
import gzip, json, os, sys, time
__version__ = "0.0.0.fake"
RECORD = {"patch": "sparse_decode", "layer": 0, "captured": True, "shape": {"rows": 1}, "calls": 7, "bad_calls": 0,
          "rows": 7,
          "relative_l2_mean": 0.001, "relative_l2_max": 0.002, "row_relative_l2_max": 0.003, "absolute_error_max": 0.1,
          "nonfinite_ours": 0, "nonfinite_original": 0, "left_out": 0, "bound": 0.004}
class Tokens(list):
    def tolist(self):
        return list(self)
class Engine:
    traced, profiles, clock = None, 0, 0.0
    def __init__(self, name, patch, **more):
        sys.modules["__main__"].SETTLE_S = 0.0  # nothing of it does
        self.name, self.set = name, more["set"]
        if name == os.environ.get("FAKE_CRASH"):
            raise SystemExit("the fake engine does not start")
        if name == os.environ.get("FAKE_HANG"):
            time.sleep(600)
        if patch:
            folder = os.environ["DSV4_SM120_REPORT"]
            os.makedirs(folder, exist_ok=True)
            shadow = [RECORD] if os.environ.get("DSV4_SM120_SHADOW") else []
            patch = {"patch": "sparse_decode", "target": "a:b", "state": "APPLIED", "review": "reviewed"}
            chosen = [one.partition("=") for one in os.environ.get("DSV4_SM120_SET", "").split(",")]
            asked = [name for name, _, value in chosen if value != "off"]
            passes = int(os.environ.get("FAKE_PASSES", "300"))
            counted = {"dealt_streams": {"ranks": 2, "passes": passes, "rows": 8192 * passes, "not_dealt": {}}}
            ways = {rows: "whole" for rows in os.environ.get("FAKE_FOUND", "8192").split()}
            counted["prompts_in_halves"] = {"passes": passes, "rows": 8192 * passes, "whole": {}, "found": ways}
            counted["dealt_products"] = {"ranks": 2, "products": passes, "rows": 8 * passes}
            found = {name: counted[name] for name in asked if name in counted}
            ranks = int(os.environ.get("FAKE_CARDS", 2)) if found else 1
            if as_sm120 := os.environ.get("E2E_AS_SM120"):  # by the plugin, which is on this process's path
                kernel = os.environ.get("FAKE_KERNEL") or as_sm120.partition(",")[0]
                assert any(path.endswith("sm120_plugin") for path in sys.path), sys.path
                found |= {"experts_above_256_rows": {kernel: 32}}
            for rank in range(ranks):
                with open(f"{folder}/{os.getpid()}_{rank}.json", "w") as f:
                    json.dump({"pid": os.getpid(), "patches": [patch], "shadow": shadow, "found": found}, f)
    def generate(self, input_ids, sampling_params, **more):
        forced = os.environ.get("E2E_FORCE") == "1"
        assert forced == bool(more), "timed runs are not forced"
        off = -1.5 if self.name == "ops" else -1.0
        asked = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(input_ids)
        assert len(asked) == len(input_ids)
        n = asked[0]["max_new_tokens"]
        mixed = len({one["temperature"] for one in asked}) > 1
        time.sleep(0.001 * n)
        if self.traced is not None:
            self.trace(len(input_ids), n - 1)
        top = [[[off, 1]]] * n
        ids = list(range(1, n + 1))
        verified = n
        if "E2E_DRAFTS" in os.environ:
            import forced_drafts  # the plugin is on this process's path
            assert forced_drafts.texts()[len(input_ids[0])] == ids, "what the plain run said"
            kind = os.environ.get("FAKE_ACCEPTED") or os.environ["E2E_DRAFTS"]
            verified = forced_drafts.verifications(kind, n, 5 if "steps=5" in self.set else 3)
        if "E2E_DRAWN" in os.environ:
            import drawn_tokens, pathlib  # the plugin is on this process's path
            assert len({one.get("min_p") for one in asked}) > 2
            folder, other = pathlib.Path(os.environ["E2E_DRAWN"]), os.environ.get("FAKE_PARTED") == self.name
            folder.mkdir(exist_ok=True)
            for rank in range(1 if os.environ.get("FAKE_ONE_RANK") == self.name else 2):
                steps = [([1, 2 + rank], [1, 2 + rank * other])] * 3
                drawn_tokens.write(folder / f"{rank}.jsonl", [[Tokens(each) for each in step] for step in steps])
        if len(input_ids) > 1 and self.name in os.environ.get("FAKE_OTHER_TEXT", "").split():
            ids[2] = 7
        drawn = mixed and self.name in os.environ.get("FAKE_DRAWN", "").split()
        if drawn:
            ids[3] = 8
        finish = {"type": "length"}
        if (ends := asked[0].get("stop_token_ids")) and self.name not in os.environ.get("FAKE_ENDLESS", "").split():
            assert not asked[0]["ignore_eos"] and 0 < asked[0]["min_new_tokens"] < ids.index(ends[0])
            ids, finish = ids[: ids.index(ends[0]) + 1], {"type": "stop"}
        meta = {"finish_reason": finish, "num_retractions": int(self.name == os.environ.get("FAKE_RETRACTED"))}
        meta |= {"spec_verify_ct": verified if "speculative_algorithm=" in self.set else None}
        unlike = len(input_ids) > 1 and self.name in os.environ.get("FAKE_UNLIKE", "").split()
        bad = self.name == os.environ.get("FAKE_NAN")
        meta["output_token_logprobs"] = [[float("nan") if bad else off + 1e-7 * (unlike or drawn), 1, None]] * n
        by_graph = "cuda_graph_backend_prefill" in self.set or "prefill_graphs" in os.environ.get("DSV4_SM120_SET", "")
        by_graph &= os.environ.get("FAKE_NO_GRAPHS") != self.name
        if by_graph:
            print("[x] Capture target prefill CUDA graph end. elapsed=4.1 s, mem usage=1.12 GB, avail mem=9 GB.")
        print(f"[x] Prefill batch, #new-seq: 1, cuda graph: {by_graph}, input throughput (token/s): 1.0", flush=True)
        passes = [0.1 * (1 + i // 8) for i in range(len(input_ids))]  # eight prompts each; then steps
        tokens = [one["max_new_tokens"] for one in asked]
        latencies = [at if new == 1 else passes[-1] + 0.002 * (new - 1) for at, new in zip(passes, tokens)]
        return [
            {"logprobs": [off] * n, "top": top, "prompt_top": top, "output_ids": ids, "meta_info": {**meta, **of_own}}
            for of_own in ({"e2e_latency": latency} for latency in latencies)
        ]
    def start_profile(self, output_dir, activities, profile_id):
        os.makedirs(output_dir)
        self.folder, self.traced, self.profiles = output_dir, [], self.profiles + 1
    def trace(self, prompts, steps):
        def add(name, n, us):
            for _ in range(n):
                self.traced.append({"cat": "kernel", "name": name, "ts": self.clock, "dur": us, "args": {}})
                self.clock += 2 * us
        for _ in range(prompts // 8 if prompts > 8 and not steps else 0):
            add("layer", 4, 10.0)
        prefills = 2 if prompts > 1 and self.profiles % 2 else 1  # several prompts that enter one after the other
        add("prefill_gemm", 5 * prefills, 100.0)
        add("both_gemm", 3 * prefills, 4.0)
        add("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 2 * ("tp_size=2" in self.set), 3.0)
        if os.environ.get("FAKE_NO_STEPS") != self.name:
            add("both_gemm", steps, 4.0)
            add("dsv4::sparse_decode_split", 2 * steps, 2.0)
        call = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": self.clock, "dur": 70.0, "args": {}}
        self.traced += [call] * steps
    def stop_profile(self):
        with gzip.open(self.folder + "/t.json.gz", "wt") as f:
            json.dump({"traceEvents": self.traced}, f)
        self.traced = None
    def freeze_gc(self):
        pass
    def shutdown(self):
        pass
"""

# torch is asked for the device alone
NO_TORCH = """
__version__ = "none"
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
"""


def site(launch_server):
    """{path: text} of a folder on PYTHONPATH in which `sglang.launch_server` is this source; that what SGLang's front
    imports is there is looked for."""
    from tests.e2e.faults_stage import FOR_HTTP

    found = {f"site/{name}.py": "" for name in FOR_HTTP} | {"site/torch/__init__.py": NO_TORCH}
    return found | {"site/sglang/__init__.py": "", "site/sglang/launch_server.py": launch_server}
