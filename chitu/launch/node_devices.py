"""The GPUs of this machine that its processes may use, found without CUDA and without torch.

Called by the launchers and by `chitu doctor`, once each, before anything starts: `nvidia-smi` answers in less than a
second and makes no context. What it and others say is parsed by pure functions; `look` alone runs and reads. A device
is named as CUDA_VISIBLE_DEVICES names it, so that a part of the devices can be handed on by that variable.
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
"""Values of CUDA_VISIBLE_DEVICES that hide all; Slurm writes the last one where a job has none."""
SMI_QUERY = ("--query-gpu=index,uuid,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 30.0
"""Without persistence mode the driver is set up for each call, which takes seconds on a large machine."""
SMI_NOTHING_FOUND = 6
"""Its exit code where all devices are shut away from the process, as in a job of Slurm that asked for none."""
PROC_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG part of one."""

    token: str
    """What CUDA_VISIBLE_DEVICES calls it: `3`, `GPU-...`, `MIG-...`."""
    uuid: str = ""
    name: str = ""
    """`NVIDIA H200`; empty where unknown."""
    memory_bytes: int | None = None
    """Of the whole card; None where unknown, as of a MIG part."""
    is_mig: bool = False


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """What `look` found. Where `problem` is empty, all `devices` can be used."""

    devices: tuple[Device, ...]
    """That this process may use, in CUDA's order: the k-th is `cuda:k` here."""
    source: str
    """How that is known, or why there are none, as the end of a sentence."""
    is_given: bool = False
    """Somebody chose these devices for us (CUDA_VISIBLE_DEVICES, Slurm): it wants them used."""
    problem: str = ""
    """Why GPUs that are there, or were given to us, cannot be used; a sentence with its cure."""
    num_hidden: int = 0
    """GPUs of the machine that are not ours to use."""

    @property
    def cards(self) -> dict[int, int]:
        """Bytes of each device by its number, where they are known."""
        return {k: device.memory_bytes for k, device in enumerate(self.devices) if device.memory_bytes is not None}


def look() -> NodeDevices:
    """Ask the driver and the environment. Raises nothing: what cannot be found out is a `problem`."""
    present, how, failure = _present()
    environment = device_environment()
    found = choose(present, how, environment)
    if failure and VISIBLE not in environment and not found.problem:
        return replace(found, problem=f"{failure}: mend the driver, or serve on CPUs with {VISIBLE}= (empty)")
    return with_torch(found, *torch_build())


def choose(present: Sequence[Device], how: str, environment: Mapping[str, str]) -> NodeDevices:
    """Those of the machine's GPUs that the environment leaves to us. Pure. `how`: what named `present`."""
    visible = environment.get(VISIBLE)
    if visible is not None:
        return _chosen_by_cuda(present, how, visible)
    for key in SLURM_INDICES:
        if text := environment.get(key):
            tokens = split_indices(text)
            # Where Slurm shuts the others away, those that are left count from 0, whatever they are called outside.
            if len(tokens) == len(present):
                return NodeDevices(tuple(present), f"{how}; {key}={text}", True)
            return _picked(present, tokens, how, f"{key}={text}")
    count = environment.get(SLURM_COUNT, "")
    if is_number(count) and int(count):
        if int(count) == len(present):
            return NodeDevices(tuple(present), f"{how}; {SLURM_COUNT}={count}", True)
        source = f"{how}; {SLURM_COUNT}={count}"
        return NodeDevices(
            (), source, True, f"Slurm gave {count} of {len(present)} GPUs and does not say which: set {VISIBLE}"
        )
    in_job = "SLURM_JOB_ID" in environment
    if present:
        return NodeDevices(tuple(present), how + ("; this Slurm job asked for none by itself" if in_job else ""))
    return NodeDevices((), how + ("; a Slurm job asks for some with --gpus-per-node" if in_job else ""))


def _chosen_by_cuda(present: Sequence[Device], how: str, visible: str) -> NodeDevices:
    tokens = [token.strip() for token in visible.split(",")]
    if tokens[0] in NOBODY:  # CUDA stops at the first one that names nothing
        return NodeDevices((), f"{VISIBLE} is {visible!r}, which hides all", num_hidden=len(present))
    return _picked(present, tokens, how, f"{VISIBLE}={visible}")


