"""Configuration: how weights travel, checked without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config.loading import type_faults
from tests.unit.config_cases import TWO_ROLLOUTS, checked


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "drain"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_each_mode_goes_with_each_staleness(sound: dict[str, Any], in_flight: str, staleness: int) -> None:
    assert checked(sound, publication={"in_flight": in_flight}, training={"staleness": staleness}) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"staging": "inplace"},
            "publication.staging: no longer a key: there is one way now, what shadow was; leave the key out",
        ),
        (
            {"overlap": False},
            "publication.overlap: no longer a key: the trainer keeps a copy of what it sends in host memory, as true had it; "
            "leave the key out",
        ),
        ({"transport": "filesystem"}, "publication.transport: filesystem is no longer a value: write files"),
        (
            {"transport": "delta"},
            "publication.transport: delta is no longer a value: write encoding: delta, and transport: auto or collective",
        ),
        ({"in_flight": "auto"}, "publication.in_flight: auto is no longer a value: write keep, which it stood for"),
    ],
)
def test_what_was_removed_says_what_to_write_now(given: dict[str, Any], told: str) -> None:
    assert type_faults({"run": {"name": "x"}, "publication": given})[-1:] == [told]


@pytest.mark.parametrize(
    "changes",
    [
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}},
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}, "publication": {"transport": "shared_memory"}},
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}, "publication": {"backend": "gloo"}},
        {"services": {"trainer": {"devices": [2]}, "rollout": TWO_ROLLOUTS}, "publication": {"backend": "hccl"}},
        {"publication": {"transport": "collective"}},
        {"publication": {"backend": "nccl"}},  # each has a device of its own
    ],
)
def test_weights_may_go_past_a_shared_device(sound: dict[str, Any], changes: dict[str, Any]) -> None:
    assert checked(sound, **changes) == []


DELTAS = {"transport": "collective", "encoding": "delta", "full_every": 7, "backend": "gloo", "dtype": "bfloat16"}
FILES = {"transport": "files", "encoding": "delta", "dtype": "bfloat16"}


@pytest.mark.parametrize("settings", [DELTAS, FILES, {"transport": "files"}])
def test_weights_travel_by_a_shared_folder_or_as_deltas(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    folder = str(tmp_path / "to" / "come") if settings["transport"] == "files" else ""
    assert checked(sound, publication={**settings, "folder": folder}) == []
    if folder:
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
        assert checked(sound, publication={**settings, "folder": folder}) == [
            f"publication.folder: '{folder}' cannot be written"
        ]


@pytest.mark.parametrize(
    ("declared", "model", "wire", "told"),
    [
        ({"dtype": None, "torch_dtype": None}, "auto", "auto", "float32 (the policy's own)"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "auto", "auto", ""),
        ({"dtype": "float16"}, "auto", "auto", ""),
        ({"dtype": "bfloat16"}, "float32", "auto", "float32 (the policy's own)"),
        ({"dtype": "bfloat16"}, "auto", "float32", "float32"),
        ({}, "float32", "bfloat16", ""),
    ],
)
def test_deltas_of_float32_would_be_whole_versions(
    sound: dict[str, Any], declared: dict[str, str | None], model: str, wire: str, told: str
) -> None:
    path = Path(sound["model"]["path"]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | declared))
    faults = checked(sound, model={"dtype": model}, publication={"encoding": "delta", "dtype": wire})
    assert faults == [
        f"publication.dtype: {told} changes in nearly every element, and encoding delta would send it all; must be bfloat16"
    ] * bool(told)
    assert checked(sound, model={"dtype": model}, publication={"dtype": wire}) == []
