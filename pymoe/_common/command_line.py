"""An argument parser whose errors suggest the most similar option or command, and functions that parse arguments."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from pymoe._common.names import suggestion


class CommandLine(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors suggest an existing option or command for an unknown one.

    A subcommand reports its own unknown options, with its own usage. Options cannot be abbreviated: ``--token SECRET``
    would mean ``--token-file SECRET``, and the error for the missing file would show the secret.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for action in self._actions for option in action.option_strings]
            wrong = next((one for one in rest if one.startswith("-")), rest[0])
            self.error(f"unrecognized arguments: {' '.join(rest)}{suggestion(wrong.partition('=')[0], options)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        super().error(message + (suggestion(choice[1], re.findall(r"[\w.+-]+", choice[2])) if choice else ""))


def file_to_write(argument: str) -> Path:
    """Parse the path of a file that a command will write, as an argparse type.

    Wrong paths are thus refused before the command does any work.

    Raises:
        ArgumentTypeError: the path is empty or is a folder, or its parent folder does not exist.
    """
    is_folder, folder = os.path.isdir(argument), os.path.dirname(argument) or "."
    if not argument or is_folder or not os.path.isdir(folder):
        got = "which is a folder" if is_folder else f"but there is no folder {folder!r}" if argument else "no name"
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {argument!r}, {got}")
    return Path(argument)
