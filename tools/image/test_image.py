"""``make test-image``: builds deploy/Dockerfile with buildah, and uses what came out as the user that it names.

buildah needs no service, and with ``--isolation chroot`` no rights that a container lacks. Where Docker's registry
can't be reached, the base image is made of the same packages by debootstrap, without what Debian leaves out of it too.
Base, layers and image are kept for the next time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE, SUITE = "docker.io/library/debian:trixie-slim", "trixie"
IMAGE = "localhost/p2pkv"
LARGEST = 200_000_000
"""The most bytes that the unpacked image may have."""
LEFT_OUT = (
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/doc",
    "var/cache/apt",
    "var/lib/apt/lists",
)
BUILD = ("--isolation", "chroot")


def main() -> None:
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} not found; apt-get install buildah debootstrap")
    if not has(BASE) and not answers("pull", "--quiet", BASE):
        make_base()
    with tempfile.TemporaryDirectory(prefix="p2pkv-image-") as folder:
        mounts = reaching_packages(Path(folder))
        buildah(
            "bud", *BUILD, "--pull-never", "--layers", *mounts, "-f", "deploy/Dockerfile", "-t", IMAGE, "."
        )
    container = buildah("from", "--pull-never", IMAGE)
    try:
        nbytes = unpacked(container)
        print(f"{IMAGE}: {nbytes:,} bytes", flush=True)
        use(container)
    finally:
        buildah("rm", container)
    if nbytes > LARGEST:
        sys.exit(f"{IMAGE} has {nbytes:,} bytes, and {LARGEST:,} are too many")


def use(container: str) -> None:
    """Run in the image what its users run; an error is this command's."""
    script = ROOT / "tools/image/use_image.py"
    mount = ("--volume", f"{script}:/run/use_image.py:ro")
    print(buildah("run", *BUILD, *mount, container, "--", "python", "/run/use_image.py"), flush=True)


def reaching_packages(folder: Path) -> list[str]:
    """Return mounts of what this machine needs to reach packages: its resolver, and certificates of its own.

    Not in their usual place, where Debian's package of them writes.
    """
    resolver, certificates = "/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"
    mounts = [f"{resolver}:{resolver}:ro"]
    if Path(certificates).is_file():
        pip_conf = folder / "pip.conf"
        pip_conf.write_text("[global]\ncert = /run/certificates.crt\n")
        mounts += [f"{certificates}:/run/certificates.crt:ro", f"{pip_conf}:/etc/pip.conf:ro"]
    return [word for mount in mounts for word in ("--volume", mount)]


def make_base() -> None:
    """Make the base image of Debian's packages."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-base-") as folder:
        run("debootstrap", "--variant=minbase", SUITE, folder)
        for left_out in LEFT_OUT:
            for path in (Path(folder) / left_out).iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, folder, "/")
        buildah("commit", "--quiet", "--rm", container, BASE)


def unpacked(container: str) -> int:
    """Return the bytes of its files."""
    told = buildah("run", *BUILD, "--user", "0", container, "--", "du", "--summarize", "--bytes", "-x", "/")
    return int(told.split()[0])


def has(image: str) -> bool:
    return answers("inspect", "--type", "image", image)


def answers(*arguments: str) -> bool:
    return subprocess.run(["buildah", *arguments], capture_output=True, check=False).returncode == 0


def buildah(*arguments: str) -> str:
    """Run it in the root of the sources; return what it prints, or end with its status."""
    return run("buildah", *arguments)


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"failed with status {done.returncode}: {' '.join(command)}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
