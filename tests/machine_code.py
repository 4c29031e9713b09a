"""Compiles the kernels with nvcc to machine code for every architecture and to PTX, and parses the compiler's report.

Results are kept in build/cuda, in one folder per source: ``sm_80.cubin`` ..., ``compute_80.ptx`` ..., ``report.txt``,
``object.o``. A source is compiled again only if its text, an included header, the flags or the toolkit has changed. The
flags are the build's, from ``csrc/nvcc_flags.py``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "cuda"
sys.path.insert(0, str(ROOT / "csrc"))
from nvcc_flags import FLAGS, default_arch_list, gencode, toolkit_version, version_text  # noqa: E402

# Flags in addition to the build's; none of them changes the generated code.
STRICT = ["-lineinfo", "-Werror=all-warnings", "-Xptxas=-v", "-Xcompiler=-Wall,-Wextra"]
KEPT = "machine code, PTX, report, object"
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """A compiled source: its folder, the compiler's complaint if it failed, and the seconds that compiling took now."""

    source: Path
    folder: Path
    complaint: str
    seconds: float

    @property
    def report(self) -> str:
        """Return ptxas's report on each kernel for each architecture."""
        return (self.folder / "report.txt").read_text()

    def cubin(self, architecture: str) -> Path:
        """Return the path of the machine code for an architecture such as ``"sm_90"``."""
        return self.folder / f"{architecture}.cubin"

    @property
    def object(self) -> Path:
        """Return the path of the object file, for programs that call its host functions."""
        return self.folder / "object.o"

    def ptx(self, architecture: str) -> Path:
        """Return the path of the PTX from which the machine code of an architecture such as ``"sm_90"`` is made."""
        return self.folder / f"{architecture.replace('sm', 'compute')}.ptx"


@dataclass(frozen=True)
class Kernel:
    """ptxas's report on one kernel for one architecture; sizes are in bytes."""

    file: str
    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spilled: int


def parse(report: str, file: str) -> list[Kernel]:
    """Return the kernels in ptxas' report of one file."""
    kernels = []
    parts = ENTRY.split(report)[1:]
    for name, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        # The kernel's own lines come first; lines about device functions may follow.
        frame, used = FRAME.search(text), USED.search(text)
        if frame is None or used is None:
            raise ValueError(f"{file}: ptxas' report of {name} is not understood:\n{text}")
        shared = SHARED.search(text)
        stack, stores, loads = map(int, frame.groups())
        kernels.append(
            Kernel(
                file, name, f"sm_{architecture}", int(used[1]), int(shared[1]) if shared else 0, stack, stores + loads
            )
        )
    return kernels


def complain(complaints: list[str]) -> int:
    """Print the complaints, and return exit status 1."""
    for complaint in complaints:
        print(f"error: {complaint}")
    return 1


def find_nvcc() -> str | None:
    """Return the path of nvcc, found on PATH or in CUDA_HOME; None if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def architectures(nvcc: str) -> list[str]:
    """Return the architectures whose machine code ships, such as ``"sm_80"``."""
    listed = default_arch_list(toolkit_version(nvcc)).replace("+PTX", "").split(";")
    return [f"sm_{one.replace('.', '')}" for one in listed]


def sources(root: Path = ROOT) -> list[Path]:
    """Return the kernels' sources, the largest first, so that parallel compilation ends soonest."""
    return sorted(root.glob("csrc/kernels/*.cu"), key=lambda path: -path.stat().st_size)


def compile_all(
    nvcc: str, paths: list[Path] | None = None, *, root: Path = ROOT, folder: Path = FOLDER, flags: list[str] = FLAGS
) -> list[Compiled]:
    """Compile the sources, one per processor at a time; unchanged sources are not compiled again."""
    version = toolkit_version(nvcc)
    command = [nvcc, *flags, *STRICT, *gencode(default_arch_list(version)), f"-I{root / 'csrc'}"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda path: compile_one(command, path, root, folder), paths or sources(root)))


def compile_one(command: list[str], source: Path, root: Path, folder: Path) -> Compiled:
    """Compile a source, or find its folder from an earlier run; remove folders of its former contents."""
    start = time.monotonic()
    target = folder / f"{source.stem}-{digest(command, source, root)}"
    if target.exists():
        return Compiled(source, target, "", 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{source.stem}-") as name:
        scratch, kept = Path(name) / "scratch", Path(name) / "kept"
        scratch.mkdir()
        kept.mkdir()
        keep = ["--keep", f"--keep-dir={scratch}", "-c", str(source), "-o", str(scratch / "object.o")]
        result = subprocess.run([*command, *keep], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            complaint = f"{source.name}: {result.stdout}{result.stderr}"
            return Compiled(source, target, complaint, time.monotonic() - start)
        (kept / "report.txt").write_text(result.stderr + result.stdout)
        alone = re.search(r"arch=compute_(\w+)", " ".join(command))
        for path in scratch.iterdir():  # X.compute_80.cubin, X.compute_100.sm_100.cubin; X.cubin of the only one
            number = re.search(r"\.compute_(\w+)\.", path.name) or alone
            if path.suffix == ".o":
                path.rename(kept / path.name)
            elif number and path.suffix in (".cubin", ".ptx"):
                path.rename(kept / f"{'sm' if path.suffix == '.cubin' else 'compute'}_{number[1]}{path.suffix}")
        for old in folder.glob(f"{source.stem}-*"):
            shutil.rmtree(old, ignore_errors=True)
        try:
            kept.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    return Compiled(source, target, "", time.monotonic() - start)


def digest(command: list[str], source: Path, root: Path) -> str:
    """Return a hash of everything that the compiler's output for a source depends on."""
    of_environment = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
    texts = [path.read_text() for path in closure(source, root)]
    parts = [version_text(command[0]), KEPT, *of_environment, *command[1:], *texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def closure(source: Path, root: Path) -> list[Path]:
    """Return the source and the headers of ``csrc`` that it includes, directly or indirectly."""
    found: dict[Path, None] = {}
    left = [source]
    while left:
        path = left.pop()
        if path in found or not path.exists():
            continue
        found[path] = None
        for name in INCLUDED.findall(path.read_text()):
            left += [path.parent / name, root / "csrc" / name]
    return sorted(found)


def demangle(names: list[str]) -> list[str]:
    """Return the demangled names, without namespaces and parameters."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    # -p omits parameters. Cutting at the first bracket would be wrong: kernel<(Activation)0, BFloat16>.
    text = subprocess.run([tool, "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\(anonymous namespace\)::|pymoe::|cuda::", "", line) for line in text.splitlines()]
