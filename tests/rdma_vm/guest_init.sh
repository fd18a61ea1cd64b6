#!/bin/busybox sh
# The guest's first program, in its boot image: loads the RDMA modules, mounts the host's file system read-only with
# memory on top of it, and goes on there with guest_run.sh.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
modprobe -a $(cat /etc/modules)
# loose caching: nobody changes what this guest reads while it runs
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount -t tmpfs -o size=80% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work root /root
for d in proc sys dev; do mount --move /$d /root/$d; done
read -r arguments < /root/proc/cmdline
job=${arguments##*p2pkv.job=}
exec switch_root /root "$(cat /etc/busybox)" sh "${job%% *}/guest_run.sh" "${job%% *}"
