"""What p2pkv's tests need, brought to a machine that has no network: collected here, installed there.

Where there is a network, for the Python of the other machine::

    python tools/without_network/wheels.py collect build/carried --python 3.12 --has numpy,cmake

With ``--build-with PYTHON``, an interpreter of that version, p2pkv is built here too, which costs no time there: for a
machine of the same kind, whose C library is as new as this one's. And there, by the Python whose packages (torch, CuPy)
the tests are to see as well, and with a C++ compiler if p2pkv was not built here::

    python3 tools/without_network/wheels.py install build/carried

That makes ``.venv`` as ``make`` would; `make gpu-evidence` takes it as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TABLE = re.compile(r"^(requires|dependencies|test) = \[(.*?)\]$", re.MULTILINE | re.DOTALL)
_REQUIREMENT = re.compile(r'"([^"]+)"')
_LEFT_OUT = ("libucx",)
"""Of what is built with: without its headers p2pkv builds without the transport ucx."""
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def requirements() -> list[str]:
    """Return what p2pkv is built with, runs with and is tested with, as pyproject.toml has it."""
    found: list[str] = []
    for table in _TABLE.finditer((ROOT / "pyproject.toml").read_text()):
        found += [text for text in _REQUIREMENT.findall(table[2]) if not text.startswith(_LEFT_OUT)]
    return [*found, "cmake>=3.24", "ninja"]


def name_of(wheel: Path) -> str:
    """Return the name of a wheel's package, as people write it."""
    return wheel.name.partition("-")[0].replace("_", "-").lower()


def collect(folder: Path, python: str, has: set[str]) -> None:
    """Download wheels for another Python, but for those of packages that its machine ``has``."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = os.uname().machine
    platforms = [f"--platform={name}_{machine}" for name in _PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
    subprocess.run([*pip, f"--python-version={python}", *platforms, *requirements()], check=True)
    for wheel in folder.glob("*.whl"):
        if name_of(wheel) in has:
            wheel.unlink()
    nbytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels of {nbytes / 2**20:.0f} MiB in {folder}")


def build(folder: Path, python: Path) -> None:
    """Build p2pkv for that interpreter."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-build-") as venv:
        subprocess.run([python, "-m", "venv", venv], check=True)
        pip = [f"{venv}/bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        subprocess.run([*pip, str(ROOT)], check=True)


def install_built(pip: list[str], wheel: Path) -> None:
    """Install p2pkv as it was built; its native core lies beside the modules of this tree too, which come first."""
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if Path(name).suffix in (".so", ".pyi"):
                packed.extract(name, ROOT)


def install(folder: Path) -> None:
    """Make .venv, which sees this Python's packages too, and build p2pkv there if it was not carried."""
    venv = ROOT / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin/python"
    asks = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(
        subprocess.run([python, "-c", asks], check=True, capture_output=True, text=True).stdout.strip()
    )
    # behind its own ones, so that what was carried comes first
    (own / "packages-of-this-machine.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    pip += [f"--find-links={folder}"]
    subprocess.run([*pip, *requirements()], check=True)
    if built := list(folder.glob("p2pkv-*.whl")):
        install_built(pip, built[0])
    else:
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)], check=True)
    if shutil.which("make") is not None:  # which would look at what is older than what
        subprocess.run(["make", "--quiet", "build/python-modules"], cwd=ROOT, check=True)
    (venv / ".installed").touch()


def main() -> None:
    """Collect or install."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("collect", "install"))
    parser.add_argument("folder", type=Path, help="of the wheels")
    parser.add_argument("--python", default="3.12", help="the other machine's")
    parser.add_argument("--has", default="", help="packages that are there, with commas between them")
    parser.add_argument("--build-with", type=Path, help="an interpreter here of the other machine's version")
    options = parser.parse_args()
    if options.what == "collect":
        collect(options.folder, options.python, {name for name in options.has.split(",") if name})
        if options.build_with is not None:
            build(options.folder, options.build_with)
    else:
        install(options.folder.resolve())


if __name__ == "__main__":
    main()
