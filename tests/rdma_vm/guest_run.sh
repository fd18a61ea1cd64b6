# Process 1 of the guest in the host's file system: sets up two Soft-RoCE devices joined by a cable, rxe0 at 10.77.0.1
# and rxe1 at 10.77.0.2, runs the job's command and switches the guest off.
job=$1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
finish() { echo "$1" > "$job/status"; sync; echo b > /proc/sysrq-trigger; sleep 60; }

mkdir -p /dev/pts /dev/shm /run
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
ln -sfn /proc/self/fd /dev/fd
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none job "$job"

# Soft-RoCE lives in the first network namespace only, so both ends of the cable are in it. Without these rules Linux
# would hand a packet for one of its own addresses to lo, where no device listens. Fixed neighbours spare ARP between
# two addresses of one machine.
hostname rdma-vm
for n in all default; do
  echo 0 > /proc/sys/net/ipv4/conf/$n/rp_filter
  echo 1 > /proc/sys/net/ipv4/conf/$n/accept_local
done
ip=/sbin/ip  # busybox has an ip of its own
$ip -batch - << RULES || finish 126
link set lo up
link add veth0 mtu 9000 address 02:00:0a:4d:00:01 type veth peer name veth1 mtu 9000 address 02:00:0a:4d:00:02
addr add 10.77.0.1/24 dev veth0
addr add 10.77.0.2/24 dev veth1
link set veth0 up
link set veth1 up
neigh replace 10.77.0.1 dev veth0 lladdr 02:00:0a:4d:00:01 nud permanent
neigh replace 10.77.0.2 dev veth0 lladdr 02:00:0a:4d:00:02 nud permanent
neigh replace 10.77.0.1 dev veth1 lladdr 02:00:0a:4d:00:01 nud permanent
neigh replace 10.77.0.2 dev veth1 lladdr 02:00:0a:4d:00:02 nud permanent
route add 10.77.0.0/24 dev veth0 table 100
route add 10.77.0.0/24 dev veth1 table 101
rule add pref 10 oif veth0 lookup 100
rule add pref 11 oif veth1 lookup 101
rule add pref 20 lookup local
rule del pref 0
RULES
rdma link add rxe0 type rxe netdev veth0 || finish 126
rdma link add rxe1 type rxe netdev veth1 || finish 126
ulimit -l unlimited

echo ready > "$job/ready"
port=/dev/$(cd /sys/class/virtio-ports && for p in *; do
  [ "$(cat "$p/name")" = p2pkv.output ] && echo "$p"
done)
setsid bash "$job/command" < /dev/null > "$port" 2>&1
finish $?
