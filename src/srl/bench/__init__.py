"""``srl bench``: what this machine gives, and how much of it training uses."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from srl.core.errors import UnknownName

COMMANDS = {
    "throughput": "steps trained on per second, for a few workloads",
    "roofline": "how close training comes to the limit of this machine",
    "streams": "streams and parameters against memcpy, ZeroMQ, pipes and Ray",
    "rivals": "the same work done by other libraries, in turn with ours",
    "hide-and-seek": "hide and seek against bare MuJoCo",
}


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("srl bench COMMAND …\n")
        for name, about in COMMANDS.items():
            print(f"  {name:15}{about}")
        print("\nsrl bench COMMAND --help explains a command.")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        raise UnknownName("benchmark", arguments[0], COMMANDS, "srl bench --help lists them")
    code: int = importlib.import_module(f"srl.bench.{arguments[0].replace('-', '_')}").main(arguments[1:])
    return code
