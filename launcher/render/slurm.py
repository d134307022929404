"""`sluice render slurm`: a batch script that starts an agent on each node of its allocation. No I/O.

The batch shell runs on the first node and starts the agent there itself, the others by srun: Slurm gives a signal to every
process of a step, services included, whereas a run is drained by a SIGTERM to the one agent that has the coordinator.
"""

from __future__ import annotations

import re

from launcher.render import monitoring
from launcher.render.plan import AGENT, Plan
from runtime import timeouts
from runtime.config import loading
from runtime.errors import ConfigError
from runtime.process.keys import BYTES, SECRET

# Where CANN is installed before 8.5, and from there on; what is read last comes first in the paths.
_CANN = tuple(f"/usr/local/Ascend/{name}/set_env.sh" for name in ("ascend-toolkit", "cann", "nnal/atb"))
_FIRST_NODE = "FIRST-NODE"  # which Slurm alone knows, once the job has begun
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_BODY = """
set -euo pipefail

CONFIG=${CONFIG:-$SLURM_SUBMIT_DIR/config.yaml}
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${NODES[0]}
ARGUMENTS=("${OPTIONS[@]}" "$CONFIG" "services.coordinator.host=$MASTER_ADDR" "services.coordinator.port=$MASTER_PORT")
echo "coordinator: $MASTER_ADDR:$MASTER_PORT"

bash -c "$AGENT" agent "${ARGUMENTS[@]}" &
FIRST=$!
trap 'kill -TERM "$FIRST" 2> /dev/null || :' TERM

OTHERS=
if ((${#NODES[@]} > 1)); then
    # A node that is lost, or whose agent fails, is no reason to end the others.
    COUNT=$((${#NODES[@]} - 1))
    srun --nodes="$COUNT" --ntasks="$COUNT" --ntasks-per-node=1 --exclude="$MASTER_ADDR" \\
        --cpu-bind=none --no-kill --kill-on-bad-exit=0 \\
        bash -c "$AGENT" agent "${ARGUMENTS[@]}" &
    OTHERS=$!
fi

# A signal ends `wait`, and not the agent.
CODE=0
wait "$FIRST" || CODE=$?
while kill -0 "$FIRST" 2> /dev/null; do
    CODE=0
    wait "$FIRST" || CODE=$?
done

# The other agents end with the coordinator. Slurm ends what is left when this script does.
for ((waited = 0; waited < GRACE; waited++)); do
    kill -0 "${OTHERS:-$FIRST}" 2> /dev/null || break
    sleep 1
done
exit "$CODE"
"""


def render(plan: Plan) -> dict[str, str]:
    """Text by file name. Raises ConfigError."""
    _check(plan)
    script = "".join((_head(plan), _cann(plan), _settings(plan), _BODY))
    watched = f"  {_FIRST_NODE} stands for the job's first node, which is known once it runs: squeue --jobs JOB --format %B"
    return {
        "sluice.sbatch": script,
        "config.yaml": loading.to_yaml(plan.config),
        **monitoring.render(plan.config, _FIRST_NODE, watched),
    }


def _check(plan: Plan) -> None:
    faults = []
    if len(counts := {node.devices for node in plan.nodes}) > 1:
        faults.append(
            f"cluster.nodes: devices differ ({', '.join(map(str, sorted(counts)))}); a batch script takes as many of each"
        )
    for index, node in enumerate(plan.nodes):
        if plan.named and not _HOST.fullmatch(node.name):
            faults.append(f"cluster.nodes.{index}.name: '{node.name}' is not the name of a node of Slurm's")
    if faults:
        raise ConfigError(faults)


def _head(plan: Plan) -> str:
    devices = plan.nodes[0].devices
    resource = {"cuda": f"gpu:{devices}", "npu": f"npu:{devices}"}.get(plan.device)
    lines = [
        "#!/usr/bin/env bash",
        "# Written by `sluice render slurm`. From the folder that holds it and config.yaml, with Sluice's environment active:",
        "#   sbatch sluice.sbatch                          options such as --partition or --time go before the file",
        "#   sluice status HOST:PORT                       both are in the log's first line",
        "#   scancel --batch --signal=TERM JOB             the run drains, saves a checkpoint and ends; so it does before its",
        "#                                                 time limit. Without the options all ends at once.",
        f"#SBATCH --job-name={plan.name}",
        f"#SBATCH --nodes={len(plan.nodes)}",
        *([f"#SBATCH --nodelist={','.join(node.name for node in plan.nodes)}"] if plan.named else []),
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *([f"#SBATCH --gres={resource}"] if resource and devices else []),
        "#SBATCH --no-kill",
        f"#SBATCH --signal=B:TERM@{timeouts.SLURM_NOTICE}",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
    ]
    return "\n".join(lines) + "\n"


def _cann(plan: Plan) -> str:
    """The variables of CANN and of its library ATB, by their own scripts, which do not bear `set -u`."""
    if plan.device != "npu":
        return ""
    return f"""
for file in {" ".join(_CANN)}; do
    # shellcheck disable=SC1090
    if [[ -f $file ]]; then source "$file"; fi
done
"""


def _settings(plan: Plan) -> str:
    """What differs between one run's script and another's."""
    fixed, devices = plan.config.services.coordinator.port, plan.nodes[0].devices
    lines = [
        # Jobs that share a machine, or follow each other on it, get different ports.
        f"MASTER_PORT={fixed or f'$(({plan.port} + SLURM_JOB_ID % 1000))'}",
        f"OPTIONS=({f'--devices {devices}' if devices else ''})",
        # All agents of the job know it, and nobody else: whoever has no key made of it may not call the run's processes.
        f"export {SECRET}; {SECRET}=$(od -An -v -tx1 -N{BYTES} /dev/urandom | tr -d ' \\n')",
        f"GRACE={timeouts.CONTAINER_GRACE} # seconds that the other agents have to end after the first",
        "# Each node's own shell puts in the node's name, hence the single quotes.",
        "# shellcheck disable=SC2016",
        f"""AGENT='exec torchrun {" ".join(AGENT)} --name "$SLURMD_NODENAME" "$@"'""",
    ]
    return "\n" + "\n".join(lines) + "\n"
