"""The place of the program."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

#: Names the program where it is not the one that was installed with this package.
VARIABLE = "CKPTCMP"


def binary() -> str:
    """The path of the program: ``$CKPTCMP``, or the one installed with this package, or the one on ``$PATH``.

    Raises:
        FileNotFoundError: There is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return named
    name = "ckptcmp" + (sysconfig.get_config_var("EXE") or "")
    schemes = ["posix_user", "nt_user", "osx_framework_user"]
    folders = [sysconfig.get_path("scripts")]
    folders += [sysconfig.get_path("scripts", scheme) for scheme in schemes if scheme in sysconfig.get_scheme_names()]
    # `pip install --target FOLDER` puts programs into FOLDER/bin.
    folders.append(str(Path(__file__).resolve().parent.parent / "bin"))
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"the program {name} is neither beside {sys.executable} nor on PATH; ${VARIABLE} names another one")
    return found
