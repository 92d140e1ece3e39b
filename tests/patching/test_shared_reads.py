"""What several fixes share reads SGLang's objects for each of them (test_wheel_attributes.py): in its releases, of the
class whose method it replaces."""

import ast

import pytest

from tests.patching import attributes
from tests.patching.test_wheel_attributes import has_rows, missing
from tests.patching.wheels import RELEASES

SHARING = ("blanks_before_calls", "cut_arguments", "developer_messages", "text_parts")
OF_ITS_PARTS = ("last_turns", "unseen_pictures")  # what asks `self` there is none of theirs


def test_who_shares_what():
    found = {adapter: attributes.modules_of(adapter)[1:] for adapter in attributes.FILES}
    assert {adapter: shared for adapter, shared in found.items() if shared} == dict.fromkeys(
        (*SHARING, *OF_ITS_PARTS), ("prompt_messages",)
    )


@pytest.mark.parametrize("adapter", [*SHARING, *OF_ITS_PARTS])
def test_a_made_up_name_in_what_is_shared_is_found_for_each(monkeypatch, adapter):
    """Of the request, and of the object whose method is replaced."""
    text = ast.unparse(attributes.tree_of("prompt_messages"))
    made = text.replace("answers_for_ours(self)", "answers_for_ours(self.made_up)")
    made = made.replace("in request.messages", "in request.made_up")
    assert made.count("made_up") == 2
    trees = {"prompt_messages": ast.parse(made), adapter: attributes.tree_of(adapter)}
    monkeypatch.setattr(attributes, "tree_of", trees.get)
    newest = [version for version in RELEASES if has_rows(adapter, version)][-1]
    texts = missing(adapter, newest, attributes.reads.__wrapped__(adapter))
    assert all(text.startswith(f"{adapter}, prompt_messages.py:") for text in texts)
    assert [text.partition(": ")[2].partition(" is not in ")[0] for text in texts] == [
        *("request.made_up", "self.made_up")[: 2 - (adapter in OF_ITS_PARTS)],
    ]
