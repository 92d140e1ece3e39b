"""The stages `experts` of run_stage.py: prompts' experts as an SM120 engine has them, in bf16 as on every card and with
MXFP8 activations (sm120_plugin). Six layers: `flash6h` for answers beside stock's, `flash6` with its routers for what
repeats itself."""

import os
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent / "sm120_plugin"
VARIABLE, FOUND = "E2E_AS_SM120", "experts_above_256_rows"  # the plugin's
ISSUE = 6
STOCK = "experts_stock"
EXPERTS = 16  # of what answers by hash routing: five engines side by side
KERNELS = {"wide": "wide experts for prompts (W4A16)", "scaled": "scaled experts for prompts (W4A8)"}
MORE = {"": "", "fp8_index": ", index products in FP8", "sms=48": ", planned for 48 multiprocessors"}
# name -> (kernel, what else is as on SM120); SGLang's own class of W4A8 but in shadow mode, where it must run here
ANSWERS = {f"experts_{kernel}": (kernel, "") for kernel in KERNELS}
BESIDE = {f"experts_{kernel}_shadow": (kernel, "") for kernel in KERNELS}
BY_ROUTER = {
    "experts_router_wide_shadow": ("wide", "fp8_index"),
    "experts_router_scaled_shadow": ("scaled", "sms=48"),
}
SHADOWS = BESIDE | BY_ROUTER
SAME = {
    f"same_experts_{kernel}{again}": (kernel, "fp8_index") for kernel in ("wide", "scaled") for again in ("", "_again")
}
ALL = "same_experts_seams"  # SGLang's SM120 branches, too
ENGINES = ANSWERS | SHADOWS | SAME | {ALL: ("scaled", "fp8_index")}
CALLS = 32  # of 42 to 54: reports are written at powers of two
PROMPTS = ["--prompts", "5,300,1024,8200", "--batches", "8", "--graph-bs", "1", "8", "--batch-prompts", ""]
PROMPTS += ["--new", "32", "--repeat", "2", "--max-total-tokens", "200000"]
MXFP8 = ["--moe", "flashinfer_mxfp4"]
IMPLEMENTATIONS = {
    STOCK: "SGLang stock, Marlin's experts",
    **{name: f"ours, {KERNELS[kernel]}" for name, (kernel, _) in ANSWERS.items()},
    **{name: f"ours beside SGLang's, {KERNELS[kernel]}{MORE[more]}" for name, (kernel, more) in SHADOWS.items()},
    **{
        name: f"ours, {KERNELS[kernel]}{MORE[more]}{', another process' if name.endswith('_again') else ''}"
        for name, (kernel, more) in SAME.items()
    },
    ALL: f"ours, {KERNELS['scaled']}{MORE['fp8_index']}, SM120 branches",
}
DIFFERENCES = [
    *((f"{EXPERTS} experts, {KERNELS[kernel]}, against stock", name, STOCK) for name, (kernel, _) in ANSWERS.items()),
    (f"{EXPERTS} experts, MXFP8 against bf16", "experts_scaled", "experts_wide"),
]
SAMES = [
    row
    for kernel in ("wide", "scaled")
    for row in (
        (f"{KERNELS[kernel]}, two processes", f"same_experts_{kernel}_again", f"same_experts_{kernel}"),
        (f"{KERNELS[kernel]}, once more", f"same_experts_{kernel}", f"same_experts_{kernel}"),
    )
]
SAMES += [("SM120 branches, scaled experts, once more", ALL, ALL)]


def stages(make, few_experts, ours, stock, shadow, seams):
    """few_experts: options of a model with fewer; ours, stock: environments of patched engines and of the other; seams:
    of one that takes SGLang's SM120 branches."""
    by_hash = ["--variant", "flash6h", *few_experts, *PROMPTS, "--mem", "0.97", "--phases", "answer"]
    by_router = ["--variant", "flash6", *PROMPTS, "--mem", "0.95", "--phases"]

    def engine(name, options, environment):
        kernel, more = ENGINES[name]
        own = MXFP8 if kernel == "scaled" and name not in SHADOWS else []
        asked = {VARIABLE: ",".join(filter(None, (kernel, more)))}
        return make(name, [*options, *own], environment=environment | asked)

    return {
        "experts": [
            make(STOCK, by_hash, patched=False, environment=stock),
            *(engine(name, by_hash, ours) for name in ANSWERS),
            *(engine(name, by_hash, ours | shadow) for name in BESIDE),
        ],
        "experts_same": [engine(name, [*by_router, "same"], ours) for name in SAME],
        "experts_router": [engine(name, [*by_router, "answer"], ours | shadow) for name in BY_ROUTER],
        "experts_seams": [engine(ALL, [*by_router, "same"], seams)],
    }


def environment(case):
    """What the plugin needs."""
    paths = filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)} if VARIABLE in case.environment else {}


def rows(cases, row):
    """collect.py's rows of the cases of a stage: that each ran the kernel that it is for. row: its maker of rows."""
    named = [(name, ENGINES[name][0]) for name in cases if name in ENGINES]
    return [one for name, kernel in named for one in ran(name, IMPLEMENTATIONS[name], kernel, cases[name], row, ISSUE)]


def ran(name, impl, kernel, case, row, issue):
    """Rows that say whether an engine took this kernel above 256 rows, and no other."""
    counted = [report["found"].get(FOUND, {}) for report in case["reports"]]
    calls = sum(counts.get(kernel, 0) for counts in counted)
    others = sum(sum(counts.values()) for counts in counted) - calls
    return [
        row(name, impl, "calls above 256 rows by its kernel", calls, None, issue),
        row(name, impl, f"calls above 256 rows by its kernel, missing to {CALLS}", max(0, CALLS - calls), 0, issue),
        row(name, impl, "calls above 256 rows by another kernel", others, 0, issue),
    ]
