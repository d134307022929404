"""What the tests of rendered files share: plans made from configurations, and the files read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

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
