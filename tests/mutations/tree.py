"""A copy of the working tree with an environment of its own, in which bugs are planted one after the other.

The environment sees the libraries of the one it was made from, and p2pkv from the copy. The native build is kept, so
that a planted bug costs the compilation of the files that it changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mutations.planted import Planted

ROOT = Path(__file__).resolve().parents[2]
_BUILD_TOOLS = [
    "scikit-build-core>=0.11",
    "setuptools-scm>=8",
    "nanobind>=2.4",
    "libucx-cu12>=1.17",
    "cmake",
    "ninja",
]


class Tree:
    """The copy in ``folder``; ``refresh`` brings it to the working tree's state, ``plant`` and ``mend`` change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.python = folder / "venv/bin/python"
        self._is_stale = True  # whether the installed p2pkv was built from other sources

    def refresh(self) -> None:
        """Copy what differs, remove what is gone; make the environment if there is none, and build."""
        listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        wanted = {name for name in listed if name and (ROOT / name).is_file()}
        for name in sorted(wanted):
            target = self.source / name
            if not target.is_file() or target.read_bytes() != (ROOT / name).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        for path in [path for path in self.source.rglob("*") if path.is_file()]:
            name = str(path.relative_to(self.source))
            if name not in wanted and not name.startswith("build/") and "__pycache__" not in name:
                path.unlink()
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder / "venv")], check=True)
            libraries = next(path for path in map(Path, sys.path) if path.name == "site-packages")
            own = next((self.folder / "venv/lib").glob("python3*/site-packages"))
            # a path file inside another's folder is not read, so the editable p2pkv of that environment stays out
            (own / "libraries.pth").write_text(f"{libraries}\n")
        self._pip(*_BUILD_TOOLS)  # nothing is asked of the network once they are there
        self.build()

    def build(self) -> None:
        """Install p2pkv from the copy; only what changed is compiled."""
        self._pip("--no-deps", "--no-build-isolation", "-e", str(self.source))
        self._is_stale = False

    def plant(self, bug: Planted) -> None:
        """Put the bug into the copy, and build; raise ValueError if its patch does not fit any more."""
        self._apply(bug)
        self._is_stale = self._is_stale or bug.is_native
        self.build_for(bug)

    def mend(self, bug: Planted) -> None:
        """Take the bug out again; what was compiled with it is compiled again when somebody needs it."""
        self._apply(bug, "--reverse")
        self._is_stale = self._is_stale or bug.is_native

    def build_for(self, bug: Planted) -> None:
        """Build what the bug's hunter runs, if it is not that of the sources; native tests build themselves."""
        if self._is_stale and bug.hunter[0] != "native":
            self.build()

    def run(self, command: list[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment inside the copy; raise TimeoutExpired after ``seconds``."""
        environment = os.environ | {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.source / 'tests'}:{self.source / 'tests/support'}",
        }
        process = subprocess.Popen(
            [str(self.python), *command],
            cwd=self.source,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, 9)  # with the children that a hunter has
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, "")

    def _apply(self, bug: Planted, *options: str) -> None:
        # outside any repository git leaves a patch's paths as they are
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(self.folder)}
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *options, str(bug.path)],
            cwd=self.source,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(
                f"{bug.path.name} does not fit: {done.stderr.strip()}; make it anew with git diff"
            )

    def _pip(self, *arguments: str) -> None:
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *arguments,
        ]
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
