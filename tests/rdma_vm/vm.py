"""Run a command in a virtual machine with two Soft-RoCE devices: RDMA without an RDMA card, as root, anywhere.

    python tests/rdma_vm/vm.py [--timeout SECONDS] COMMAND [ARGUMENT...]

A stock Debian or Ubuntu kernel boots in QEMU (by software emulation where there is no KVM) with the host's file system
as its own, so everything installed is there at the same paths. What the command writes stays in the guest's memory and
is dropped at the end; its output arrives on standard output and its exit status is this program's. 124 and 137: the
time was up; 125: the guest died before the command ended, and its last lines follow.

``make test-rdma`` runs every test of this folder that way; another transport for RDMA adds its files beside those of
verbs. Needs what ``tools/system-packages PYTHON rdma`` installs. The kernel is the installed one if it has Soft-RoCE,
else the newest that apt has, fetched once. The boot image is kept in ``build/rdma-vm``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "rdma-vm"
# before the root file system is there, and RDMA
MODULES = [
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    *("veth", "crc32_generic", "crc32_pclmul", "ib_uverbs", "ib_umad", "rdma_ucm", "rdma_rxe"),
]
KERNEL_PACKAGES = ("linux-image-amd64", "linux-image-generic")
MEMORY_MIB = 3072
MAX_CPUS = 4
LAST_WORDS_S = 60.0
"""How long before its time is up a command is ended from within; a boot, which its time begins before, takes a part."""


def installed_kernel() -> tuple[str, Path] | None:
    """Return the version of an installed kernel that has Soft-RoCE, and the folder it is installed in."""
    for module in Path("/lib/modules").glob("*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"):
        version = module.parts[3]
        if os.access(f"/boot/vmlinuz-{version}", os.R_OK):
            return version, Path("/")
    return None


def fetched_kernel(work: Path) -> tuple[str, Path]:
    """Download and unpack the newest kernel that apt has; return its version and the folder it is in."""
    package = next(filter(None, map(_newest_kernel, KERNEL_PACKAGES)), None)
    if package is None:
        sys.exit(f"apt has none of {', '.join(KERNEL_PACKAGES)}; run apt-get update")
    print(f"rdma-vm: fetching {package}, once", file=sys.stderr)
    subprocess.run(
        ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package], cwd=work, check=True
    )
    tree = work / "tree"
    (archive,) = work.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, tree], check=True)
    return next(tree.glob("boot/vmlinuz-*")).name.removeprefix("vmlinuz-"), tree


def _newest_kernel(meta: str) -> str | None:
    told = subprocess.run(["apt-cache", "depends", meta], capture_output=True, text=True, check=False).stdout
    found = (line.split()[-1] for line in told.splitlines() if "Depends: linux-image-" in line)
    return next(found, None)


def boot_image() -> Path:
    """Return a folder with ``vmlinuz`` and ``initrd``, made if need be."""
    recipe = (HERE / "guest_init.sh").read_text() + " ".join(MODULES)
    image = CACHE / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    if not image.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            work = Path(folder)
            version, tree = installed_kernel() or fetched_kernel(work)
            print(f"rdma-vm: building the boot image for Linux {version}", file=sys.stderr)
            made = work / "image"
            _build(version, tree, made)
            if not image.exists():  # another run may have been faster
                made.rename(image)
    return image


def _build(version: str, tree: Path, image: Path) -> None:
    image.mkdir()
    root = image.parent / "initramfs"
    for folder in ("bin", "etc", "proc", "sys", "dev", "host", "memory", "root"):
        (root / folder).mkdir(parents=True)
    busybox = shutil.which("busybox") or sys.exit("busybox is missing")
    shutil.copy(busybox, root / "bin")
    shutil.copy(HERE / "guest_init.sh", root / "init")
    (root / "init").chmod(0o755)
    (root / "etc/modules").write_text(" ".join(MODULES))
    (root / "etc/busybox").write_text(busybox)
    modules = tree / "lib/modules" / version
    if not (modules / "modules.dep").exists():
        subprocess.run(["depmod", "-b", tree, version], check=True)
    for name in MODULES:
        needed = subprocess.run(
            ["modprobe", "-d", tree, "-S", version, "--show-depends", name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for line in needed.splitlines():
            kind, file, *_ = line.split()
            if kind == "insmod":  # "builtin" needs nothing
                to = root / "lib/modules" / version / file.partition(f"/{version}/")[2]
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(modules / name, root / "lib/modules" / version)
    subprocess.run(["depmod", "-b", root, version], check=True)
    files = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True).stdout
    with open(image / "initrd", "wb") as initrd:
        subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"],
            cwd=root,
            input=files,
            stdout=initrd,
            check=True,
        )
    shutil.copy(tree / f"boot/vmlinuz-{version}", image / "vmlinuz")


def accelerator() -> list[str]:
    """Return QEMU's options for KVM if it works here, else for emulation."""
    flags = Path("/proc/cpuinfo").read_text().split()
    # /dev/kvm alone proves nothing: some containers have one behind which no stock kernel boots
    if os.access("/dev/kvm", os.W_OK) and ("vmx" in flags or "svm" in flags):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]


