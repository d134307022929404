"""Every pair of transport, encoding and mode: what rollouts generate with is bit for bit what the trainer sent."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from tests.loopback.test_rollout_staging import SLOTS, Models, Site, run, until
from tests.unit.test_rollout_in_flight import versions

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """In bfloat16, and versions 1 and 2 differ in few elements, so that a delta is smaller than the whole."""
    made = Models(tmp_path_factory.mktemp("models"))
    specs = tuple(replace(spec, dtype="bfloat16") for spec in made.manifest.tensors)
    made.manifest = replace(made.manifest, tensors=specs)
    made.weights[2].load_state_dict(made.weights[1].state_dict())
    with torch.no_grad():
        for parameter in made.weights[2].parameters():
            parameter.view(-1)[:3] += 1.0
    return made


TRANSPORTS, ENCODINGS, MODES = ("shared_memory", "collective"), ("whole", "delta"), ("keep", "recompute", "drain")
TOKENS = 120  # of a sample: at `test_rollout_staging.SLOW` seconds each, longer than a weight sync takes


@pytest.mark.parametrize(
    ("transport", "encoding", "in_flight"),
    [(transport, ENCODINGS[(t + m) % 2], mode) for t, transport in enumerate(TRANSPORTS) for m, mode in enumerate(MODES)],
)
def test_a_version_arrives_bit_for_bit(models: Models, transport: str, encoding: str, in_flight: str) -> None:
    async def test(site: Site) -> None:
        await site.join()
        for step in (1, 2):
            site.finish_group.clear()
            groups, began = site.generate(2 * SLOTS, limit=TOKENS), site.engine.stats().decode_steps
            await until(lambda began=began: site.engine.stats().decode_steps - began >= 3)
            before = site.group.sent_bytes
            publishing = site.publish_later(step)
            if in_flight == "drain":
                await until(lambda: site.engine.held)
                site.finish_group.set()
            await publishing
            took = site.group.sent_bytes - before
            whole = sum(bucket.nbytes for _, bucket in site.sender.own)
            assert took < whole / 2 if (encoding, step) == ("delta", 2) else took >= whole
            held, sent = dict(site.engine._decoder.weights._views), models.weights[step].named_parameters()
            assert all(
                torch.equal(held[name].reshape(tensor.shape), tensor.detach().bfloat16().float()) for name, tensor in sent
            )
            found = [versions(await group)[0] for group in groups]
            across = [step - 1] if in_flight == "drain" else [step - 1, step]
            assert found == [across] * SLOTS + [[step]] * SLOTS

    run(models, test, transport=transport, encoding=encoding, in_flight=in_flight)
