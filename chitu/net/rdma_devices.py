"""The RDMA devices of this machine, and whether they reach GPU memory. Read from /sys and /proc, and from the system's
libibverbs, which tells the devices that have a driver for programs; no device is opened.

Called by launchers before anything starts, and by the transports that use them. All but `look_at_rdma` and
`devices_of_verbs` is pure.
"""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chitu.config.schema import PDDisaggregationConfig

INFINIBAND = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
ACTIVE = "ACTIVE"
VERBS = "libibverbs.so.1"
MLX5 = "mlx5_core"
ROCE_V2 = "RoCE v2"
OVERLAYS = ("flannel", "cni", "calico", "vxlan", "docker", "tunl0")
"""Beginnings of the names of network devices that Mooncake avoids."""
PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "100.64.0.0/10")))


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port (`gid_index`)."""

    index: int
    address: str
    """IPv4 addresses as such, not in their mapped form."""
    kind: str
    """`RoCE v2`, `IB/RoCE v1`."""
    network: str
    """Network device that has the address; empty: none, as on InfiniBand."""


@dataclass(frozen=True, slots=True)
class Rdma:
    devices: Mapping[str, str] = field(default_factory=dict)
    """State of each device's best port, by device name: `ACTIVE`, `DOWN`, `INIT`."""
    gpu_direct: str = ""
    """What gives them access to GPU memory; empty if they have none."""
    ports: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Active ports by device name."""
    drivers: Mapping[str, str] = field(default_factory=dict)
    """Kernel driver of each device that has one of its own (`mlx5_core`; a software device has none)."""
    without_driver: tuple[str, ...] = ()
    """Active devices for which this machine's libibverbs has no driver."""
    gids: Mapping[str, tuple[Gid, ...]] = field(default_factory=dict)
    """Addresses of the first active port, by device name."""

    @property
    def active(self) -> list[str]:
        """Return the devices that programs can use now."""
        return [name for name, state in self.devices.items() if state == ACTIVE and name not in self.without_driver]


def devices_of_verbs() -> list[str] | None:
    """Return the devices that have a driver in the system's libibverbs; None if the library is not there."""
    try:
        library = ctypes.CDLL(VERBS)
    except OSError:
        return None
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.argtypes, library.ibv_get_device_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    library.ibv_free_device_list.argtypes, library.ibv_free_device_list.restype = [ctypes.c_void_p], None
    count = ctypes.c_int()
    found = library.ibv_get_device_list(ctypes.byref(count))
    if not found:
        return []
    names = [library.ibv_get_device_name(found[k]).decode() for k in range(count.value)]
    library.ibv_free_device_list(found)
    return names


def look_at_rdma(
    infiniband: Path = INFINIBAND, of_verbs: Callable[[], Collection[str] | None] = devices_of_verbs
) -> Rdma:
    devices: dict[str, str] = {}
    ports: dict[str, tuple[int, ...]] = {}
    drivers: dict[str, str] = {}
    gids: dict[str, tuple[Gid, ...]] = {}
    for device in sorted(infiniband.iterdir()) if infiniband.is_dir() else ():
        states = {
            int(port.name): _text(port / "state").partition(":")[2].strip() for port in _numbered(device / "ports")
        }
        ports[device.name] = tuple(port for port, state in states.items() if state == ACTIVE)
        devices[device.name] = ACTIVE if ports[device.name] else next(filter(None, states.values()), "without a port")
        if (device / "device/driver").exists():
            drivers[device.name] = (device / "device/driver").resolve().name
        if ports[device.name]:
            gids[device.name] = _gids(device / "ports" / str(ports[device.name][0]))
    active = [name for name, state in devices.items() if state == ACTIVE]
    usable = (of_verbs() or ()) if active else ()
    return Rdma(devices, _gpu_direct(), ports, drivers, tuple(name for name in active if name not in usable), gids)


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for file in _numbered(port / "gids"):
        try:
            address = ipaddress.IPv6Address(_text(file))
        except ValueError:
            continue
        if int(address):
            attributes = port / "gid_attrs"
            kind, network = _text(attributes / "types" / file.name), _text(attributes / "ndevs" / file.name)
            found.append(Gid(int(file.name), str(address.ipv4_mapped or address), kind, network))
    return tuple(found)


def _numbered(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))


