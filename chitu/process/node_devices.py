"""GPUs of this machine that its processes may use, found without CUDA and without torch.

Called by the launchers and by `chitu doctor`, once each, before anything starts: `nvidia-smi` answers in less than a
second and makes no context. Pure functions parse its output and other sources; only `look` runs and reads them. A
device has its name in CUDA_VISIBLE_DEVICES, so that a part of the devices can be passed on in that variable.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chitu.config.key_paths import is_number
from chitu.config.load import device_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
SLURM_INDICES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
SLURM_COUNT = "SLURM_GPUS_ON_NODE"
NOBODY = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all devices; Slurm sets the last one if a job has none."""
SMI_QUERY = ("--query-gpu=index,uuid,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 30.0
"""Timeout of nvidia-smi. Without persistence mode each call initializes the driver, which takes seconds."""
SMI_NOTHING_FOUND = 6
"""Exit code of nvidia-smi if the process may access no device, as in a Slurm job that requested none."""
PROC_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG part of a GPU."""

    token: str
    """Name in CUDA_VISIBLE_DEVICES: `3`, `GPU-...`, `MIG-...`."""
    uuid: str = ""
    name: str = ""
    """Product name such as `NVIDIA H200`; empty if unknown."""
    memory_bytes: int | None = None
    """Memory of the whole card; None if unknown, as of a MIG part."""
    is_mig: bool = False


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """Result of `look`. If `problem` is empty, all `devices` can be used."""

    devices: tuple[Device, ...]
    """Devices that this process may use, in CUDA's order: the k-th is `cuda:k` here."""
    source: str
    """Source of the list, or why there are none, as the end of a sentence."""
    is_given: bool = False
    """Whether CUDA_VISIBLE_DEVICES or Slurm chose these devices, so that they must be used."""
    problem: str = ""
    """Why GPUs that are present or were given cannot be used; a sentence with its cure."""
    num_hidden: int = 0
    """Number of GPUs of the machine that this process may not use."""

    @property
    def cards(self) -> dict[int, int]:
        """Bytes of each device by its number, if known."""
        return {k: device.memory_bytes for k, device in enumerate(self.devices) if device.memory_bytes is not None}


def look() -> NodeDevices:
    """Find the devices from the driver and the environment. Raise nothing: a failure becomes a `problem`."""
    present, how, failure = _present()
    environment = device_environment()
    found = choose(present, how, environment)
    if failure and VISIBLE not in environment and not found.problem:
        return replace(found, problem=f"{failure}: fix the driver, or serve on CPUs with {VISIBLE}= (empty)")
    return with_torch(found, *torch_build())


def choose(present: Sequence[Device], how: str, environment: Mapping[str, str]) -> NodeDevices:
    """Return those of the machine's GPUs that the environment allows. Pure. `how` names the source of `present`."""
    visible = environment.get(VISIBLE)
    if visible is not None:
        return _chosen_by_cuda(present, how, visible)
    for key in SLURM_INDICES:
        if text := environment.get(key):
            tokens = split_indices(text)
            # If Slurm blocks access to the others, those that are left count from 0, whatever their numbers are
            # outside.
            if len(tokens) == len(present):
                return NodeDevices(tuple(present), f"{how}; {key}={text}", True)
            return _picked(present, tokens, how, f"{key}={text}")
    count = environment.get(SLURM_COUNT, "")
    if is_number(count) and int(count):
        if int(count) == len(present):
            return NodeDevices(tuple(present), f"{how}; {SLURM_COUNT}={count}", True)
        source = f"{how}; {SLURM_COUNT}={count}"
        return NodeDevices(
            (), source, True, f"Slurm gave {count} of {len(present)} GPUs without their indices: set {VISIBLE}"
        )
    in_job = "SLURM_JOB_ID" in environment
    if present:
        return NodeDevices(tuple(present), how + ("; this Slurm job asked for none by itself" if in_job else ""))
    return NodeDevices((), how + ("; a Slurm job asks for some with --gpus-per-node" if in_job else ""))


def _chosen_by_cuda(present: Sequence[Device], how: str, visible: str) -> NodeDevices:
    tokens = [token.strip() for token in visible.split(",")]
    if tokens[0] in NOBODY:  # CUDA stops at the first invalid name
        return NodeDevices((), f"{VISIBLE} is {visible!r}, which hides all", num_hidden=len(present))
    return _picked(present, tokens, how, f"{VISIBLE}={visible}")


def _picked(present: Sequence[Device], tokens: Sequence[str], how: str, by: str) -> NodeDevices:
    source = f"{how}; {by}"
    if not present:
        return NodeDevices((), source, True, f"{by} gives GPUs, but {how}: unset it, or fix the driver")
    devices = []
    for token in tokens:
        matches = [device for device in present if _names(token, device)]
        if len(matches) != 1:
            what = "names no GPU" if not matches else f"names {len(matches)} GPUs"
            here = ", ".join(device.token for device in present)
            return NodeDevices((), source, True, f"{token!r} of {by} {what} of this machine ({here}): correct it")
        if matches[0] in devices:
            return NodeDevices((), source, True, f"{by} names {token} twice, and CUDA then shows none: correct it")
        devices += matches
    # Keep the given names, so that CUDA's own numbering does not matter.
    named = tuple(replace(device, token=token) for token, device in zip(tokens, devices, strict=True))
    return NodeDevices(named, source, True, num_hidden=len(present) - len(named))


def _names(token: str, device: Device) -> bool:
    """Return whether the token names the device. CUDA also takes a prefix of a UUID."""
    if is_number(token):
        return device.token == token
    return token.startswith(("GPU-", "MIG-")) and device.uuid.startswith(token)


def split_indices(text: str) -> list[str]:
    """Expand Slurm's `0,2-4` to 0, 2, 3, 4. Other words stay as they are."""
    tokens: list[str] = []
    for word in text.split(","):
        span = re.fullmatch(r"(\d+)-(\d+)", word.strip())
        tokens += [str(i) for i in range(int(span[1]), int(span[2]) + 1)] if span else [word.strip()]
    return tokens


def with_torch(found: NodeDevices, version: str | None, cuda: str | None) -> NodeDevices:
    """Return `found`, with a problem if torch cannot use the devices. `version` is None if torch is not installed."""
    if found.problem or not found.devices or cuda:
        return found
    count, name = len(found.devices), found.devices[0].name or "NVIDIA"
    what = f"torch {version} is built without CUDA" if version else "torch is not installed"
    problem = (
        f"{count} GPU{'s' * (count > 1)} ({name}) cannot be used because {what}: install a CUDA build of torch, or "
        f"serve on CPUs with {VISIBLE}= (empty)"
    )
    return replace(found, problem=problem)


# --------------------------------------------------------------------------------------- what each source says, parsed


def parse_smi(text: str) -> tuple[tuple[Device, ...], frozenset[str]]:
    """Parse the output of `nvidia-smi` with SMI_QUERY. Return the cards, and the UUIDs of those in MIG mode."""
    devices, cut = [], set()
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 5 or not row[0].strip().isdigit():
            continue
        index, uuid, name, memory, mig = (cell.strip() for cell in row)
        devices.append(Device(index, uuid, name, int(memory) << 20 if memory.isdigit() else None))
        if mig == "Enabled":
            cut.add(uuid)
    return tuple(devices), frozenset(cut)


def parse_mig(text: str, cards: Sequence[Device], cut: frozenset[str]) -> tuple[Device, ...]:
    """Return the devices of `nvidia-smi -L`, with each card in `cut` replaced by its MIG parts, which may be none."""
    parts: dict[str, list[Device]] = {}
    card = ""
    for line in text.splitlines():
        if (match := re.match(r"GPU \d+: .*\(UUID: (GPU-[\w-]+)\)", line)) is not None:
            card = match[1]
        elif (match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)) is not None:
            parts.setdefault(card, []).append(Device(match[2], match[2], f"MIG {match[1]}", None, is_mig=True))
    whole = [[device] if device.uuid not in cut else parts.get(device.uuid, []) for device in cards]
    return tuple(device for devices in whole for device in devices)


