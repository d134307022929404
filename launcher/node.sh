#!/usr/bin/env bash
# Starts this machine's agent from the variables that MindSpeed-RL's scripts set, the same command on every machine:
#
#   NNODES=2 NPUS_PER_NODE=8 MASTER_ADDR=10.1.0.1 CURRENT_IP=10.1.0.2 NODE_RANK=1 bash launcher/node.sh CONFIG [key=value ...]
#
#   NNODES          how many machines there are; the run starts once all have come
#   NPUS_PER_NODE   accelerators of this machine; 0 on CPUs
#   MASTER_ADDR     the machine that runs the coordinator as well, by an address that all others reach
#   MASTER_PORT     the coordinator's port there (29400)
#   CURRENT_IP      this machine's own address
#   NODE_RANK       the index of this machine, from 0 on: its name is node-NODE_RANK
#
# Settings of the run go into the configuration, which must be the same on all machines. Settings of this machine go into the
# agent's options. Exit code 2: a variable is missing or wrong.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

number() { # NAME SMALLEST
    local value=${!1-}
    [[ -n $value ]] || fail "$1: not set; must be an integer of at least $2"
    [[ $value =~ ^(0|[1-9][0-9]{0,8})$ && $value -ge $2 ]] || fail "$1: '$value' is not an integer of at least $2"
}

host() { # NAME PATTERN WHAT
    local value=${!1-}
    [[ -n $value ]] || fail "$1: not set; must be $3"
    [[ $value =~ $2 ]] || fail "$1: '$value' is not $3"
}

MASTER_PORT=${MASTER_PORT-29400}
number NNODES 1
number NPUS_PER_NODE 0
number MASTER_PORT 1
number NODE_RANK 0
ipv6='[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*'
host MASTER_ADDR "^([A-Za-z0-9][A-Za-z0-9.-]*|$ipv6)$" "a host's name or address"
host CURRENT_IP "^([0-9]{1,3}(\.[0-9]{1,3}){3}|$ipv6)$" "this machine's address, such as 10.1.0.2 or fd00:1::2"
((MASTER_PORT < 65536)) || fail "MASTER_PORT: '$MASTER_PORT' is not a port; the largest is 65535"
((NODE_RANK < NNODES)) || fail "NODE_RANK: '$NODE_RANK' is not below NNODES, which is $NNODES"
if ((NNODES > 1)) && [[ $MASTER_ADDR == localhost || $MASTER_ADDR == 127.* || $MASTER_ADDR == ::1 ]]; then
    fail "MASTER_ADDR: '$MASTER_ADDR' is loopback; must be an address that all NNODES=$NNODES machines reach"
fi
[[ $# -ge 1 ]] || fail "CONFIG: not given; bash launcher/node.sh CONFIG [key=value ...]"

config=$1
shift
exec torchrun --rdzv-backend sluice --nproc-per-node 1 --max-restarts 0 -m sluice.node \
    --name "node-$NODE_RANK" --address "$CURRENT_IP" --devices "$NPUS_PER_NODE" "$config" \
    "cluster.min_nodes=$NNODES" "services.coordinator.host=$MASTER_ADDR" "services.coordinator.port=$MASTER_PORT" "$@"
