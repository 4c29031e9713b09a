"""Tests that links and paths in README and docs exist.

Sphinx checks the links between pages of docs/ (``make docs``). This file checks the links of README, CONTRIBUTING and
CHANGELOG, which are not built by Sphinx, and every path of the tree that a page names.
"""

import re
from pathlib import Path

import pytest
from docs_pages import PAGES, ROOT, name, prose

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TOP_FOLDERS = "pymoe|csrc|tests|benchmarks|examples|docs|deploy"
PATH = re.compile(rf"(?<![\w/.-])((?:{TOP_FOLDERS})/[\w./-]*\w/?)")
# Files that commands create, and placeholders for a user's own names.
NOT_IN_THE_TREE = re.compile(r"(^|/)(X|NAME)\b|_X|X_|gpu_NAME|my_|\.so$|^docs/_build")
INDEX_HOSTS = re.compile(r"(?<![\w.])(files\.pythonhosted|pypi|anaconda|download\.pytorch|conda\.anaconda)\.(org|com)")
README_LINES = 150


def with_included(file: Path) -> str:
    """Return the page's text, including the files that it includes."""
    text = file.read_text()
    included = re.findall(r"^```\{include\} (\S+)$", text, re.MULTILINE)
    return "\n".join([text, *((file.parent / path).read_text() for path in included)])


def heading_anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and MyST derive from a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(prose(text)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: there is no {path}")
        elif (
            anchor
            and file.suffix == ".md"
            and anchor not in heading_anchors(text if file == page else with_included(file))
        ):
            broken.append(f"{target}: no such heading")
    return broken


def absent_paths(text: str) -> list[str]:
    text = re.sub(r"```\{toctree\}.*?```", "", text, flags=re.DOTALL)  # these are relative to the page
    found = [path for path in PATH.findall(text) if not NOT_IN_THE_TREE.search(path)]
    return [path for path in found if not (ROOT / path).exists() and not list(ROOT.glob(path + "*"))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert not absent_paths(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_names_the_host_of_a_package_index(page: Path) -> None:
    assert not INDEX_HOSTS.search(page.read_text())


def test_the_parts_have_the_order_of_the_navigation() -> None:
    order = re.findall(r"^tutorials/(\w+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert len(order) > 10
    for page in ("docs/start/choosing.md", "docs/start/quickstart.md"):
        named = [*dict.fromkeys(re.findall(r"\.\./tutorials/(\w+)\.md", (ROOT / page).read_text()))]
        assert named == [tutorial for tutorial in order if tutorial in named], page


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_planted_faults_are_found() -> None:
    page = ROOT / "README.md"
    assert broken_links(page, "# A\n[x](docs/absent.md) [y](#b) [z](docs/index.md#absent)") == [
        "docs/absent.md: there is no docs/absent.md",
        "#b: no such heading",
        "docs/index.md#absent: no such heading",
    ]
    assert not broken_links(page, "# A heading, `x`\n[y](#a-heading-x) [z](docs/index.md)\n```\n[w](absent)\n```\n")
    assert absent_paths("see `pymoe/absent.py` and csrc/ops/dispatch.cpp, tests/docs/") == ["pymoe/absent.py"]
    assert INDEX_HOSTS.search("--index-url https://download.pytorch." + "org/whl/cpu")


WHERE_TO_ADD = {
    "pymoe/pipe/schedules/schedule.py": ["register", "gpipe"],
    "pymoe/bench/operators.py": ["OPERATORS"],
    "pymoe/pipe/distributed/messages.py": ["_lay_out", "TensorLayout", "flat", "empty", "Subject", "_take"],
    "pymoe/pipe/pipe.py": ["ScheduleName"],
    "pymoe/_common/contracts.py": ["check_gate_topk"],
    "csrc/runtime/statistics.h": ["PoolStatistics"],
    "pymoe/runtime/monitoring/statistics.py": ["PoolStats", "TOTALS", "HISTOGRAMS", "pool_stats"],
    "pymoe/runtime/monitoring/socket_server.py": ["FORMAT"],
    "pymoe/nn/moe.py": ["Stats", "MoE"],
    "pymoe/nn/router.py": ["Router", "options_repr"],
    "pymoe/reference/gate_topk.py": ["weights_of"],
    "pymoe/nn/quantized_files.py": ["_ROUTER"],
    "pymoe/_common/types.py": ["FLOATING", "FORMATS", "RUNS", "GateOptions", "GateBackwardOptions"],
    "pymoe/integrations/transformers/stored_format.py": ["StoredRows"],
    "tests/nn/test_replay.py": ["OPTIONS"],
    "csrc/ops/check.h": ["weight_format"],
    "tests/ops/test_quick_checks.py": ["ARGUMENTS", "of_gate"],
    "pymoe/mixture/stats.py": ["BackendStats", "PassStats"],
    "pymoe/pipe/schedules/record.py": ["Record"],
}


@pytest.mark.parametrize("file", WHERE_TO_ADD)
def test_what_the_design_page_names_is_in_the_file_that_it_names(file: str) -> None:
    page = (ROOT / "docs" / "design.md").read_text().split("## Where do I add")[1]
    assert f"`{file}`" in page
    source = (ROOT / file).read_text()
    for one in WHERE_TO_ADD[file]:
        assert f"`{one}`" in page or f'`@{one}("name")`' in page
        assert re.search(rf"^\s*(class|struct|def|[\w:<>&* ]+)? ?{one}\b *[(:={{]", source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_begins_with_a_percent_sign(page: Path) -> None:
    """MyST takes such a line for a comment, and leaves it out without a warning."""
    assert not re.findall(r"^[ \t]*%.*", prose(page.read_text()), re.MULTILINE)
