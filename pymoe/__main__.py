"""``python -m pymoe``: lists the commands of the package."""

COMMANDS = {
    "pymoe.bench": "what was built, and how fast it is on this machine",
    "pymoe.ep": "rows, bytes, balance and memory of experts spread over ranks",
    "pymoe.pipe.schedules": "pipeline schedules as pictures and numbers",
    "pymoe.quantize": "a checkpoint's weights in 8 or 4 bits",
    "pymoe.remote": "servers of experts",
    "pymoe.runtime.top": "a live view of runtimes",
}

if __name__ == "__main__":
    lines = [f"python -m {module:22}{about}" for module, about in COMMANDS.items()]
    print("\n".join([*lines, "Each has --help."]))
