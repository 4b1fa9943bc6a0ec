"""`deploy/Containerfile`, built by buildah over a real Debian (by hand), and what runs in it: not as root,
and read-only but for the volumes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from network import require_network

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
USER = 10001
VOLUMES = ("/tmp", "/dev/shm", "/cache")
SERVE = ("chitu", "serve", "--first-completion", "--once", "--log-dir", "-")
READ_ONLY = f"""
set -euo pipefail
root=$1; shift
mount --make-rprivate /
for each in proc sys dev; do mount --rbind "/$each" "$root/$each"; done
mount -o remount,bind,ro "$root"
for each in /tmp /dev/shm "$CACHE"; do mount -t tmpfs -o mode=1777 tmpfs "$root$each"; done
if [ -n "$KERNELS" ]; then mkdir -m 777 "$root$CACHE/.cache"; cp -r "$KERNELS" "$root$CACHE/.cache/"; fi
ip link set lo up
exec chroot "$root" setpriv --reuid {USER} --regid {USER} --clear-groups $PRIVILEGES env -i "HOME=$CACHE" "$@"
"""
"""Runs a command in a root folder that is a mount of its own, and can be written to in the volumes only."""
MOUNTED = """
set -euo pipefail
root=$1/root checkout=$2; shift 2
mount --make-rprivate /
mount --bind / "$root"
mount -t tmpfs tmpfs "$root/opt"
mkdir -p "$root/opt/chitu" "$root/opt/cache"
mount --bind "$checkout" "$root/opt/chitu"
mount -o remount,bind,ro "$root/opt/chitu"
mount -o remount,bind,ro "$root/opt"
exec bash "${0%/*}/read_only.sh" "$root" "$@"
"""
"""Makes such a root of this machine's own, with the checkout at the image's place."""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def of(kind: str) -> list[str]:
    return [rest for word, rest in instructions() if word == kind]


def test_what_the_image_is_made_of_is_here_and_it_is_not_root() -> None:
    for words in map(str.split, of("COPY")):
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
    (user,), (entry,) = of("USER"), of("ENTRYPOINT")
    assert user == f"{USER}:{USER}" and entry == '["chitu"]'
    assert [word for word, _ in instructions()].index("USER") > max(
        number for number, (word, _) in enumerate(instructions()) if word in ("RUN", "COPY")
    )
    (volumes,) = of("VOLUME")
    assert {*re.findall(r'"(.*?)"', volumes)} == {*VOLUMES} - {"/dev/shm"}  # which the engine mounts
    assert not re.search(r"(?i)password|token|secret|_key=", CONTAINERFILE.read_text())


def test_a_number_of_cuda_that_there_is_not_ends_the_build(tmp_path: Path) -> None:
    """The line that installs, with the script that it calls in the place of the real one."""
    (line,) = (line for line in of("RUN") if "setup.sh" in line)
    script = tmp_path / "script" / "setup.sh"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "arguments:$*"\n')
    script.chmod(0o755)
    line = line.replace("/root/.cache", str(tmp_path / "cache"))
    for cuda, code, said in (("", 0, "arguments:\n"), ("13", 0, "arguments:--gpu\n"), ("11", 2, "")):
        names = {"PATH": os.environ["PATH"], "CUDA": cuda}
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=names, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def run_read_only(
    folder: Path, script: str, arguments: Sequence[str | Path], *, cache: str, privileges: str = "", kernels: str = ""
) -> subprocess.CompletedProcess[str]:
    require_network()
    (folder / "root").mkdir(exist_ok=True)
    (folder / "read_only.sh").write_text(READ_ONLY)
    (folder / "mounted.sh").write_text(MOUNTED)
    return subprocess.run(
        ["unshare", "--mount", "--net", "bash", folder / script, *arguments],
        env={**os.environ, "PRIVILEGES": privileges, "CACHE": cache, "KERNELS": kernels},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_it_serves_with_a_read_only_root(tmp_path: Path) -> None:
    """On this machine's own root, which it may read but not write; what was compiled before is in the cache."""
    if ROOT.is_relative_to("/tmp"):
        pytest.skip("the checkout is in /tmp, which is a volume of the image, and so not seen in it")
    own = "import sys; sys.argv[0] = 'chitu'; from chitu.cli import main; sys.exit(main())"
    names = {"PATH": os.environ["PATH"], "PYTHONPATH": "/opt/chitu", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [*(f"{name}={value}" for name, value in names.items()), "sh", "-c"]
    words += [f'touch /x /opt/chitu/x 2>&1; cd / && {shlex.quote(sys.executable)} -c "$0" "$@"', own, *SERVE[1:]]
    done = run_read_only(
        tmp_path,
        "mounted.sh",
        [tmp_path, ROOT, *words],
        cache="/opt/cache",
        privileges="--inh-caps=+dac_read_search --ambient-caps=+dac_read_search",
        kernels=str(kernels) if (kernels := Path.home() / ".cache" / "chitu").is_dir() else "",
    )
    assert done.returncode == 0 and "is right" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Read-only file system") == 2, done.stdout  # the planted ones alone


# -------------------------------------------------------------------------------------------------- the image itself


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the root folder of a container of the image. Its base is a Debian that debootstrap makes; pip has this
    machine's settings, and the folders that they name."""
    if absent := [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]:
        pytest.skip(f"no image can be built here, missing: {', '.join(absent)}")
    require_network()
    folder = tmp_path_factory.mktemp("image")
    storage = {"driver": "vfs", "runroot": f"{folder}/run", "graphroot": f"{folder}/graph"}
    lines = [f'{name} = "{word}"' for name, word in storage.items()]
    (folder / "storage.conf").write_text("\n".join(["[storage]", *lines, ""]))
    names = {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "BUILDAH_ISOLATION": "chroot"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **names}, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    suite = re.findall(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)[0]
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", suite, folder / "debian")
    base = run("buildah", "from", "scratch")
    run("buildah", "add", "--quiet", base, folder / "debian", "/")
    run("buildah", "commit", "--quiet", base, "localhost/debian")
    options = [f"--volume={path}:{path}:ro" for path in pip_folders(folder / "pip.conf")]
    options += [f"--volume={folder}/pip.conf:/etc/pip.conf:ro", "--build-arg=BASE=localhost/debian", "--pull=never"]
    run("buildah", "build", *options, "--file", CONTAINERFILE, "--tag", "localhost/chitu", ".")
    container = run("buildah", "from", "--pull-never", "localhost/chitu")
    root = Path(run("buildah", "mount", container))
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # as an engine does
    try:
        yield root
    finally:
        run("buildah", "umount", container)
        shutil.rmtree(folder)


def pip_folders(conf: Path) -> list[str]:
    """Write pip's settings of this machine, also those of the environment, and return the folders that they name."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {
        name: ast.literal_eval(word)
        for name, word in re.findall(r"^(?:global|:env:)\.([\w-]+)=(.*)$", told.stdout, re.M)
    }
    lines = [f"{name} = {' '.join(str(word).split())}" for name, word in settings.items()]
    conf.write_text("\n".join(["[global]", *lines, ""]))
    words = [word.removeprefix("file://") for line in lines for word in line.split()]
    paths = {str(path) for word in words if (path := Path(word)).is_absolute() and path.exists()}
    return sorted({*paths, *(str(Path(path).parent) for path in paths if path.endswith("/simple")), "/etc/ssl/certs"})


@pytest.mark.by_hand
def test_the_image_is_built_and_serves_with_a_read_only_root(image: Path, tmp_path: Path) -> None:
    """As its user, with its own torch and compiler. Nothing of this machine is in it but the kernel and localhost."""
    (path,) = (words.split("PATH=")[1].split()[0] for words in of("ENV"))
    script = 'mount --bind "$1" "$1"; exec bash "${0%/*}/read_only.sh" "$@"'
    (tmp_path / "image.sh").write_text(script)
    words = ["sh", "-c", 'id -u; touch /x /opt/chitu/x 2>&1; "$@"; find /cache -name "*.so"', "sh", *SERVE]
    done = run_read_only(tmp_path, "image.sh", [image, f"PATH={path}", *words], cache="/cache")
    assert done.returncode == 0 and "is right" in done.stdout, done.stdout + done.stderr
    assert done.stdout.startswith(f"{USER}\n") and done.stdout.count("Read-only file system") == 2, done.stdout
    assert "/cache/.cache/chitu/native-" in done.stdout.splitlines()[-1]
