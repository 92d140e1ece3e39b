"""What commands/speculation.py says of each release, read in its wheel: the planner's own expressions are evaluated
over every prefix, block and accepted length; the rest is the presence of the very lines."""

import ast
import re
from types import SimpleNamespace
from unittest import mock

import pytest

from deepseek_v4_sm120.commands import speculation
from deepseek_v4_sm120.commands.doctor import software_checks
from deepseek_v4_sm120.commands.speculation import DSPARK, EAGLE, Speculation
from tests.patching.wheels import archive, content, every_release, members, tree

POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
SWA_PAGE = 256
MOST_ROWS = 12


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:3]))


def kinds(version: str, found: Speculation, ours=()) -> set[tuple[str, str]]:
    return {(kind, hazard.what) for kind, hazard in speculation.hazards(number(version), found, ours)}


def source_of(wheel, name: str) -> str:
    (member,) = [m for m in members(wheel) if m.endswith(f"/{name}")]
    return archive(wheel).read(member).decode()


def in_python(expression: str) -> str:
    """A C++ expression of the planner in Python."""
    expression = re.sub(r"\bstd::|params\.", "", " ".join(expression.split()))
    expression = re.sub(r"\(([^()?]+) \? ([^()]+) : ([^()]+)\)", r"(\2 if \1 else \3)", expression)
    return re.sub(r"^([^()?]+) \? (.+) : (.+)$", r"\2 if \1 else \3", expression)


