"""XGrammar's formats of structural tags and its tag of DeepSeek-V4's calls, as far as SGLang asks for them, and what a
tag lets be written, as a pattern of Python's. XGrammar itself is not among what tests install."""

import re

D = "｜DSML｜"
IDENTIFIERS = "[a-zA-Z_][a-zA-Z0-9_]*"  # of arguments that it knows nothing of: 0.2.1 and 0.2.7


class Format:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def model_dump(self, by_alias=False):
        assert by_alias
        return {"type": self.kind, **{name: dumped(value) for name, value in vars(self).items()}}


def dumped(value):
    if isinstance(value, list):
        return [dumped(one) for one in value]
    return value.model_dump(by_alias=True) if isinstance(value, Format) else value


def made(name, kind):
    globals()[name] = type(name, (Format,), {"kind": kind, "__module__": __name__})


for _kind in ("const_string", "json_schema", "any_text", "regex", "sequence", "tag", "triggered_tags", "star"):
    made("".join(map(str.capitalize, _kind.split("_"))).replace("Json", "JSON") + "Format", _kind)
made("TagsWithSeparatorFormat", "tags_with_separator")
made("StructuralTag", "structural_tag")


def get_model_structural_tag(model, tools, tool_choice, reasoning, parallel_tool_calls=True):
    """XGrammar's of that name, without thoughts."""
    names, kinds = [tool["function"]["name"] for tool in tools], globals()
    if isinstance(tool_choice, dict):
        names = [tool_choice["function"]["name"]]
    invoked = [_invoked(tool["function"], kinds) for tool in tools if tool["function"]["name"] in names]
    calls = kinds["TagsWithSeparatorFormat"](tags=invoked, separator="", at_least_one=True)
    calls = invoked[0] if isinstance(tool_choice, dict) else calls
    begin, end = f"<{D}tool_calls>\n", f"</{D}tool_calls>"
    if tool_choice == "auto":
        tag = kinds["TagFormat"](begin=begin, content=calls, end=end)
        return kinds["StructuralTag"](format=kinds["TriggeredTagsFormat"](triggers=[begin.strip()], tags=[tag]))
    around = [kinds["ConstStringFormat"](value=text) for text in (f"\n\n{begin}", end)]
    return kinds["StructuralTag"](format=kinds["SequenceFormat"](elements=[around[0], calls, around[1]]))


def _invoked(function, kinds):
    schema = function["parameters"] if function["strict"] else True
    content = kinds["JSONSchemaFormat"](json_schema=schema, style="deepseek_xml")
    return kinds["TagFormat"](begin=f'<{D}invoke name="{function["name"]}">\n', content=content, end=f"</{D}invoke>\n")


def lets(tag: dict, text: str) -> bool:
    return re.fullmatch(pattern(tag["format"]), text, re.DOTALL) is not None


def pattern(node: dict, end: str = "") -> str:
    """`end`: what ends a text that may be any."""
    kind = node["type"]
    if kind == "const_string":
        return re.escape(node["value"])
    if kind == "regex":
        return f"(?:{node['pattern']})"
    if kind == "any_text":
        return f"(?:(?!{re.escape(end)}).)*"
    if kind == "sequence":
        *first, last = node["elements"]
        return "".join(map(pattern, first)) + pattern(last, end)
    if kind == "or":
        return f"(?:{'|'.join(map(pattern, node['elements']))})"
    if kind == "star":
        return f"(?:{pattern(node['content'])})*"
    if kind == "tag":
        return re.escape(node["begin"]) + pattern(node["content"], node["end"]) + re.escape(node["end"])
    if kind == "tags_with_separator":
        assert node["separator"] == "" and node["at_least_one"]
        return f"(?:{'|'.join(map(pattern, node['tags']))})+"
    if kind == "triggered_tags":
        free = f"(?:(?!{re.escape(node['triggers'][0])}).)*"
        return f"{free}(?:(?:{'|'.join(map(pattern, node['tags']))}){free})*"
    assert kind == "json_schema"
    return _of_schema(node["json_schema"], node.get("style"))


def _of_schema(schema, style) -> str:
    if style is None:
        return r"\{.*\}"
    names = [f"(?:{IDENTIFIERS})"] if schema is True else [re.escape(name) for name in schema["properties"]]
    value = f'" string="(?:true|false)">(?:(?!</{D}parameter>).)*</{D}parameter>\n'
    written = "".join(f'<{D}parameter name="{name}{value}' for name in names)
    return f"(?:{written})*" if schema is True else written


def call(name: str, **arguments: str) -> str:
    """As the model writes one; all arguments are strings."""
    return calls((name, arguments))


def calls(*of: tuple[str, dict[str, str]]) -> str:
    told = ""
    for name, arguments in of:
        lines = "".join(
            f'<{D}parameter name="{key}" string="true">{value}</{D}parameter>\n' for key, value in arguments.items()
        )
        told += f'<{D}invoke name="{name}">\n{lines}</{D}invoke>\n'
    return f"\n\n<{D}tool_calls>\n{told}</{D}tool_calls>"
