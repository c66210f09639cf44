"""``python -m ckptcmp`` is the program."""

import os
import subprocess
import sys

from ._binary import binary


def main() -> None:
    command = [binary(), *sys.argv[1:]]
    if os.name == "posix":
        os.execv(command[0], command)
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