class Planner:
    """The margin of a rewrite, and the first row that is written, as c_plan.cuh computes them."""

    def __init__(self, wheel):
        text = source_of(wheel, "c_plan.cuh")
        whole = text[: text.index("plan_compress_prefill_legacy(")]  # the ring without pages is not for this pool
        self.names = {name: int(value) for name, value in re.findall(r"constexpr int32_t (\w+) = (\d+);", whole)}
        (self.margin,) = map(in_python, re.findall(r"const auto mtp_pad = ([^;]+);", whole))
        found = [in_python(line) for line in re.findall(r"const int32_t first_w_pos = ([^;]+);", whole)]
        *on_gpu, self.on_host = found
        assert len(on_gpu) == 2 and len(set(on_gpu)) == 1
        self.on_gpu = on_gpu[0]

    def first_written(self, expression: str, ratio: int, ring: int, prefix: int, rows: int) -> int:
        overlap, end = ratio == 4, prefix + rows
        names = {"ring_size": ring, "compress_ratio": ratio, "window_size": window(ratio), "min": min, **self.names}
        margin = eval(self.margin, {}, names)
        names |= {"cr": ratio, "is_overlap": overlap, "sl": end, "seq_len": end, "mtp_pad": margin}
        return eval(expression, {}, names | {"last_c_pos": end // ratio * ratio})


def window(ratio: int) -> int:
    return 8 if ratio == 4 else ratio


def lost(planner: Planner, expression: str, ratio: int, ring: int, rows: int) -> bool:
    """Whether any accepted length of a verified block leaves a state that a later window reads from the ring unwritten,
    or overwritten by the block's rejected rows."""
    for prefix in range(512, 512 + 256):
        first = planner.first_written(expression, ratio, ring, prefix, rows)
        written = {p for p in range(prefix, prefix + rows) if p >= first or (ratio == 4 and p % SWA_PAGE >= 252)}
        for accepted in range(1, rows + 1):
            length = prefix + accepted
            reads = range((length // ratio + 1) * ratio - window(ratio), length)  # of the next window, from the ring
            if any(p >= prefix and p not in written for p in reads):
                return True
            if any(p - ring in reads for p in written):
                return True
    return False


@pytest.fixture
def wheel(sglang_wheel, version):
    return sglang_wheel(version)


def ring_sizes(wheel) -> dict[int, int]:
    """Of a speculating server, by the release's own function."""
    (function,) = [
        node for node in tree(wheel, POOL).body
        if isinstance(node, ast.FunctionDef) and node.name == "get_compress_state_ring_size"
    ]  # fmt: skip
    names = {"ONLINE_C128": False}
    exec(compile(ast.Module([function], []), "wheel", "exec"), names)
    return {ratio: names["get_compress_state_ring_size"](ratio, 2) for ratio in (4, 128)}


@every_release()
def test_the_rows_whose_state_survives(version, wheel):
    """The greatest number of rows of which no accepted length loses a state is the one that plans and doctor go by."""
    planner, rings = Planner(wheel), ring_sizes(wheel)
    assert rings == {4: 16, 128: 256}
    safe = [
        rows for rows in range(1, MOST_ROWS + 1)
        if not any(lost(planner, planner.on_gpu, ratio, ring, rows) for ratio, ring in rings.items())
    ]  # fmt: skip
    for algorithm in (EAGLE, DSPARK):
        unsafe = {
            rows for rows in range(1, MOST_ROWS + 1)
            if any("rows a request" in what for _, what in kinds(version, Speculation(algorithm, rows)))
        }  # fmt: skip
        assert unsafe == set(range(1, MOST_ROWS + 1)) - set(safe)
    assert max(safe) in (speculation.KEPT_ROWS, speculation.KEPT_BY_THE_RING)


@every_release()
def test_the_plan_of_the_host(version, wheel):
    """It has the margin where nothing is said of it, and loses a state at 2 rows where it is said to."""
    planner = Planner(wheel)
    is_lost = lost(planner, planner.on_host, 128, 256, 2)
    said = kinds(version, Speculation(EAGLE, 2, host_plan=True))
    assert is_lost == bool(said) and all(kind == speculation.WRONG for kind, _ in said)
    if said:  # by a variable that is on by itself
        assert f"{speculation.PLAN_VARIABLE} = EnvBool(True)" in source_of(wheel, "srt/environ.py")


@every_release()
def test_the_race_of_the_plan_and_the_slots_of_the_graphs(version, wheel):
    """Scratch cleared by one warp while others fill it (#32467 took the clearing out); graphs captured for
    min(tokens, batch) requests (#34384)."""
    said = kinds(version, Speculation(DSPARK, 4, mode=speculation.COMPACT))
    compact = {kind for kind, what in said if speculation.MODE_VARIABLE in what}
    runner = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"
    if number(version) < speculation.DSPARK_SINCE:
        assert speculation.MODE_VARIABLE not in source_of(wheel, "srt/environ.py") and not compact
        return
    assert f'{speculation.MODE_VARIABLE} = EnvStr("{speculation.STATIC}")' in source_of(wheel, "srt/environ.py")
    has_race = "warp_max[tx] = 0;" in source_of(wheel, "c_plan.cuh")
    assert compact == {speculation.WRONG if has_race else speculation.STOPS}
    slots = content(wheel, runner).partition("def _ragged_capture_slots")[2].partition("\n    def ")[0]
    assert "return min(num_tokens, self.max_bs)" in slots


@every_release()
def test_the_combine_of_mhc_in_the_symmetric_pool(version, wheel):
    """All that is allocated inside of `with use_symmetric_memory` lies in the pool: a chain of torch's operations, or
    one call of a kernel that allocates its result."""
    withs = [
        node for node in ast.walk(tree(wheel, "sglang.srt.models.deepseek_v4"))
        if isinstance(node, ast.With) and "use_symmetric_memory(" in ast.unparse(node.items[0])
    ]  # fmt: skip
    leaves = any(".sum(dim=1).to(dtype)" in ast.unparse(node) for node in withs)
    said = kinds(version, Speculation(EAGLE, 2, symmetric=True))
    assert leaves == bool(said)
    assert not kinds(version, Speculation(EAGLE, 2, symmetric=True), ours=("mhc",))
    if withs and not leaves:
        assert [re.match(r"y = (hc|mhc)_combine\(", ast.unparse(node.body[0])) is not None for node in withs] == [True]


@every_release()
def test_what_has_dspark(version, wheel):
    hook = source_of(wheel, "arg_groups/deepseek_v4_hook.py")
    has_it = '"DSPARK"' in hook
    assert has_it == (number(version) >= speculation.DSPARK_SINCE)
    stops = {what for kind, what in kinds(version, Speculation(DSPARK, 4), ours=("sparse_decode",))}
    assert stops == (set() if has_it else {"DSPARK"})
    if has_it:
        config = source_of(wheel, "dspark_components/dspark_config.py")
        assert f"DEFAULT_DSPARK_GAMMA = {speculation.DSPARK_BLOCK}\n" in config


@every_release()
def test_which_words_the_server_takes(version, wheel):
    """Its own check of a speculation, of this model."""
    hook = ast.parse(source_of(wheel, "arg_groups/deepseek_v4_hook.py"))
    (apply,) = [node for node in hook.body if getattr(node, "name", None) == "apply_deepseek_v4_defaults"]
    (check,) = [
        node for node in apply.body
        if isinstance(node, ast.If) and re.fullmatch(r"\w+\.speculative_algorithm is not None", ast.unparse(node.test))
    ]  # fmt: skip
    run = compile(ast.Module([check], []), "wheel", "exec")

    def takes(word: str, topk: int | None) -> bool:
        given = SimpleNamespace(speculative_algorithm=word, speculative_eagle_topk=topk)
        names = {
            "server_args": given,
            "cfg": given,
            "model_arch": "it",
            "envs": mock.MagicMock(),
            "logger": mock.Mock(),
        }
        try:
            exec(run, names)
        except AssertionError:
            return False
        return True

    for word in (EAGLE, DSPARK, "NEXTN", "eagle", "dspark", "EAGLE3", "NGRAM", "STANDALONE"):
        for topk in (None, 1, 2):
            found = Speculation(word, 2, topk=topk if word == EAGLE else 1)
            said = {kind for kind, _ in kinds(version, found, ("sparse_decode",))}
            assert takes(word, topk) == (speculation.STOPS not in said), (word, topk)


@every_release()
def test_words_are_looked_at_before_they_are_made_others(version, wheel):
    """What runs the check above is called in front of what makes EAGLE of NEXTN."""
    homes = ("sglang/srt/arg_groups/pipeline.py", "sglang/srt/server_args.py")
    names = ("handle_model_specific_adjustments", "handle_speculative_decoding")
    calls = [rf"^ +(self\._|run_hook\()?{name}[(,]" for name in names]
    found = [
        [call.start() if (call := re.search(line, content(wheel, home), re.MULTILINE)) else None for line in calls]
        for home in homes if home in members(wheel)
    ]  # fmt: skip
    (places,) = [places for places in found if None not in places]
    assert places == sorted(places)


@every_release()
def test_what_eagle_does_unasked(version, wheel):
    """3 steps where nothing is said, and rows are the steps and one, as topk is 1."""
    homes = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/speculative_hook.py")
    text = "\n".join(content(wheel, home) for home in homes if home in members(wheel))
    (choice,) = [
        node for node in ast.walk(ast.parse(text.replace("from __future__", "from future")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("auto_choose_speculative_params")
    ]  # fmt: skip
    assert "DeepseekV4" not in ast.unparse(choice)
    last = choice.body[-1]
    while isinstance(last, ast.If):
        last = last.orelse[-1]
    steps = speculation.EAGLE_STEPS
    assert ast.unparse(last) == f"return ({steps}, 1, {steps + 1})"
    assert "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1" in text


def pinned_flashinfer(wheel) -> tuple[int, ...]:
    (metadata,) = [m for m in members(wheel) if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", m)]
    pinned = re.search(r"Requires-Dist: flashinfer[_-]python(?:\[\w+\])?==([0-9.]+)", content(wheel, metadata))[1]
    return tuple(map(int, pinned.strip(".").split(".")[:3]))


@every_release(first="0.5.16")
def test_who_sends_dsparks_decisions_round(version, wheel):
    """The acceptance of requests that sample, in dflash_utils.py: by spec_tp_sync.py, or nobody."""
    names = members(wheel)
    sync = [m for m in names if m.endswith("srt/speculative/spec_tp_sync.py")]
    deciding = [m for m in names if re.search(r"srt/speculative/(dflash_utils|dspark_components/dspark_\w+)\.py$", m)]
    sends = {m.rpartition("/")[2] for m in deciding if re.search(r"\.broadcast\(|\.sync\(", content(wheel, m))}
    if sync:
        assert "DSPARK_ACCEPT_SAMPLE" in content(wheel, sync[0]) and "dspark_verify.py" in sends
        assert re.search(r'SGLANG_SPEC_TP_SYNC = EnvStr\("all"\)', source_of(wheel, "srt/environ.py"))
    else:
        assert sends == {"dspark_planner.py"}  # how many drafts a request has, not which are accepted
    parting = "requests that sample, on several cards"
    told = (speculation.DOUBT, parting) in kinds(version, Speculation(DSPARK, 4, cards=2), ours=("sparse_decode",))
    assert told == (not sync)
    alone = kinds(version, Speculation(DSPARK, 4)) | kinds(version, Speculation(EAGLE, 4, cards=2))
    assert parting not in {what for _, what in alone}


@every_release()
def test_the_flashinfer_whose_top_k_is_mended(version, wheel):
    """What doctor says of FlashInfer's renormalisation, and from which release on it names the mended ones."""
    pinned = pinned_flashinfer(wheel)
    assert (pinned >= software_checks.RENORM_HANGS_BELOW) == (number(version) >= (0, 5, 16))
    assert (pinned >= software_checks.RENORM_RACES_BELOW) == (number(version) >= (0, 5, 22))


@every_release(first="0.5.16")
def test_the_flashinfer_that_lacks_the_drafts_width(version, wheel):
    """0.6.18 is the first with flashinfer #4380; what is pinned before cannot start DSPARK on SM120 by itself."""
    lacks = pinned_flashinfer(wheel) < (0, 6, 18)
    assert lacks == ((speculation.STOPS, "DSPARK on SGLang's attention") in kinds(version, Speculation(DSPARK, 4)))


@every_release()
def test_pipeline_parallelism_beside_speculation(version, wheel):
    """An assertion without an exception on GPUs up to 0.5.20; then a variable's, and that of servers for prompts."""
    module = "server_args.py" if number(version) < (0, 5, 19) else "arg_groups/validation_hook.py"
    text = content(wheel, f"sglang/srt/{module}")
    asserted = re.search(
        r"assert \(?\s*(self|cfg)\.disable_overlap_schedule and \1\.speculative_algorithm is None", text
    )
    may_be_asked = f"envs.{speculation.STAGES_VARIABLE}.get()" in text
    assert (asserted is None) is may_be_asked is (number(version) >= speculation.STAGES_SINCE)
    assert not may_be_asked or 'assert cfg.disaggregation_mode == "prefill"' in text
    asked = {may: Speculation(EAGLE, 2, stages=2, may_have_stages=may) for may in (False, True)}
    stops = {may: (speculation.STOPS, "--pp-size above 1") in kinds(version, found) for may, found in asked.items()}
    assert stops == {False: True, True: not may_be_asked}
    assert not any("pp-size" in what for _, what in kinds(version, Speculation(EAGLE, 2)))
