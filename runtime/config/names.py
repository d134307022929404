"""Names that stand for a whole section of the configuration: `model: tiny:FAMILY`, and `services: LAYOUT`."""

from __future__ import annotations

from typing import Any

PREFIX = "tiny:"

_SCHEMAS: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "pattern": f"^{PREFIX}", "description": "A small random model of that family for every role."},
    "services": {"type": "string", "minLength": 1, "description": "A layout, as services.preset names it."},
}


def spell_out(raw: dict[Any, Any]) -> list[str]:
    """Put sections in the place of the names; returns the faults found instead.

    `model: tiny:FAMILY` is the model of every role: of the policy and the reference, and of the critic and the reward model
    where there is one. `services: LAYOUT` is `services: {preset: LAYOUT}`.
    """
    services, model = raw.get("services"), raw.get("model")
    if isinstance(services, str):
        raw["services"] = {"preset": services}
    if isinstance(model, dict) and list(model) == ["tiny"]:  # what YAML makes of a colon with nothing, or a space, behind it
        model = f"{PREFIX} {model['tiny'] or ''}".strip()
    if not isinstance(model, str):
        return []
    from runtime.models import tiny_family

    raw["model"] = {"path": model}
    if tiny_family.described(model) is None:
        known = f"not a section of keys, nor one of {tiny_family.NAMES}"
        return [f"model: '{model}' is {known}; a folder is named by model.path"]
    rewards = raw.get("rewards")
    for section, path in ((raw.get("critic"), ""), (rewards.get("model") if isinstance(rewards, dict) else None, model)):
        if isinstance(section, dict) and "path" in section:
            section["path"] = path
    return []


def with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of the configuration, in which these sections may be names."""
    keys = schema["$defs"]["Config"]["properties"]
    for key, name in _SCHEMAS.items():
        keys[key] = {"anyOf": [keys[key], name], "description": f"A section of keys, or a name. {name['description']}"}
    return schema
