"""What the tests of rendered files share: plans made from configurations, and the files read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from launcher.render.files import compose, kubernetes, slurm
from launcher.render.plan import Device, Plan, plan
from runtime.config import Config, loading


def made(device: Device | None = None, devices: int | None = None, image: str = "", **sections: Any) -> Plan:
    raw = {"run": {"name": "a-run"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}
    return plan(loading.resolve(msgspec.convert(raw, Config)), device, devices, image)


def auto(count: int, **sections: Any) -> dict[str, Any]:
    return {"cluster": {"min_nodes": count}, **sections}


def listed(**devices: int | None) -> dict[str, Any]:
    """`cluster` with nodes by their names."""
    return {"cluster": {"nodes": [{"name": name, "devices": count} for name, count in devices.items()]}}


def reloaded(text: str, folder: Path) -> Config:
    """The configuration in a rendered file, as an agent reads it."""
    path = folder / "config.yaml"
    path.write_text(text)
    return loading.load(path)


KEPT = Path(__file__).parent / "render"  # what is rendered of PLANS; `python -m tests.unit.render_cases` renews it, to be read
SCRAPED = {"metrics": {"prometheus": {"token": {"from": "SCRAPED"}}}, "network": {"port_range": [20000, 21000]}}
VARIABLES = {"trainer": {"env": {"A": "x", "B": {"from": "HF_TOKEN"}}}}
CUDA = made("cuda", 2, **auto(3), **SCRAPED, services=VARIABLES, run={"name": "x", "resume": "auto"})
NPU = made("npu", **listed(trains=2, generates=2), services={**VARIABLES, "platform": "ascend", "coordinator": {"port": 7000}})
PLANS: dict[str, tuple[Any, Plan]] = {
    "sluice.sbatch": (slurm, NPU),
    "sluice.yaml": (kubernetes, CUDA),
    "compose.yaml": (compose, NPU),
}


def rendered(name: str) -> str:
    """A file without the configuration, in which all defaults are."""
    target, plan = PLANS[name]
    return re.sub(r"(?m)^( +)config.yaml: \|\n(?:\1 .*\n|\n)+", r"\1config.yaml: ...\n", target(plan)[name])


if __name__ == "__main__":
    for name in PLANS:
        (KEPT / f"{name}.txt").write_text(rendered(name))
