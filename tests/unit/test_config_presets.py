"""Presets of the section `algorithm`: what they fill in, and which faults are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.loading import preset_names, resolve, to_yaml
from tests.unit.config_cases import Loading, faults_of


class TestPresets:
    def test_fills_what_the_user_leaves_out(self, loading: Loading) -> None:
        text = "run: {name: a}\nalgorithm: {preset: dr_grpo, clip_low: 0.1}"
        config = loading(text, "algorithm.clip_high=0.28").algorithm
        assert (config.preset, config.group_std, config.aggregation) == ("dr_grpo", "none", "dr_grpo")
        assert (config.clip_low, config.clip_high) == (0.1, 0.28)  # the second is the schema's default, but said
        assert loading("run: {name: a}", "algorithm.preset=dr_grpo").algorithm.clip_high == 0.2

    def test_every_packaged_one_is_sound(self, loading: Loading, sound: dict[str, Any]) -> None:
        from launcher.registered_names import known_names

        assert len(preset_names("algorithm.preset")) >= 7
        for name in preset_names("algorithm.preset"):
            config = loading("run: {name: a}", f"algorithm.preset={name}")
            known = {key: names for key, names in known_names().items() if key.startswith(("algorithm", "critic"))}
            sections: dict[str, Any] = {"algorithm": msgspec.to_builtins(config.algorithm)}
            if config.algorithm.advantage in known["critic"]:
                sections["critic"] = {}
            checked_config = msgspec.convert(sound | sections, Config)
            assert semantic_faults(resolve(checked_config), known, 1 << 40) == [], name

    def test_a_file_of_ones_own(self, loading: Loading, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("loss: ppo\nclip_low: 0.5\n")
        config = loading("run: {name: a}", f"algorithm.preset={tmp_path}/mine.yaml").algorithm
        assert (config.loss, config.clip_low) == ("ppo", 0.5)

    def test_a_resolved_file_outlives_its_preset(self, loading: Loading, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("loss: ppo\n")
        first = loading("run: {name: a}", f"algorithm.preset={path}")
        path.unlink()
        assert loading(to_yaml(first)) == first

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("los: ppo", "{path}: los: unknown key; nearest is 'loss'"),
            ("clip_low: -1", "{path}: clip_low: -1 is not a finite number >= 0"),
            ("preset: grpo", "{path}: names a preset itself; they do not nest"),
            ("", "{path}: empty; at least one key of section algorithm is needed"),
            (None, "{path}: no such file or directory"),
        ],
    )
    def test_faults_name_the_presets_file(self, loading: Loading, tmp_path: Path, text: str | None, said: str) -> None:
        path = tmp_path / "mine.yaml"
        if text is not None:
            path.write_text(text)
        assert faults_of(loading, "run: {name: a}", f"algorithm.preset={path}") == [
            f"algorithm.preset: {said.format(path=path)}"
        ]

    def test_an_unknown_name(self, loading: Loading) -> None:
        (fault,) = faults_of(loading, "run: {name: a}", "algorithm.preset=dpo")
        assert (
            fault
            == f"algorithm.preset: 'dpo' is not one of {', '.join(preset_names('algorithm.preset'))}, nor a path to FILE.yaml"
        )

    def test_a_preset_of_the_wrong_type(self, loading: Loading) -> None:
        assert faults_of(loading, "run: {name: a}", "algorithm.preset=5") == [
            "algorithm.preset: 5 is not a string; put it in quotes"
        ]
