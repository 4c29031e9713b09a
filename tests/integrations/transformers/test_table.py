"""The page of architectures lists every architecture of the installed transformers."""

import re

import write_table
from experts_classes import experts_classes, sources

from pymoe.integrations.transformers.blocks import DIFFERENT, PLANS

NAME_OF_EXPERTS = re.compile(r"^class (\w*(?:Experts|SparseMLP|SparseMoe\w*|MoE|Moe|MoeMLP|MoeBlock))\(", re.MULTILINE)


def test_the_page_is_what_the_script_writes():
    assert write_table.PAGE.read_text() == write_table.page(), f"run {write_table.__file__}"


def test_every_block_of_experts_behind_the_interface_is_taken_or_refused_with_the_reason():
    found = write_table.layers()
    assert sorted(found) == sorted(one.name for one in experts_classes())
    assert set(PLANS) - set(found.values()) == {"Llama4TextMoe"}, "it is outside of the interface"
    assert set(found.values()) - set(PLANS) <= set(DIFFERENT)
    classes = {name for _, text in sources() for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}
    assert set(DIFFERENT) <= classes, "a block that transformers does not have"


def test_every_architecture_with_experts_is_listed():
    with_experts = {model for model, text in sources() if NAME_OF_EXPERTS.search(text)}
    assert len(with_experts) > 70
    page = write_table.PAGE.read_text()
    listed = set(re.findall(r"^\| (\w+) \| `", page, re.MULTILINE))
    assert with_experts == listed