def parse_proc(texts: Sequence[str]) -> tuple[Device, ...]:
    """Parse the files `/proc/driver/nvidia/gpus/*/information`, in bus order."""
    devices = []
    for index, text in enumerate(texts):
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        uuid = fields.get("GPU UUID", "")
        devices.append(Device(str(index), "" if "?" in uuid else uuid, fields.get("Model", "")))
    return tuple(devices)


def parse_torch_version(text: str) -> tuple[str | None, str | None]:
    """Return version and CUDA version from torch's file `version.py`."""
    fields = dict(re.findall(r"^(\w+)[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return fields.get("__version__"), fields.get("cuda")


# ------------------------------------------------------------------------------------------------------------- looking


def _present() -> tuple[tuple[Device, ...], str, str]:
    """Return the machine's GPUs, the source (the end of a sentence), and what is wrong with the driver, if anything."""
    text, failure = _smi(*SMI_QUERY)
    if failure is None:
        cards, cut = parse_smi(text)
        if cut:
            listed, failure = _smi("-L")
            cards = parse_mig(listed, cards, cut)
        return cards, f"nvidia-smi lists {len(cards) or 'no GPU'}{' (MIG parts listed separately)' if cut else ''}", ""
    if failure:
        return (), failure, failure
    cards = parse_proc(list(_read_all(PROC_GPUS)))
    return cards, f"/proc/driver/nvidia lists {len(cards)}" if cards else "there is no NVIDIA driver here", ""


def _smi(*arguments: str) -> tuple[str, str | None]:
    """Return its output, and why there is none: None if there is, "" if nvidia-smi is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_TIMEOUT_S,
        )
    except FileNotFoundError:
        return "", ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi cannot be run ({error})"
    if done.returncode in (0, SMI_NOTHING_FOUND):
        return done.stdout, None
    first = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "no output")
    return "", f"nvidia-smi ends with {done.returncode} ({first})"


def _read_all(folder: Path) -> Iterator[str]:
    try:
        for path in sorted(folder.iterdir()):
            yield (path / "information").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return


def torch_build() -> tuple[str | None, str | None]:
    """Return torch's version and CUDA version. Reads a file, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        return parse_torch_version((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return importlib.metadata.version("torch"), None


def main() -> int:
    """Print the devices. Return exit code 0 if this machine has usable GPUs."""
    found = look()
    for device in found.devices:
        print(device.token, device.name, device.memory_bytes or "")
    print(found.problem or found.source)
    return 0 if found.devices and not found.problem else 1


if __name__ == "__main__":
    sys.exit(main())
