"""Write and check the lock files: exact versions of everything that an environment of this project holds.

    python tools/lock.py --write    resolve pyproject.toml afresh into requirements*.lock (needs the registry)
    python tools/lock.py --check    fail unless each dependency is locked, within its bounds, and installed so
    python tools/lock.py --lowest   print the lower bounds of the direct dependencies as exact pins

Each file lists what its environment adds to the one before: the package itself, the tests, the checks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = {"": "requirements.lock", "test": "requirements-test.lock", "check": "requirements-dev.lock"}
HEADER = "# Written by `make lock`; do not edit.\n"


def project() -> dict[str, list[str]]:
    """Requirements of pyproject.toml by extra; the package's own under the empty name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]
    return {"": table["dependencies"], **{extra: extras[extra] for extra in FILES if extra}}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Name to version of the ``name==version`` lines."""
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def locked() -> dict[str, dict[str, str]]:
    return {extra: pins((ROOT / file).read_text()) for extra, file in FILES.items()}


def write() -> None:
    known: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        for extra, requirements in project().items():
            held = [f"{name}=={version}" for name, version in known.items()]
            subprocess.run([*pip, "install", "--quiet", "--no-compile", *held, *requirements], check=True)
            found = pins(subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout)
            new = {normal(name): version for name, version in found.items() if normal(name) not in known}
            lines = [f"{name}=={version}\n" for name, version in sorted(new.items())]
            (ROOT / FILES[extra]).write_text(HEADER + "".join(lines))
            known.update(new)
            print(f"{FILES[extra]}: {len(lines)} packages")


def problems() -> list[str]:
    """What is wrong with the lock files, a line each."""
    from packaging.requirements import Requirement

    found: list[str] = []
    known: dict[str, str] = {}
    for extra, pinned in locked().items():
        known |= pinned
        for text in project()[extra]:
            requirement = Requirement(text)
            version = known.get(normal(requirement.name))
            if version is None:
                found.append(f"{requirement.name} is not in {FILES[extra]}; run `make lock`")
            elif version not in requirement.specifier:
                found.append(f"{requirement.name}=={version} in {FILES[extra]} is outside {requirement.specifier}")
    for name, version in known.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "nothing"
        if installed != version:
            found.append(f"{name}=={version} is locked, {installed} is installed; run `make clean` and try again")
    return found


def lowest() -> list[str]:
    """The direct dependencies of the package pinned at their lower bounds."""
    from packaging.requirements import Requirement

    result = []
    for text in project()[""]:
        requirement = Requirement(text)
        bounds = [s.version for s in requirement.specifier if s.operator == ">="]
        result += [f"{requirement.name}=={bound}" for bound in bounds]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("write", "check", "lowest"):
        action.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    if chosen.write:
        write()
    elif chosen.lowest:
        print("\n".join(lowest()))
    else:
        found = problems()
        print("\n".join(found) or "the lock files are current")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
