#!/bin/busybox sh
# First process of a VM, in its initramfs: load the modules, mount the host's / read-only under a writable overlay, and go
# on in vm_guest.py. The kernel's command line gives it vm.node (1 or 2), vm.guest (path of that program), vm.python.
export PATH=/bin
busybox mkdir -p /proc /sys /dev /host /changed /new
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
for word in $(busybox cat /proc/cmdline); do
    case $word in vm.*=*) word=${word#vm.} && export "vm_${word%%=*}=${word#*=}" ;; esac
done
for module in /modules/*.ko; do busybox insmod "$module" || echo "vm: cannot load $module"; done
busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host || exec busybox sh
busybox mount -t tmpfs -o size=50% tmpfs /changed
busybox mkdir /changed/upper /changed/work
busybox mount -t overlay -o lowerdir=/host,upperdir=/changed/upper,workdir=/changed/work overlay /new || exec busybox sh
busybox umount /proc
busybox mkdir -p /new/proc /new/sys /new/dev /new/run /new/tmp
busybox mount -t proc proc /new/proc
busybox mount --move /sys /new/sys
busybox mount --move /dev /new/dev
busybox mkdir -p /new/dev/shm /new/dev/pts
busybox mount -t tmpfs tmpfs /new/dev/shm
busybox mount -t devpts devpts /new/dev/pts
busybox mount -t tmpfs tmpfs /new/run
# Its own, since the host's may hold sockets and locks of processes that do not run in here.
busybox mount -t tmpfs -o mode=1777 tmpfs /new/var/tmp
exec busybox switch_root /new "$vm_python" -I "$vm_guest" "$vm_node"