def write_job(job: Path, command: list[str], timeout: float) -> None:
    """Write what the guest shall do, and within which time."""
    shutil.copy(HERE / "guest_run.sh", job)
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in os.environ.items()
        if name.isidentifier() and name not in ("PWD", "OLDPWD", "SHLVL", "TMPDIR")
    ]
    # before the time is up every process of the tests is asked where it stands
    limit = ["timeout", "--signal=USR1", "--kill-after=20", f"{max(timeout - LAST_WORDS_S, 1.0):g}"]
    lines = [*exports, "export RDMA_VM=1", f"cd {shlex.quote(os.getcwd())}", shlex.join([*limit, *command])]
    (job / "command").write_text("\n".join(lines) + "\n")


def qemu(image: Path, job: Path) -> list[str]:
    """Return the command that boots the guest."""
    cpus = min(len(os.sched_getaffinity(0)), MAX_CPUS)
    # panic=-1: a crash ends QEMU at once; mitigations=off: much less to emulate
    kernel = f"console=ttyS0 quiet panic=-1 oops=panic mitigations=off p2pkv.job={job}"
    shared = "security_model=none,multidevs=remap"
    return [
        "qemu-system-x86_64",
        *("-M", "q35", *accelerator(), "-smp", str(cpus), "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"), "-append", kernel),
        *("-chardev", f"file,id=console,path={job}/console", "-serial", "chardev:console"),
        *("-device", "virtio-serial-pci", "-chardev", "stdio,id=output,signal=off"),
        *("-device", "virtserialport,chardev=output,name=p2pkv.output"),
        *("-virtfs", f"local,path=/,mount_tag=host,readonly=on,{shared}"),
        *("-virtfs", f"local,path={job},mount_tag=job,security_model=none"),
    ]


def run(command: list[str], timeout: float) -> int:
    """Run ``command`` in the guest; return its exit status."""
    image = boot_image()
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as folder:
        job = Path(folder)
        write_job(job, command, timeout)
        # the pipe is never written to: at the end of its input QEMU would close the guest's output
        with (
            open(job / "qemu", "wb") as errors,
            subprocess.Popen(qemu(image, job), stdin=subprocess.PIPE, stderr=errors) as guest,
        ):
            try:
                guest.wait(timeout)
            except subprocess.TimeoutExpired:
                where = "" if (job / "ready").exists() else ", while booting"
                print(f"rdma-vm: {timeout:g} s are up{where}", file=sys.stderr)
                return 124
            finally:
                guest.kill()
        if (job / "status").exists() and (status := (job / "status").read_text().strip()):
            return int(status)
        print("rdma-vm: the guest ended before the command did", file=sys.stderr)
        for name in ("qemu", "console"):
            print("\n".join((job / name).read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
        return 125


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, for everything")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no command")
    return run(arguments.command, arguments.timeout)


if __name__ == "__main__":
    sys.exit(main())
