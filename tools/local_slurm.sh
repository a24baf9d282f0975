#!/usr/bin/env bash
# A real Slurm on one machine: a controller and two nodes, node1 and node2, of four CPUs
# each.
#
#   bash tools/local_slurm.sh start    start it, unless it is running
#   bash tools/local_slurm.sh status   exit code 0 if it is running, otherwise 1
#   bash tools/local_slurm.sh stop     end its jobs and itself, and remove its folder
#
# It works on Debian and Ubuntu, as root and without systemd. It installs nothing. All
# that it writes is in one folder ($LOCAL_CLUSTER, or /run/local_cluster). It listens on
# the loopback interface only, on three ports ($LOCAL_CLUSTER_PORT, or 16817, and the
# next two) that are not Slurm's usual ones. Slurm's commands find it through the
# variable SLURM_CONF, so another Slurm on this machine is neither used nor disturbed.
#
# Slurm finds a job's processes by control groups, as on most clusters, or by their
# parents: LOCAL_CLUSTER_PROCTRACK=cgroup, the default, or linuxproc. The two differ in
# which processes get a signal. Without control groups (version 1) it uses linuxproc.
set -euo pipefail

folder=$(realpath -m -- "${LOCAL_CLUSTER:-/run/local_cluster}")
export SLURM_CONF=$folder/slurm.conf
mark="# written by local_slurm.sh"
port=${LOCAL_CLUSTER_PORT:-16817}
# the controller's port, and those of the two nodes
ports=("$port" $((port + 1)) $((port + 2)))
# The nodes of two clusters must have different names: the control groups of their jobs
# are named after node and job, so to cancel a job of one could kill a job of the other.
node=node
[ "$port" = 16817 ] || node=node$port-
freezer=/sys/fs/cgroup/freezer # the control groups that Slurm finds processes by
tracking=${LOCAL_CLUSTER_PROCTRACK:-cgroup}

fail() {
  echo "local_slurm.sh: error: $*" >&2
  exit 2
}

runs() {
  [ -e "$SLURM_CONF" ] && scontrol ping 2>/dev/null | grep -q "is UP"
}

idle() { # both nodes have reported to the controller
  local nodes
  nodes=$(sinfo --noheader --responding --Node --states=idle,alloc,mix --format=%N \
    2>/dev/null | sort -u | wc -l)
  [ "$nodes" = 2 ]
}

# Wait up to so many seconds until a command succeeds.
await() {
  local end=$((SECONDS + $1))
  until "${@:2}"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.1
  done
}

# The processes of Slurm and munge that hold a file in the folder open: its daemons, and
# the slurmstepd of each job step. A process in a container on this machine is not
# meant: its files are others, although their names may be the same.
members() {
  local pid pids
  pids=$(find /proc/[0-9]*/fd -lname "$folder/*" 2>/dev/null | cut -d/ -f3 | sort -un)
  for pid in $pids; do
    if [[ $(cat "/proc/$pid/comm" 2>/dev/null) =~ ^(slurm|munged) ]] &&
      [ "$(readlink "/proc/$pid/ns/mnt")" = "$(readlink /proc/self/ns/mnt)" ]; then
      echo "$pid"
    fi
  done
}

# The members and their descendants, such as the tasks.
family() {
  local found more
  more=$(members)
  found=$more
  while [ -n "$more" ]; do
    more=$(pgrep -d, -P "$(echo "$more" | paste -sd,)" | tr , '\n' || true)
    found=$(printf '%s\n%s' "$found" "$more")
  done
  echo "$found" | sed '/^$/d'
}

alone() {
  [ -z "$(members)" ]
}

unused() {
  [ -z "$(squeue --noheader 2>/dev/null)" ]
}

stop() {
  local all name
  [ -e "$folder" ] || return 0
  [ "$(stat -c %u "$folder")" = 0 ] || fail "$folder does not belong to root"
  grep -qx "$mark" "$SLURM_CONF" 2>/dev/null ||
    fail "$folder was not made by this script"
  if runs; then
    squeue --noheader --format=%A | xargs -r scancel --full
    await 10 unused || true
  fi
  # If the controller had died before, there still are tasks.
  all=$(family)
  echo "$all" | xargs -r kill 2>/dev/null || true
  await 10 alone || true
  echo "$all" | xargs -r kill -9 2>/dev/null || true # what has not ended is stuck
  name=$(sed -n 's/^NodeName=\([^[]*\)\[.*/\1/p' "$SLURM_CONF")
  # Slurm leaves its control groups behind, empty.
  find "$freezer/slurm_$name"[12] -depth -type d -exec rmdir {} + 2>/dev/null || true
  rm -rf "$folder"
}

# Authentication: munge signs all of Slurm's messages. This is a munge of our own, with
# a new key.
start_munge() {
  install -d -m 700 -o munge -g munge "$folder/key"
  install -d -m 755 -o munge -g munge "$folder/munge"
  (umask 077 && head -c 128 /dev/urandom >"$folder/key/munge.key")
  chown munge: "$folder/key/munge.key"
  runuser -u munge -- munged \
    --key-file="$folder/key/munge.key" --seed-file="$folder/key/seed" \
    --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/key/log"
}

