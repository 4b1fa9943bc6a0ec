"""The RDMA devices of this machine, and whether they reach GPU memory. Read from /sys and /proc; no device is opened.

Called by launchers before anything starts, and by the transport that uses them. `choose_protocol` and `why_no_rdma` are
pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chitu.config.schema import PDDisaggregationConfig

INFINIBAND = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
ACTIVE = "ACTIVE"


@dataclass(frozen=True, slots=True)
class Rdma:
    devices: Mapping[str, str] = field(default_factory=dict)
    """State of each device's best port, by device name: `ACTIVE`, `DOWN`, `INIT`."""
    gpu_direct: str = ""
    """What gives them access to GPU memory; empty if they have none."""

    @property
    def active(self) -> list[str]:
        return [name for name, state in self.devices.items() if state == ACTIVE]


def look_at_rdma(infiniband: Path = INFINIBAND) -> Rdma:
    devices = {}
    for device in sorted(infiniband.iterdir()) if infiniband.is_dir() else ():
        states = []
        for port in (device / "ports").glob("*/state"):
            try:
                states.append(port.read_text(encoding="ascii").partition(":")[2].strip())  # `4: ACTIVE`
            except (OSError, UnicodeDecodeError):
                continue
        devices[device.name] = ACTIVE if ACTIVE in states else next(iter(states), "without a port")
    return Rdma(devices, _gpu_direct())


def has_efa(infiniband: Path = INFINIBAND) -> bool:
    """Return whether this machine has an Elastic Fabric Adapter, the RDMA device of AWS."""
    drivers = infiniband.glob("*/device/driver")
    return any(driver.resolve().name == "efa" for driver in drivers)


def _gpu_direct() -> str:
    for module in PEER_MEMORY:
        if (MODULES / module).is_dir():
            return module
    try:
        is_open = "Open Kernel Module" in DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "dma-buf" if is_open else ""


def why_no_rdma(found: Rdma, ib_device: str, has_gpus: bool = False) -> str:
    """Return why this machine cannot write over RDMA, as the end of a sentence; empty if it can. `ib_device`: names to
    use, comma separated; empty: any. `has_gpus`: whether GPU memory is written."""
    if not found.devices:
        return f"this host has no RDMA device (nothing in {INFINIBAND})"
    wanted = [name.strip() for name in ib_device.split(",") if name.strip()]
    have = ", ".join(f"{name} {state}" for name, state in found.devices.items())
    if missing := [name for name in wanted if name not in found.devices]:
        return f"pd_disaggregation.ib_device names {', '.join(missing)}, and this host has {have}"
    if not set(wanted or found.devices) & set(found.active):
        return f"no RDMA device that may be used has an active port ({have})"
    if has_gpus and not found.gpu_direct:
        return "RDMA cannot reach GPU memory here: neither nvidia_peermem nor the driver's dma-buf is there"
    return ""


def choose_protocol(pd: PDDisaggregationConfig, found: Rdma, has_gpus: bool) -> tuple[str, str]:
    """Return what Mooncake writes over from this machine, and why, as a phrase. Other nodes are assumed to be alike."""
    reason = why_no_rdma(found, pd.ib_device, has_gpus)
    if pd.mooncake_protocol == "tcp":
        return "tcp", "as the topology says"
    if reason:
        return "tcp", reason
    by = f", GPU memory by {found.gpu_direct}" if has_gpus else ""
    return "rdma", f"{', '.join(found.active)} active{by}"