def _picked(present: Sequence[Device], tokens: Sequence[str], how: str, by: str) -> NodeDevices:
    source = f"{how}; {by}"
    if not present:
        return NodeDevices((), source, True, f"{by} gives GPUs, but {how}: unset it, or mend the driver")
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
    # Named as before: the order of CUDA's own numbers is its business.
    named = tuple(replace(device, token=token) for token, device in zip(tokens, devices, strict=True))
    return NodeDevices(named, source, True, num_hidden=len(present) - len(named))


def _names(token: str, device: Device) -> bool:
    """CUDA takes the beginning of a UUID, too."""
    if is_number(token):
        return device.token == token
    return token.startswith(("GPU-", "MIG-")) and device.uuid.startswith(token)


def split_indices(text: str) -> list[str]:
    """Slurm's `0,2-4` -> 0, 2, 3, 4. What is no number stays as it is."""
    tokens: list[str] = []
    for word in text.split(","):
        span = re.fullmatch(r"(\d+)-(\d+)", word.strip())
        tokens += [str(i) for i in range(int(span[1]), int(span[2]) + 1)] if span else [word.strip()]
    return tokens


def with_torch(found: NodeDevices, version: str | None, cuda: str | None) -> NodeDevices:
    """`found`, with the problem that torch cannot use them. `version`: None where torch is not installed."""
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
    """The lines of `nvidia-smi` with SMI_QUERY, and the UUIDs of those cards that are cut by MIG."""
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
    """The devices of `nvidia-smi -L`: in place of a card in `cut` its MIG parts, which may be none."""
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
    """The files `/proc/driver/nvidia/gpus/*/information`, in the order of the bus."""
    devices = []
    for index, text in enumerate(texts):
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        uuid = fields.get("GPU UUID", "")
        devices.append(Device(str(index), "" if "?" in uuid else uuid, fields.get("Model", "")))
    return tuple(devices)


def parse_torch_version(text: str) -> tuple[str | None, str | None]:
    """Version and CUDA version of torch's file `version.py`."""
    fields = dict(re.findall(r"^(\w+)[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return fields.get("__version__"), fields.get("cuda")


# ------------------------------------------------------------------------------------------------------------- looking


def _present() -> tuple[tuple[Device, ...], str, str]:
    """The machine's GPUs, how that is known (the end of a sentence), and what is wrong with the driver, if anything."""
    text, failure = _smi(*SMI_QUERY)
    if failure is None:
        cards, cut = parse_smi(text)
        if cut:
            listed, failure = _smi("-L")
            cards = parse_mig(listed, cards, cut)
        return cards, f"nvidia-smi lists {len(cards) or 'no GPU'}{' (MIG parts each for itself)' if cut else ''}", ""
    if failure:
        return (), failure, failure
    cards = parse_proc(list(_read_all(PROC_GPUS)))
    return cards, f"/proc/driver/nvidia lists {len(cards)}" if cards else "there is no NVIDIA driver here", ""


def _smi(*arguments: str) -> tuple[str, str | None]:
    """Its output, and why there is none: None where there is, empty where there is no nvidia-smi."""
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
        return "", f"nvidia-smi cannot be asked ({error})"
    if done.returncode in (0, SMI_NOTHING_FOUND):
        return done.stdout, None
    first = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "no word")
    return "", f"nvidia-smi ends with {done.returncode} ({first})"


def _read_all(folder: Path) -> Iterator[str]:
    try:
        for path in sorted(folder.iterdir()):
            yield (path / "information").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return


def torch_build() -> tuple[str | None, str | None]:
    """Read, not imported: torch takes seconds, and the launcher computes nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        return parse_torch_version((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return importlib.metadata.version("torch"), None


def main() -> int:
    """Exit code 0 where this machine has GPUs that can be used."""
    found = look()
    for device in found.devices:
        print(device.token, device.name, device.memory_bytes or "")
    print(found.problem or found.source)
    return 0 if found.devices and not found.problem else 1


if __name__ == "__main__":
    sys.exit(main())
