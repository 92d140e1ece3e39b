"""Patches whose names are no settings, because others go by what they learn of a server."""

from deepseek_v4_sm120.sglang_patches.table import TABLE


def test_where_the_model_is_told_is_left_out_by_nobody(python_with_ours, tree):
    """Without it all mends would do nothing, and other models' calls be ours; where DSV4_SM120_ON_BROKEN=warn tells
    the mistake, it is in place all the same."""
    assert set(TABLE.fixed) == {"argument_defaults"} and not TABLE.fixed.keys() & set(TABLE.operators)
    code = """
        import sglang
        from deepseek_v4_sm120 import patching
        engine = patching.active_engine()
        print(engine.steering.problem())
        print(*(r.patch.name for r in engine.records if r.state == "OFF"))
    """
    chosen = {"DSV4_SM120_SET": "argument_defaults=off"}
    problem, off = python_with_ours(code, path=[tree()], env=chosen).stdout.splitlines()
    assert problem.startswith("DSV4_SM120_SET: argument_defaults is no setting: without it no process is told")
    assert off == ""


def test_nobody_is_told_to_leave_it_out_where_it_does_not_fit(python_with_ours, tree):
    """Nor another one beside it, with which the server would not start, either."""
    code = """
        import sglang
        from deepseek_v4_sm120 import patching
        engine = patching.active_engine()
        print(*sorted({r.name for r in engine.survey() if r.state == "BROKEN"}), engine._or_off())
    """
    changed = {"sglang/srt/arg_groups/deepseek_v4_hook.py": "def apply_deepseek_v4_defaults(args):\n    pass\n"}
    assert python_with_ours(code, path=[tree(changed)]).stdout == "argument_defaults \n"
    other = {"sglang/srt/layers/attention/dsv4/compressor.py": "def linear_bf16_fp32(x):\n    return x\n"}
    assert python_with_ours(code, path=[tree(changed | other)]).stdout == "argument_defaults bf16_linear \n"
    chosen = {"DSV4_SM120_SET": "argument_defaults=off,mhc=off"}
    found = python_with_ours(code, path=[tree(other)], env=chosen).stdout
    assert found == "bf16_linear , or DSV4_SM120_SET=mhc=off,bf16_linear=off,\n"
