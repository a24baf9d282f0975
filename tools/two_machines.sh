#!/usr/bin/env bash
# Two machines, made of this one: two network namespaces with a cable between them.
#
#   bash tools/two_machines.sh start           make machine1 and machine2
#   bash tools/two_machines.sh on 1 COMMAND    run a command on machine1, `bash` say
#   bash tools/two_machines.sh hosts loopback  each name means 127.0.1.1 on its machine
#   bash tools/two_machines.sh hosts apart     no machine knows the name of the other
#   bash tools/two_machines.sh hosts eth0      both names are known, as in the beginning
#   bash tools/two_machines.sh cable out       pull the cable; `in` plugs it in again
#   bash tools/two_machines.sh stop            end what runs on them, and remove them
#
# Each has a host name, an /etc/hosts and an interface eth0 of its own, with the address
# 10.0.0.1 or 10.0.0.2. They share this machine's disk and processors, and reach nothing
# but each other. It works on Linux as root, with ip and with nft, which can give a
# machine a firewall. $TWO_MACHINES, instead of `machine`, begins the names of the
# namespaces, so that several pairs can exist.
set -euo pipefail

pair=${TWO_MACHINES:-machine}

fail() {
  echo "two_machines.sh: error: $*" >&2
  exit 2
}

hosts() {
  local n address other
  for n in 1 2; do
    address=10.0.0.$n other=$((3 - n))
    [ "$1" != loopback ] || address=127.0.1.1
    other="10.0.0.$other machine$other"
    [ "$1" != apart ] || other=
    printf '%s\n' '127.0.0.1 localhost' "$address machine$n" ${other:+"$other"} \
      >"/etc/netns/$pair$n/hosts"
  done
}

start() {
  local n
  [ "$(id -u)" = 0 ] || fail "network namespaces need root"
  command -v ip >/dev/null && command -v nft >/dev/null ||
    fail "no ip or no nft here: apt-get install iproute2 nftables"
  ! ip netns pids "${pair}1" >/dev/null 2>&1 || fail "the machines are already there"
  trap stop EXIT # unless all of this works
  for n in 1 2; do
    ip netns add "$pair$n" || fail "network namespaces are not allowed here"
    mkdir -p "/etc/netns/$pair$n" # `ip netns exec` puts its files over those of /etc
    echo 'hosts: files' >"/etc/netns/$pair$n/nsswitch.conf" # there is no name server
  done
  ip netns exec "${pair}1" nft list ruleset || fail "nft does not work here"
  ip link add eth0 netns "${pair}1" type veth peer name eth0 netns "${pair}2"
  for n in 1 2; do
    ip -n "$pair$n" address add "10.0.0.$n/24" dev eth0
    ip -n "$pair$n" link set lo up
    ip -n "$pair$n" link set eth0 up
  done
  for _ in {1..100}; do # the two ends need a moment to notice each other
    ! ip -n "${pair}2" -brief link show eth0 | grep -q ' UP ' || break
    sleep 0.05
  done
  hosts eth0
  trap - EXIT
}

on() {
  local n=$1
  shift
  ip netns pids "$pair$n" >/dev/null 2>&1 || fail "start the machines first"
  exec ip netns exec "$pair$n" unshare --uts -- \
    sh -c "hostname machine$n && exec \"\$@\"" sh "$@"
}

cable() {
  local state=up
  [ "$1" = in ] || state=down
  ip -n "${pair}2" link set eth0 "$state"
}

stop() {
  local n
  for n in 1 2; do
    ip netns pids "$pair$n" 2>/dev/null | xargs --no-run-if-empty kill -9 || true
    ip netns delete "$pair$n" 2>/dev/null || true
    rm -rf "/etc/netns/${pair:?}$n"
  done
}

case "${1:-} ${2:-}" in
"start " | "stop " | "hosts eth0" | "hosts loopback" | "hosts apart" | "cable in" | "cable out") "$@" ;;
"on 1" | "on 2") [ $# -gt 2 ] && "$@" || fail "on $2: which command?" ;;
*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
