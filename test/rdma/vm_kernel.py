"""Pack what a VM of `virtual_machines.py` boots. `script/setup.sh --dev` calls this with Debian's kernel package.

    python test/rdma/vm_kernel.py PACKAGE TARGET

PACKAGE is the unpacked package. `TARGET/vmlinuz` is the kernel. `TARGET/initramfs` has busybox, `vm_init.sh`
and the few modules of MODULES with what they need, numbered in the order in which they are loaded. So a machine needs
no file of the kernel while it runs.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MODULES = (
    *("virtio_pci", "virtio_net", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("sch_netem", "sch_prio", "cls_u32"),
)
"""The machine's devices and file systems; soft-RoCE and its checksum; the faults of its network."""


def pack(package: Path, target: Path) -> None:
    """Write kernel and initramfs into the folder `target`."""
    image = next(package.glob("boot/vmlinuz-*"))
    version = image.name.removeprefix("vmlinuz-")
    subprocess.run(["depmod", "-b", str(package), version], check=True)
    modules = package / "lib/modules" / version
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        (tree / "bin").mkdir()
        (tree / "modules").mkdir()
        shutil.copy(shutil.which("busybox") or "/bin/busybox", tree / "bin/busybox")
        shutil.copy(HERE / "vm_init.sh", tree / "init")
        (tree / "init").chmod(0o755)
        for number, path in enumerate(_in_order(modules)):
            (tree / f"modules/{number:02}-{path.name.partition('.')[0]}.ko").write_bytes(_unpacked(modules / path))
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        command = ["cpio", "-o", "-H", "newc", "--quiet", "--reproducible"]
        archive = subprocess.run(command, cwd=tree, input=names.encode(), capture_output=True, check=True).stdout
    target.mkdir(parents=True, exist_ok=True)
    (target / "initramfs").write_bytes(gzip.compress(archive, 1))
    shutil.copy(image, target / "vmlinuz")


def _in_order(modules: Path) -> list[Path]:
    """Return the paths of MODULES and all that they need, each behind what it needs itself."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    built_in = (modules / "modules.builtin").read_text().replace("-", "_")
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for needed in reversed(needs[path]):
            add(needed)
        order[path] = None

    for name in MODULES:
        if name in by_name:
            add(by_name[name])
        elif f"/{name}.ko" not in built_in:
            raise SystemExit(f"the kernel package has no module {name}")
    return [Path(path) for path in order]


def _unpacked(path: Path) -> bytes:
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "rb") as file:
        return bytes(file.read())


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
