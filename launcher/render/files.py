"""`sluice render`: the files that start a run's nodes under Slurm, Kubernetes or Docker Compose, and its monitoring files. A
YAML template is rendered, read, and written anew below its first comment. So a template may have short forms and further
comments, and no name in a plan acts as YAML."""

from __future__ import annotations

import argparse
import json
import math
import re
import secrets
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import yaml
from msgspec import Struct
from msgspec.structs import replace

from launcher.render.plan import AGENT, CONFIG_PATH, HOME, LONGEST_LABEL, RETURNS, Plan, check_names, plan, shared_folder
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.errors import ConfigError, UserError
from runtime.process import keys
from runtime.process.network import host_port, own_address

_HERE = Path(__file__).parent
_COLUMNS, _WIDTH, _HEIGHT = 2, 12, 8  # of panels, in Grafana's grid, which is 24 wide
_FIRST_NODE = "FIRST-NODE"  # only Slurm knows it, once the job has begun
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# ---- Slurm
# The batch shell runs on the first node, and starts the agent there itself, the others by srun. Slurm sends a signal to every
# process of a step, services included; but a run is drained by a SIGTERM to the coordinator's agent alone.


def slurm(plan: Plan) -> dict[str, str]:
    """Render a batch script that starts an agent on each node of its allocation: text by file name. Raises ConfigError."""
    faults = []
    if len(counts := {node.devices for node in plan.nodes}) > 1:
        faults.append(f"cluster.nodes: devices differ ({', '.join(map(str, sorted(counts)))}); must be equal in a batch script")
    for index, node in enumerate(plan.nodes):
        if plan.named and not _HOST.fullmatch(node.name):
            faults.append(f"cluster.nodes.{index}.name: '{node.name}' is not a name of a Slurm node")
    if faults:
        raise ConfigError(faults)
    script = _text("sluice.sbatch", plan=plan, devices=plan.nodes[0].devices)
    watched = f"{_FIRST_NODE} stands for the job's first node, which is known once it runs: squeue --jobs JOB --format %B"
    files = {"sluice.sbatch": script, "config.yaml": loading.to_yaml(plan.config)}
    return {**files, **monitoring(plan.config, _FIRST_NODE, watched)}


# ---- Compose


def compose(plan: Plan) -> dict[str, str]:
    """Render a Compose file, one service for each node, all on one machine: text by file name. Raises ConfigError."""
    names = [node.name for node in plan.nodes] if plan.named else [f"node-{index}" for index in range(len(plan.nodes))]
    check_names(names, "in Compose")
    nodes, first = [], 0  # first: the machine's first accelerator without a node
    for name, node in zip(names, plan.nodes, strict=True):
        nodes.append((name, range(first, first + node.devices)))
        first += node.devices
    text = _yaml("compose.yaml", plan=plan, nodes=nodes, host=names[0], shared=shared_folder(plan.config))
    files = {"compose.yaml": text, "config.yaml": loading.to_yaml(plan.placed_at(names[0]))}
    watched = f"From the network {plan.name}_nodes, in which the containers have their names."
    return {**files, **monitoring(plan.config, names[0], watched)}


# ---- Kubernetes
# Nodes are pods of Indexed Jobs (batch/v1). A Job ends with the run; a StatefulSet always starts its pods again. A Job's pods
# have stable host names, and keep them when they come back. A JobSet would give the same, but needs a controller that not every
# cluster has. The coordinator's node is a Job of its own: it alone serves at a known port, and restarts differently. The other
# nodes are one Job, whose completions and parallelism may change while the run goes on. Nodes that the configuration names are
# a Job each.


class _JobNodes(Struct, frozen=True):
    """Nodes of one Job. `agent`: the name of their agents; $(NODE_INDEX) is a pod's index in the Job."""

    job: str
    agent: str
    count: int
    devices: int  # of each
    leads: bool = False  # runs the coordinator


def kubernetes(plan: Plan, claim: str = "") -> dict[str, str]:
    """Render manifests: text by file name. `claim`: of the nodes' shared volume; "" claims a new one. Raises ConfigError."""
    groups = _groups(plan)
    host = f"{groups[0].job}-0.{plan.name}"
    text = _yaml(
        "sluice.yaml",
        plan=plan,
        groups=groups,
        claim=claim,
        host=host,
        config=loading.to_yaml(plan.placed_at(host)),
        shared=shared_folder(plan.config),
        starts=math.ceil(plan.start_seconds / 10),
    )
    watched = "From pods with the label app.kubernetes.io/name: prometheus, in the namespace of the run or in `monitoring`."
    return {"sluice.yaml": text, **monitoring(plan.config, host, watched)}


def secret(plan: Plan, digits: str) -> dict[str, str]:
    """Render the secret by which the pods know each other, hexadecimal `digits`: text by file name."""
    return {"secret.yaml": _yaml("secret.yaml", plan=plan, digits=digits)}


def _groups(plan: Plan) -> list[_JobNodes]:
    """Return the groups of nodes, the coordinator's node first. Raises ConfigError if a name cannot name a host."""
    if plan.named:
        check_names([node.name for node in plan.nodes], "in Kubernetes")
        named = [_JobNodes(f"{plan.name}-{node.name}", node.name, 1, node.devices) for node in plan.nodes]
        groups = [replace(named[0], leads=True), *named[1:]]
    else:
        devices, others = plan.nodes[0].devices, len(plan.nodes) - 1
        groups = [_JobNodes(f"{plan.name}-first", "first", 1, devices, leads=True)]
        if others:
            groups.append(_JobNodes(f"{plan.name}-others", "other-$(NODE_INDEX)", others, devices))
    for group in groups:
        if len(host := f"{group.job}-{group.count - 1}") > LONGEST_LABEL:
            raise ConfigError([f"run.name: too long: '{host}' names a host, and has more than {LONGEST_LABEL} characters"])
    return groups


