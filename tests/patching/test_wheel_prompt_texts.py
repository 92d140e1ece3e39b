"""Tools, texts in parts and broken calls: what each release's own way to the prompt makes of them, beside ours."""

import copy
import json
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import cut_arguments, text_parts, tool_fields
from tests.patching import test_wheel_chat_requests as chat_requests
from tests.patching.test_wheel_chat_requests import MODULE, Record, asked, before_recipe, called, parts, prompt
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch, since

PARSER = "sglang.srt.parser.jinja_template_utils"
CALLS_READ_SINCE = "0.5.14"
NAMES = ("process_content_for_template_format", "normalize_assistant_tool_call_arguments", "parse_tool_call_arguments")
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string", "default": None}}}
IN_ORDER = {"name": "clock", "description": "Tells the time.", "parameters": PARAMETERS}

pytestmark = pytest.mark.usefixtures("served_card", "thinks_by_default")
thinks_by_default = chat_requests.thinks_by_default


def serving(version, *of):
    """The release's handler with its own reading of contents and calls, and the patches `of` around it."""
    names = {"orjson": SimpleNamespace(loads=json.loads, JSONDecodeError=json.JSONDecodeError)}
    own = {name: take(fetch(version), names, name, PARSER if name == NAMES[0] else MODULE) for name in NAMES}
    chat = chat_requests.serving(version, ours=False, **{name: found for name, found in own.items() if found})
    kind = type(chat)
    for patch in of:
        if patch is tool_fields:
            encoder = kind._apply_jinja_template.__globals__["encoding_dsv4"]
            encoder.render_tools = patch.replace_render_tools(encoder.render_tools)
        else:
            kind._apply_jinja_template = patch.replace_apply_template(kind._apply_jinja_template)
    return chat


def tool(**fields):
    """A tool as SGLang's record of it is dumped: with all fields, in an order of its own."""
    given = {"description": None, "name": "clock", "parameters": None, "strict": False, **fields}
    return Record(type="function", function=Record(**given))


@before_recipe
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"description": "Tells the time.", "parameters": PARAMETERS}, IN_ORDER),
        ({"parameters": PARAMETERS, "strict": True}, {**IN_ORDER, "description": ""}),
        ({"description": "Tells the time."}, {**IN_ORDER, "parameters": {}}),
    ],
)
def test_a_tool_is_told_by_its_name_description_and_parameters(version, fields, wanted):
    line = f"\n{json.dumps(wanted)}\n"
    for request in (asked(tools=[tool(**fields)]), asked(in_system=[tool(**fields)])):
        before = copy.deepcopy(request)
        assert line in prompt(serving(version, tool_fields), request)
        found = prompt(serving(version), request)
        assert line not in found and '"strict": ' in found
        assert request == before


@before_recipe
def test_parts_of_a_text_have_an_empty_line_between_them(version):
    for role in ("system", "user", "tool"):
        request = called("Look.")
        of_role = next(message for message in request.messages if message.role == role)
        of_role.content = parts("One.", "", "Two.\n")
        before = copy.deepcopy(request)
        assert "One.\n\n\n\nTwo.\n" in prompt(serving(version, text_parts), request)
        assert "One.  Two.\n" in prompt(serving(version), request)
        assert request == before


@before_recipe
def test_other_contents_stay_as_they_are(version):
    picture = [*parts("One.", "Two."), Record(type="image_url", image_url={"url": "data:"})]
    for content in ("One. Two.", parts("One."), picture):
        request = asked()
        request.messages[1].content = content
        assert prompt(serving(version, text_parts), request) == prompt(serving(version), request)


def with_arguments(given):
    request = called("Look.")
    request.messages[2].tool_calls[0].function.arguments = given
    return request


@before_recipe
@pytest.mark.parametrize("given", ["", '{"zone": "Lon', "[1]", "2", '{"zone": NaN}', "[" * 100_000])
def test_a_call_that_is_no_object_is_told_as_it_stands(version, given):
    request = with_arguments(given)
    before = copy.deepcopy(request)
    found = prompt(serving(version, cut_arguments), request)
    assert f'<｜DSML｜parameter name="arguments" string="true">{given}</｜DSML｜parameter>' in found
    assert request == before
    beside = copy.deepcopy(request.messages[2].tool_calls[0])
    beside.function.arguments = '{"zone": "Rome"}'
    request.messages[2].tool_calls.append(beside)
    found = prompt(serving(version, cut_arguments), request)
    assert f'name="arguments" string="true">{given}</' in found and '<｜DSML｜parameter name="zone"' in found


@before_recipe
def test_sglang_refuses_such_a_call(version):
    """From 0.5.14 on; so the row is needed there, and before it writes the same."""
    request = with_arguments('{"zone": "Lon')
    if since(version, CALLS_READ_SINCE):
        with pytest.raises(ValueError, match="must be valid JSON"):
            prompt(serving(version), request)
    else:
        assert prompt(serving(version), request) == prompt(serving(version, cut_arguments), request)


@before_recipe
def test_whole_calls_stay_as_they_are(version):
    for given in ("{}", '{"zone": 1.50, "a": "é"}', *([{"zone": 1}] if since(version, CALLS_READ_SINCE) else [])):
        request = with_arguments(given)
        assert prompt(serving(version, cut_arguments), request) == prompt(serving(version), request)


@before_recipe
def test_elsewhere_all_of_it_stays_sglangs(version, monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    request = asked(tools=[tool(parameters=PARAMETERS)])
    request.messages[1].content = parts("One.", "Two.")
    ours = serving(version, tool_fields, text_parts, cut_arguments)
    assert prompt(ours, request) == prompt(serving(version), request)
    if since(version, CALLS_READ_SINCE):
        with pytest.raises(ValueError, match="must be valid JSON"):
            prompt(ours, with_arguments(""))
