#!/usr/bin/env bash
# Create .venv with what chitu needs to run; --dev also installs what its tests need (tools, a browser, Slurm, QEMU,
# NIXL, promtool); --gpu installs for GPUs where there is none, as an image is built.
# Idempotent; a second run takes a second. A .venv that has the tests' tools keeps them up to date.
# Requires Python 3.11 to 3.14 (Mooncake: to 3.13, with CUDA 13 to 3.14) and pip's package index.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
left_out=$(mktemp)
trap 'sed "s/^/setup: /" "$left_out" >&2; rm -f "$left_out"' EXIT
leave_out() { printf '%s\n' "$*" >>"$left_out"; } # said at the end, where it is seen

level=run for_gpu=""
for argument; do
    case "$argument" in
        --dev) level=dev ;;
        --gpu) for_gpu=yes ;;
        *) fail "unknown argument $argument: there are only --dev and --gpu" ;;
    esac
done

# ------------------------------------------------------------------------------------------------------------- python
python_ok() { # from 3.11, up to 3.$2
    "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, ${2:-14}))" 2>/dev/null
}
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
has_cuda_torch() { "$1" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
has_gpu() { # or .venv was created on a node with one
    [ -n "$for_gpu" ] || grep -qs ' gpu$' .venv/chitu-setup.stamp || command -v nvidia-smi >/dev/null || has_cuda_torch "$1"
}

find_python() {
    local name newest without_venv=""
    [ -z "${PYTHON:-}" ] || python_ok "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 to 3.14"
    for newest in ${PYTHON:+14} 13 14; do
        for name in "${PYTHON:-python3}" python3.12 python3.13 python3.11 python3.14 python; do
            command -v "$name" >/dev/null && python_ok "$name" "$newest" || continue
            if has_venv "$name"; then echo "$name"; return; fi
            without_venv=$name
        done
    done
    [ -z "$without_venv" ] || fail "$without_venv cannot make virtual environments: install its venv package" \
        "(Debian, Ubuntu: apt-get install python3-venv) and run this again"
    fail "there is no Python 3.11 to 3.14 on PATH: install one (or set PYTHON=/path/to/python3) and run this again"
}

# ---------------------------------------------------------------------------------- shared libraries of Mooncake's wheel
declare -A PACKAGE_OF=([libibverbs.so.1]=libibverbs1 [libnuma.so.1]=libnuma1 [libcurl.so.4]=libcurl4)
missing_packages() { # names of the Debian packages whose library cannot be loaded
    local library
    for library in "${!PACKAGE_OF[@]}"; do
        "$1" -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || echo "${PACKAGE_OF[$library]}"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
can_apt() { command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; }

LOCK_WAIT_S=600
apt() { # quiet; waits for another apt, such as the upgrade that a new machine runs by itself
    local errors is_said="" end_s=$((SECONDS + LOCK_WAIT_S))
    while ! errors=$(as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -qq "$@" 2>&1 </dev/null); do
        [[ $errors == *"get lock"* || $errors == *"Unable to lock"* ]] || return 1
        ((SECONDS < end_s)) || { leave_out "apt-get $1: another process held apt's lock for $LOCK_WAIT_S s"; return 1; }
        [ -n "$is_said" ] || say "waiting until another process gives apt's lock back"
        is_said=yes
        sleep 3
    done
}

apt_install() { # best effort; package lists are fetched if the packages are not in them
    local install=(install -y --no-install-recommends)
    apt "${install[@]}" "$@" || { apt update && apt "${install[@]}" "$@"; } || true
}

install_libraries() { # best effort: everything except the Mooncake transport works without them
    local python=$1 missing
    ! has_gpu "$python" || PACKAGE_OF[libmlx5.so.1]=ibverbs-providers # of the wheels with CUDA
    if ! python_ok "$python" 13 && ! has_gpu "$python"; then
        leave_out "the Mooncake transport is left out, it has no wheel for $("$python" --version); for it, set PYTHON to a" \
            "Python 3.11 to 3.13 and run this again without .venv"
        return 0
    fi
    missing=$(missing_packages "$python" | sort | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    if can_apt; then
        say "installing ${missing}(for Mooncake)"
        # shellcheck disable=SC2086
        apt_install $missing
    fi
    missing=$(missing_packages "$python" | sort | tr '\n' ' ')
    [ -z "$missing" ] || leave_out "the Mooncake transport is left out, its libraries are missing; for it, install" \
        "${missing% } (Debian, Ubuntu: apt-get install ${missing% }) and run this again"
}

install_providers() { # best effort: beside them, as on every host with RDMA, NIXL's tests see two of its libraries
    "$1" -c 'import ctypes; ctypes.CDLL("libefa.so.1")' 2>/dev/null || ! can_apt || apt_install ibverbs-providers
}

# ----------------------------------------------------------------------------------------- browser of the web page's tests
find_browser() { # a Chromium that runs: Ubuntu's chromium-browser may only report that it needs a snap
    local name
    for name in ${CHROMIUM:-chromium google-chrome google-chrome-stable chromium-browser}; do
        "$name" --version >/dev/null 2>&1 && return
    done
    return 1
}

install_browser() { # best effort: everything except test/web works without it
    ! find_browser || return 0
    if can_apt; then
        say "installing chromium (for the tests of the web page)"
        apt_install chromium
    fi
    find_browser || leave_out "test/web is left out, there is no browser; for it, install chromium or Google Chrome" \
        "(Debian: apt-get install chromium; elsewhere: .venv/bin/playwright install --with-deps chromium)"
}

# ------------------------------------------------------------------------------------------------ Slurm for its own tests
missing_slurm() { # names of missing Debian packages that test/slurm needs
    local tool
    for tool in slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge ip:iproute2 curl:curl; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null || echo "${tool#*:}"
    done
}

install_slurm() { # best effort: everything except test/slurm works without it
    local missing
    missing=$(missing_slurm | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    # Only in containers and in CI: elsewhere a service manager might start the daemons, or the machine has its own Slurm.
    if can_apt && { [ "${CI:-}" = true ] || [ ! -d /run/systemd/system ]; } && ! command -v srun >/dev/null; then
        say "installing ${missing}(for the tests of the Slurm scripts)"
        # shellcheck disable=SC2086
        apt_install $missing
    fi
    missing=$(missing_slurm | tr '\n' ' ')
    [ -z "$missing" ] || leave_out "test/slurm is left out, it needs Slurm's daemons and curl (Debian, Ubuntu: apt-get install" \
        "${missing% })"
}

# ------------------------------------------------------------------------------- QEMU and a kernel for the tests of RDMA
missing_qemu() { # names of missing Debian packages that test/rdma needs
    local tool
    for tool in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod rdma:iproute2 cc:gcc; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null || echo "${tool#*:}"
    done
    [ -e /etc/libibverbs.d/rxe.driver ] || echo ibverbs-providers
    [ -e /usr/include/infiniband/verbs.h ] || echo libibverbs-dev
}

install_qemu() { # best effort, on a PC processor: everything except test/rdma works without it
    [ "$(uname -m)" = x86_64 ] || return 0
    local missing
    missing=$(missing_qemu | tr '\n' ' ')
    if [ -n "$missing" ] && can_apt; then
        say "installing ${missing}(for the tests of RDMA between virtual machines)"
        # shellcheck disable=SC2086
        apt_install $missing
        missing=$(missing_qemu | tr '\n' ' ')
    fi
    [ -z "$missing" ] || leave_out "test/rdma is left out, it needs QEMU and tools (Debian: apt-get install ${missing% })"
}

install_vm_kernel() { # best effort; Debian's kernel is unpacked, and what the machines boot is kept: 10 MB
    [ "$(uname -m)" = x86_64 ] && [ -z "$(missing_qemu)" ] || return 0
    local hash folder
    hash=$(cat test/rdma/vm_kernel.py test/rdma/vm_init.sh | sha256sum | cut -d' ' -f1)
    [ "$(cat .venv/vm/stamp 2>/dev/null)" != "$hash" ] || return 0
    say "fetching a kernel (70 MB, for the tests of RDMA between virtual machines)"
    folder=$(mktemp -d)
    fetch_kernel() { # the package of linux-image-amd64 that has the kernel
        local name
        name=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
        [ -n "$name" ] && apt-get -o APT::Sandbox::User="$(id -un)" download "$name"
    }
    (cd "$folder" && { fetch_kernel || { apt update && fetch_kernel; }; } && dpkg-deb -x linux-image-*.deb .) \
        >/dev/null 2>&1 </dev/null &&
        PATH=$PATH:/usr/sbin:/sbin .venv/bin/python test/rdma/vm_kernel.py "$folder" .venv/vm &&
        echo "$hash" >.venv/vm/stamp ||
        leave_out "test/rdma is left out, there is no kernel package (Debian's linux-image-amd64) for its virtual machines"
    rm -rf "$folder"
}

# ----------------------------------------------------------------------------------- Prometheus' tool for deploy/ of it
install_promtool() { # best effort; the package is unpacked, not installed, so that its server does not start
    [ ! -x .venv/bin/promtool ] && ! command -v promtool >/dev/null && can_apt || return 0
    say "fetching promtool (for the tests of deploy/)"
    local folder
    folder=$(mktemp -d)
    fetch() { apt-get download promtool || apt-get download prometheus; } # newer releases have it by itself
    (cd "$folder" && { fetch || { apt update && fetch; }; }) >/dev/null 2>&1 </dev/null &&
        dpkg-deb --fsys-tarfile "$folder"/prom*.deb | tar -xO ./usr/bin/promtool >"$folder/promtool" &&
        install -m 755 "$folder/promtool" .venv/bin/promtool || leave_out "tests of deploy/ are left out, there is no promtool"
    rm -rf "$folder"
}

# ------------------------------------------------------------------------------------------ clients that nobody here wrote
install_clients() { # best effort, only in CI, if missing: 0.5 GB. It can import what .venv has, mainly torch.
    [ "${CI:-}" = true ] || [ -d .venv/clients ] || return 0
    local hash
    hash=$(cat requirements/clients.txt script/setup.sh | sha256sum | cut -d' ' -f1)
    [ "$(cat .venv/clients/chitu-setup.stamp 2>/dev/null)" != "$hash" ] || return 0
    say "installing clients for test/clients"
    .venv/bin/python -m venv --clear --without-pip --system-site-packages .venv/clients &&
        .venv/bin/python - .venv/clients/bin/python <<'EOF' &&
import pathlib, subprocess, sys, sysconfig
code = "import sysconfig; print(sysconfig.get_path('purelib'))"
own = subprocess.run([sys.argv[1], "-c", code], capture_output=True, text=True, check=True).stdout.strip()
line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
pathlib.Path(own, "zz-chitu.pth").write_text(line, encoding="utf-8")
EOF
        # Compiled on import, since most of their files are never imported.
        .venv/bin/python -m pip --quiet --disable-pip-version-check --python .venv/clients/bin/python install \
            --no-deps --no-compile --only-binary :all: --requirement requirements/clients.txt >&2 &&
        echo "$hash" >.venv/clients/chitu-setup.stamp || {
        rm -rf .venv/clients
        leave_out "test/clients is left out, its clients could not be installed"
    }
}

# --------------------------------------------------------------------------------------------------------------- .venv
compile_sources() { # as pip does with the files it copies; else each process of a first start does it
    .venv/bin/python -m compileall -q -j 0 chitu || true
}

if [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null && python_ok .venv/bin/python; then
    python=.venv/bin/python
else
    python=$(find_python)
fi
install_libraries "$python"
if [ $level = dev ]; then
    install_providers "$python"
    install_browser
    install_slurm
    install_qemu
fi

kind=cpu
! has_gpu "$python" || kind=gpu
inputs="$(cat setup.py requirements/*.txt script/setup.sh; pwd; missing_packages "$python" | sort)"
hash=$(printf '%s' "$inputs" | sha256sum | cut -d' ' -f1)
read -r old_hash old_level old_kind 2>/dev/null <.venv/chitu-setup.stamp || old_hash="" old_level="" old_kind=""
if [ "$python" = .venv/bin/python ]; then
    [ "$old_level" != dev ] || level=dev # keep what is installed
    if [ "$old_hash $old_level $old_kind" = "$hash $level $kind" ]; then
        [ $level != dev ] || { install_clients; install_promtool; install_vm_kernel; }
        compile_sources
        say ".venv is up to date"
        exit 0
    fi
else
    options=()
    if has_cuda_torch "$python"; then
        options=(--system-site-packages)
        say "using the CUDA torch of $python"
    fi
    say "making .venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "${options[@]}" .venv
fi

[ $level != dev ] || { install_clients; install_promtool; install_vm_kernel; } & # in parallel, since they need nothing from the rest
clients=$!

names_index() { .venv/bin/python -m pip config list 2>/dev/null | grep -E '(index-url|find-links|no-index)' >/dev/null; }
uv="" # does not read pip's settings
names_index || grep -qi '^include-system-site-packages *= *true' .venv/pyvenv.cfg || uv=$(command -v uv) || true

exec 3>&2
pip_install() { # with bars on a terminal, else a line per download
    local pip=(.venv/bin/python -m pip --disable-pip-version-check install)
    if [ -n "$uv" ]; then
        "$uv" pip install --python .venv/bin/python "$@" >&3 2>&3
    elif [ -t 3 ]; then
        "${pip[@]}" "$@" >&3
    else
        "${pip[@]}" "$@" | sed -un 's/^ *\(Downloading\|Processing\) /setup:   \1 /p' >&3
    fi
}

TORCH=2.13.0 CPU_INDEX=https://download.pytorch.org/whl/cpu
install_cpu_torch() { # for x86_64, PyPI has the build with CUDA only, and torch's own index has both
    local index=()
    names_index || index=(--extra-index-url "$CPU_INDEX")
    say "installing torch for the CPU (0.2 GB to download, if an index has it)"
    PIP_RETRIES=1 pip_install "${index[@]}" "torch==$TORCH+cpu" 2>/dev/null && return
    say "no index has torch's build for the CPU, so the one with CUDA follows: 2.9 GB to download, 5 GB of disk." \
        "For 0.2 GB: stop this, then PIP_EXTRA_INDEX_URL=$CPU_INDEX script/setup.sh"
    [ ! -t 2 ] || sleep 5
    pip_install "torch==$TORCH"
}

nixl=nixl mooncake=mooncake mooncake_python=13 # NIXL's wheel runs without a GPU, too; Mooncake's with CUDA does not
if [ $kind = gpu ]; then
    constraints=requirements/constraints.txt
    .venv/bin/python -c 'import torch' 2>/dev/null || pip_install --constraint "$constraints" torch
    case "$(.venv/bin/python -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null)" in
        12.*) nixl=nixl-cuda12 mooncake=mooncake-cuda12 ;;
        13.*) mooncake=mooncake-cuda13 mooncake_python=14 ;;
    esac
else
    constraints=requirements/constraints-cpu.txt
    .venv/bin/python -c 'import torch' 2>/dev/null || install_cpu_torch
fi

extras=""
[ $level = run ] || extras=dev,$nixl
! python_ok .venv/bin/python $mooncake_python || [ -n "$(missing_packages .venv/bin/python)" ] || extras+=${extras:+,}$mooncake
say "installing chitu${extras:+ with $extras}"
pip_install --constraint "$constraints" --editable ".${extras:+[$extras]}"
wait "$clients"
compile_sources
echo "$hash $level $kind" >.venv/chitu-setup.stamp
say "done: .venv/bin/chitu"