def _text(path: Path) -> str:
    """Return a file of one line; the kernel refuses to read those of an unused index."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _gpu_direct() -> str:
    for module in PEER_MEMORY:
        if (MODULES / module).is_dir():
            return module
    try:
        is_open = "Open Kernel Module" in DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "dma-buf" if is_open else ""


def why_no_rdma(found: Rdma, ib_device: Sequence[str], has_gpus: bool = False) -> str:
    """Return why this machine cannot write over RDMA, as the end of a sentence; empty if it can. `ib_device`: names to
    use; empty: any. `has_gpus`: whether GPU memory is written."""
    if not found.devices:
        return f"this host has no RDMA device (nothing in {INFINIBAND})"
    have = ", ".join(f"{name} {state}" for name, state in found.devices.items())
    if missing := [name for name in ib_device if name not in found.devices]:
        return f"pd_disaggregation.ib_device names {', '.join(missing)}, and this host has {have}"
    wanted = set(ib_device or found.devices)
    if not wanted & set(found.active):
        if lacking := wanted & set(found.without_driver):
            names = ", ".join(sorted(lacking))
            return f"libibverbs has no driver for {names} (Debian: apt-get install libibverbs1 ibverbs-providers)"
        return f"no RDMA device that may be used has an active port ({have})"
    if has_gpus and not found.gpu_direct:
        return "RDMA cannot reach GPU memory here: neither nvidia_peermem nor the driver's dma-buf is there"
    return ""


def used(found: Rdma, ib_device: Sequence[str]) -> list[str]:
    """Return the active devices that may be used, all of them if `ib_device` is empty."""
    return [name for name in found.active if not ib_device or name in ib_device]


def choose_protocol(pd: PDDisaggregationConfig, found: Rdma, has_gpus: bool) -> tuple[str, str]:
    """Return what Mooncake writes over from this machine, and why, as a phrase. Other nodes are assumed to be alike."""
    reason = why_no_rdma(found, pd.ib_device, has_gpus)
    if pd.mooncake_protocol == "tcp":
        return "tcp", "as the topology says"
    if reason and pd.mooncake_protocol == "rdma":
        return "rdma", f"as the topology says, but {reason}: a node like this one refuses to start"
    if reason:
        return "tcp", reason
    by = f", GPU memory by {found.gpu_direct}" if has_gpus else ""
    return "rdma", f"{', '.join(used(found, pd.ib_device))} active{by}"


def seen_by_ucx(found: Rdma) -> Rdma:
    """Return the devices as NIXL's wheel finds them, which has libibverbs' driver for mlx5 of its own."""
    lacking = tuple(name for name in found.without_driver if found.drivers.get(name) != MLX5)
    return Rdma(found.devices, found.gpu_direct, found.ports, found.drivers, lacking, found.gids)


def choose_for_ucx(ib_device: Sequence[str], found: Rdma, has_gpus: bool, limits: Mapping[str, str]) -> str:
    """Return what NIXL writes over from this machine, and why, as a phrase. `limits`: UCX_TLS and UCX_NET_DEVICES, as
    far as they are given."""
    if limits:
        return "over what " + " ".join(f"{name}={value}" for name, value in limits.items()) + " allows"
    found = seen_by_ucx(found)
    if reason := why_no_rdma(found, ib_device, has_gpus):
        return f"over tcp ({reason})"
    return f"over rdma ({', '.join(used(found, ib_device))} active)"


def automatic_gid(gids: Sequence[Gid], library: str) -> int | None:
    """Return the `gid_index` that `library` (`mooncake` or `nixl`) takes by itself; None without an address.

    Mooncake 0.3.13 (`rdma_gid_probe.h`) and UCX 1.20 (`uct_ib_device_select_gid`) rank them differently.
    """
    rank = _rank_of_mooncake if library == "mooncake" else _rank_of_ucx
    return min(gids, key=lambda gid: (rank(gid), gid.index)).index if gids else None


def _rank_of_mooncake(gid: Gid) -> int:
    address = ipaddress.ip_address(gid.address)
    if gid.kind != ROCE_V2:
        return 0 if not gid.network else 6  # InfiniBand, or RoCE v1
    if gid.network.startswith(OVERLAYS) or (address.version == 6 and address.is_link_local):
        return 3 if gid.network else 5
    if any(address in network for network in PRIVATE):
        return 2 if gid.network else 4
    return 0 if gid.network else 1


def _rank_of_ucx(gid: Gid) -> int:
    address = ipaddress.ip_address(gid.address)
    return 3 * (gid.kind != ROCE_V2) + (address.version == 6) + (address.version == 6 and address.is_link_local)