# The whole configuration. A real cluster's looks like this one, with a NodeName for
# each kind of machine. In addition it has limits (task/cgroup), accounting, GPUs
# (GresTypes=gpu, Gres=gpu:4) and a SlurmUser that is not root.
write_configuration() {
  local host plugin
  host=$(uname -n | cut -d. -f1)
  plugin=cgroup/v1
  if ! grep -q " $freezer cgroup rw" /proc/mounts; then
    # Many machines, containers for instance, do not let Slurm have any. Until version
    # 24, slurmd looks for them even if nothing uses them.
    [ "$(slurmd -V | sed 's/.* \([0-9]*\)\..*/\1/')" -lt 24 ] || plugin=disabled
    if [ "$tracking" = cgroup ]; then
      tracking=linuxproc
      echo "no control groups of version 1 for Slurm here: it uses linuxproc" >&2
    fi
  fi
  echo "CgroupPlugin=$plugin" >"$folder/cgroup.conf"
  cat >"$SLURM_CONF" <<EOF
$mark
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
# the first job's number: our job files take the port of their ranks from it, so that of
# a second cluster on this machine must be far from that of the first
FirstJobId=${LOCAL_CLUSTER_FIRST_JOB:-1}
# authentication; a requeued job waits until its credential has expired, here for 10
# seconds and not for two minutes
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=10
# listen on the address of this machine's name, not on all of its addresses
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/$tracking
TaskPlugin=task/none
# jobs share a node; each of its CPUs belongs to one job
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# four CPUs per node, whatever the machine has; a node that comes back is used again
SlurmdParameters=config_overrides
ReturnToService=2
# a job starts again only if its file has --requeue, as on many clusters
JobRequeue=0
# seconds between SIGTERM and SIGKILL, by default 30: enough to save a checkpoint here
KillWait=15
# wait a minute for an answer, not 10 seconds: the machine may be busy with the jobs
MessageTimeout=60
# look for jobs that can start every two seconds, not every minute
SchedulerParameters=sched_interval=2
MailProg=/bin/true
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
# two nodes, which are both this machine; their names cannot be resolved
NodeName=$node[1-2] NodeHostname=$host NodeAddr=127.0.0.1 \
  Port=[${ports[1]}-${ports[2]}] CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=240 State=UP
# a job in this partition (sbatch --partition=urgent) takes the nodes away from jobs in
# the other one, which are requeued
PartitionName=urgent Nodes=ALL MaxTime=240 PriorityTier=2 State=UP
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EOF
}

start() {
  local address program port
  for program in munged slurmctld slurmd srun; do
    command -v "$program" >/dev/null || fail "$program is missing;" \
      "type: apt-get install slurmctld slurmd slurm-client munge"
  done
  if runs && await 60 idle; then
    echo "it is running already"
  else
    stop # what a crash left
    address=$(getent ahostsv4 "$(uname -n)" | awk 'NR == 1 { print $1 }')
    [ "$address" = 127.0.0.1 ] ||
      fail "it would listen beyond the loopback interface; type:" \
        "echo 127.0.0.1 $(uname -n) >>/etc/hosts"
    for port in "${ports[@]}"; do
      if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        fail "port $port is in use"
      fi
    done
    trap 'give_up interrupted' INT TERM
    install -d -m 755 "$folder" "$folder/state"
    write_configuration
    {
      start_munge && slurmctld && slurmd -N "${node}1" && slurmd -N "${node}2"
    } >"$folder/start.log" 2>&1 </dev/null 9<&- || give_up
    # a node that cannot register at once tries again after 1, 2, 4, ... seconds
    await 120 idle || give_up
    trap - INT TERM
    echo "started"
  fi
  echo "two nodes, ${node}1 and ${node}2; to use them, type:" \
    "export SLURM_CONF=$SLURM_CONF"
}

give_up() {
  tail -n 5 "$folder"/*.log >&2
  stop
  fail "it did not start (${1:-the ends of its logs are above})"
}

[ $# = 1 ] || fail "name one of start, status and stop"
[[ $tracking =~ ^(cgroup|linuxproc)$ ]] ||
  fail "LOCAL_CLUSTER_PROCTRACK is $tracking, not cgroup or linuxproc"
[ "$(id -u)" = 0 ] || fail "it needs root; type: sudo bash $0 $1"
# Only one of these scripts at a time. The lock leaves no file.
exec 9<"$(dirname "$folder")"
flock -w 120 9 || fail "another one of these scripts is running"
case $1 in
  start) start ;;
  status) if runs; then sinfo; else echo "it is not running" && exit 1; fi ;;
  stop) stop && echo "stopped" ;;
  *) fail "$1 is not one of start, status and stop" ;;
esac
