"""`python -m tests.fastmtp.killable DIRECTORY`: publishes it to each URI that stdin names, in a process of its own.

Prints that process's id when it has begun, and `ended` when it has ended. Everything is imported once, so that a kill
costs a fork and no start of an interpreter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fastmtp.upload import publish
from tests.fastmtp.test_storage import entries


def main(directory: Path) -> None:
    files = entries(directory)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            publish(directory, line.strip(), "v-1", files, {})
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