# ---- Prometheus and Grafana


def monitoring(config: Config, host: str, note: str = "") -> dict[str, str]:
    """Render what Prometheus needs to watch a run: the address to ask, alerts.yaml, and a dashboard for Grafana (panels.yaml).
    Text by file name; nothing if no metrics are served. `host`: the coordinator's. `note`: a comment on the address."""
    settings = config.metrics.prometheus
    if settings is None:
        return {}
    url = f"http://{host_port(host, settings.port)}/sd"
    text = _yaml("prometheus.yaml", url=url, interval="15s", note=note, token=settings.token, token_file="sluice.token")
    alerts = (_HERE / "alerts.yaml").read_text(encoding="utf-8")
    return {"prometheus.yaml": text, "alerts.yaml": alerts, "grafana.json": _dashboard()}


def _dashboard() -> str:
    source = {"type": "prometheus", "uid": "${datasource}"}
    query = {"query": "label_values(sluice_run_step, run)", "refId": "run"}
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {"name": "run", "type": "query", "datasource": source, "query": query, "refresh": 2, "sort": 1},
    ]
    panels = yaml.safe_load((_HERE / "panels.yaml").read_text(encoding="utf-8"))
    document = {
        "uid": "sluice",
        "title": "Sluice",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [{**_panel(index, panel), "datasource": source} for index, panel in enumerate(panels)],
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(index: int, panel: dict[str, Any]) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    lines = [(expr.replace("RUN", 'run="$run"'), legend) for expr, legend in panel["lines"].items()]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel["title"],
        "gridPos": {"x": _WIDTH * column, "y": _HEIGHT * row, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "targets": [{"refId": chr(65 + at), "expr": expr, "legendFormat": legend} for at, (expr, legend) in enumerate(lines)],
    }


# ---- Templates


def _agent(name: str, devices: int, *more: str) -> list[str]:
    """Return the arguments of torchrun that start a node's agent."""
    return [*AGENT, "--name", name, *more, *(["--devices", str(devices)] if devices else []), CONFIG_PATH]


def _quoted(value: Any) -> str:
    """Return a text, or a list of texts, as YAML on one line, at any place in a file."""
    return yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf).strip()


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    comment_start_string="<#",  # in place of {#, which bash uses for lengths
    comment_end_string="#>",
)
_TEMPLATES.filters["quoted"] = _quoted
_TEMPLATES.globals |= {"agent": _agent, "AGENT": AGENT, "CONFIG_PATH": CONFIG_PATH, "HOME": HOME, "RETURNS": RETURNS}
_TEMPLATES.globals |= {"SECRET": keys.SECRET, "BYTES": keys.BYTES, "timeouts": timeouts}


def _text(name: str, **values: Any) -> str:
    return _TEMPLATES.get_template(f"{name}.j2").render(values)


class _FileDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


# Files within files stay readable.
_FileDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def _yaml(name: str, **values: Any) -> str:
    text = _text(name, **values)
    comment = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    documents = yaml.safe_load_all(text)
    return comment + yaml.dump_all(documents, Dumper=_FileDumper, sort_keys=False, allow_unicode=True, width=120)


# ---- The command


def run(options: argparse.Namespace) -> None:
    for path in render(options):
        print(path)


def render(options: argparse.Namespace) -> list[Path]:
    """Write the files, and return them. Raises UserError."""
    config = loading.resolve(loading.load(options.config, options.overrides))
    if options.target == "prometheus":
        return _write(_watched(config), {}, options.output or Path("rendered") / options.target)
    made = plan(config, options.device, options.devices, getattr(options, "image", ""))
    private: dict[str, str] = {}
    if options.target == "slurm":
        texts = slurm(made)
    elif options.target == "kubernetes":
        texts, private = kubernetes(made, options.claim), secret(made, secrets.token_hex(keys.BYTES))
    else:
        texts = compose(made)
    return _write(texts, private, options.output or Path("rendered") / options.target)


def _watched(config: Config) -> dict[str, str]:
    """Render the monitoring of a run that is started by hand. Raises UserError."""
    settings, coordinator = config.metrics.prometheus, config.services.coordinator
    if settings is None or not settings.port:
        raise ConfigError(["metrics.prometheus.port: missing; must be a port at which Prometheus finds the coordinator"])
    return monitoring(config, coordinator.host or own_address(config.network.interface))


def _write(texts: dict[str, str], private: dict[str, str], folder: Path) -> list[Path]:
    """Write the files. A file that differs is not overwritten: raises UserError. A `private` file is written only once."""
    paths = {folder / name: text for name, text in texts.items()}
    try:
        for path, text in paths.items():
            if path.exists() and path.read_text() != text:
                raise UserError(f"--output: {path} is there and differs; remove it, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text)
        for name, text in private.items():
            if not (folder / name).exists():
                run_files.write_private(folder / name, text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--output: cannot write to {folder}: {error}") from error
    return [*paths, *(folder / name for name in private)]
