"""MindSpeed-RL's keys: the table in `keys.yaml`, and which of its sections a role has."""

from __future__ import annotations

from pathlib import Path

from launcher.importing.keys import KeyTable

ROLES = ("actor", "reference", "reward", "critic")
# By format: the section with the keys of all roles, then each role's own; later ones stand over earlier ones.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "current": {
        "actor": ("megatron_training", "actor_config"),
        "reference": ("megatron_training", "ref_config"),
        "reward": ("megatron_training", "reward_config"),
        "critic": ("megatron_training", "critic_config"),
    },
    "r1_zero": {
        "actor": ("training", "actor_rollout_ref.actor_rollout"),
        "reference": ("training", "actor_rollout_ref.ref"),
        "reward": ("training", "reward"),
        "critic": ("training", "critic"),
    },
}
# Where the keys of a section of a file are looked up in the table, one after the other; others in their own section alone.
_PLACES = {
    "model": ("megatron_training",),
    "training": ("megatron_training",),
    "actor_config": ("actor_config", "megatron_training"),
    "ref_config": ("ref_config", "megatron_training"),
    "reward_config": ("reward_config", "megatron_training"),
    "critic_config": ("critic_config", "megatron_training"),
    "vit_config": ("megatron_training",),
    "actor_rollout_ref.actor_rollout": ("actor_rollout_ref.actor_rollout", "megatron_training"),
    "actor_rollout_ref.ref": ("actor_rollout_ref.ref", "ref_config", "megatron_training"),
    "critic": ("critic", "critic_config", "megatron_training"),
    "reward": ("reward", "reward_config", "megatron_training"),
}
# Sections of the older format, some of which are called as ours are.
_OLDER = ("actor_rollout_ref.actor_rollout", "actor_rollout_ref.ref", "critic", "reward", "algorithm", "resource_pool")
TABLE = KeyTable("MindSpeed-RL", "import-mindspeed", Path(__file__).parent / "keys.yaml", _PLACES)


def named_there(path: str) -> list[str]:
    """The keys of MindSpeed-RL's current format, as SECTION.KEY, that decide our key `path`."""
    sections = {section: keys for section, keys in TABLE.sections.items() if section not in _OLDER}
    return [f"{section}.{name}" for section, keys in sections.items() for name, key in keys.items() if path in key.to]
