"""Count the source tree at commits: files and lines by package, names that several modules define, import circles.

    python tests/house.py                    # the working tree
    python tests/house.py 3d233d7 HEAD .     # a column for each commit; "." is the working tree
    python tests/house.py --names HEAD       # and the modules that define each repeated name

Lines are those of text files that git knows or does not ignore, blank lines and comments included; pictures and
archives are left out. Repeated names are classes and public functions at the top level of more than one module of
pymoe. Methods are left out, and so are functions whose names begin with an underscore.
"""

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from imports import circles, import_graph, module_of

ROOT = Path(__file__).parents[1]
TREE = "."
FOLDERS = ("csrc", "tests", "benchmarks", "docs", "examples")


class Counted(NamedTuple):
    """The counts of one commit."""

    files: Counter
    lines: Counter
    repeated: dict
    """Each repeated name, with the modules that define it."""
    circles: list


def git(*words, given=None):
    return subprocess.run(["git", *words], cwd=ROOT, input=given, capture_output=True, check=True).stdout


def texts(commit):
    """Return the text of each tracked text file of ``commit``, or of the working tree for ``"."``, by its path."""
    if commit == TREE:
        tracked = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
        contents = {path: (ROOT / path).read_bytes() for path in tracked if path and (ROOT / path).is_file()}
    else:
        paths = [path for path in git("ls-tree", "-rz", "--name-only", commit).decode().split("\0") if path]
        answer = git("cat-file", "--batch", given="".join(f"{commit}:{path}\n" for path in paths).encode())
        contents = {}
        for path in paths:
            heading, _, answer = answer.partition(b"\n")
            size = int(heading.split()[-1])
            contents[path], answer = answer[:size], answer[size + 1 :]
    return {path: content.decode() for path, content in contents.items() if b"\0" not in content}


def part_of(path):
    """Return the name of the part of the tree in which ``path`` lies."""
    first, *rest = Path(path).parts
    if first == "pymoe":
        return f"pymoe/{rest[0]}" if len(rest) > 1 else "pymoe, files at its top"
    return first if first in FOLDERS else "everything else"


def repeated_names(sources):
    """Return the modules that define each class or public function of ``sources``, if there are several."""
    defined = defaultdict(list)
    for module, (_, text) in sources.items():
        for node in ast.parse(text).body:
            public = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
            if public or isinstance(node, ast.ClassDef):
                defined[node.name].append(module)
    return {name: sorted(set(modules)) for name, modules in defined.items() if len(set(modules)) > 1}


def count(commit):
    found = texts(commit)
    files, lines = Counter(), Counter()
    for path, text in found.items():
        for part in {part_of(path), "pymoe, all" if path.startswith("pymoe/") else part_of(path), "all"}:
            files[part] += 1
            lines[part] += len(text.splitlines())
    sources = {module_of(path): (path, text) for path, text in found.items() if part_of(path).startswith("pymoe")}
    sources = {module: (path, text) for module, (path, text) in sources.items() if path.endswith(".py")}
    return Counted(files, lines, repeated_names(sources), circles(import_graph(sources)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", default=[TREE], metavar="COMMIT", help='default: ".", the working tree')
    parser.add_argument("--names", action="store_true", help="list the modules that define each repeated name")
    options = parser.parse_args()
    columns = {commit: count(commit) for commit in options.commits}

    def row(title, cells):
        print(f"{title:32}" + "".join(f"{cell:>18}" for cell in cells))

    row("files / lines", columns)
    parts = sorted({part for one in columns.values() for part in one.files}, key=lambda part: (part == "all", part))
    for part in parts:
        row(part, (f"{one.files[part]:,} / {one.lines[part]:,}" for one in columns.values()))
    row("repeated names", (len(one.repeated) for one in columns.values()))
    row("their definitions", (sum(map(len, one.repeated.values())) for one in columns.values()))
    row("import circles", (len(one.circles) for one in columns.values()))
    for commit, one in columns.items():
        for circle in one.circles:
            print(f"\nimport circle of {commit}: {', '.join(circle)}")
        if options.names:
            print(f"\nrepeated names of {commit}")
            for name, modules in sorted(one.repeated.items(), key=lambda item: (-len(item[1]), item[0])):
                print(f"  {name:28}{len(modules):3}  {' '.join(module.removeprefix('pymoe.') for module in modules)}")


if __name__ == "__main__":
    main()
