"""Weight syncs to a rollout's service with the embedded engine, over real gloo: while it generates, and while its memory comes
and goes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime import config
from runtime.commands import AbortWeights, CommitWeights, JoinWeights, Level, Priority, ReceiveWeights, SetLevel
from runtime.errors import Cancelled, InvalidMessage, SluiceError
from runtime.process.waiting import in_thread
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, PolicyVersion
from runtime.weights.plan import Manifest, TensorSpec
from runtime.weights.sender import SendBuffers, WeightGroup, open_rendezvous
from services.rollout import RolloutService
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.loopback.weight_cases import machines_of, settles, shards_of, soon, unhosted
from tests.unit.actor_desk import running
from tests.unit.rollout_cases import from_scratch, request, samples
from tests.unit.test_rollout_in_flight import versions
from tests.unit.tiny_models import save_model

DEADLINE = 60.0
SLOTS = 3
BUCKET = 8 << 10  # bytes, so that the model takes several
SLOW = 0.05  # seconds of a step, so that no sample ends before something is done to it


def version(step: int) -> PolicyVersion:
    return PolicyVersion(0, step)


class Models:
    """`weights[step]` are those of version `step`, and the folder's are of version 0."""

    def __init__(self, folder: Path):
        self.path = folder / "0"
        self.weights = [save_model(folder / str(seed), seed=seed) for seed in range(5)]
        named = [(name, tuple(each.shape)) for name, each in self.weights[0].named_parameters()]
        self.manifest = Manifest(tuple(TensorSpec(name, "float32", shape) for name, shape in named), BUCKET)

    def gather(self, sender: SendBuffers, step: int) -> None:
        sender.begin(version(step), DEADLINE)
        sender.fill(shards_of(self.weights[step].parameters()))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Site:
    """The trainer's side of weight syncs to one rollout, whose service is here behind its actor."""

    def __init__(self, models: Models, **weight_sync: Any):
        self.models = models
        self.transport = weight_sync.get("transport", "collective")
        self.full_every = 50 if weight_sync.get("encoding") == "delta" else 0
        settings = config.WeightSyncConfig(**{"transfer_timeout": DEADLINE, **weight_sync})
        self.service = RolloutService(config.Config(run=config.Run(name="test"), weight_sync=settings), "rollout-0", 0)
        self.engine = TorchRolloutEngine(
            str(models.path), device=torch.device("cpu"), dtype=torch.float32, slots=SLOTS, max_model_len=256
        )
        self.service.use(self.engine)
        self.finish_group = threading.Event()
        self.finish_group.set()
        self._step, self._swap = self.engine._step, self.engine.swap
        self.engine._step, self.engine.swap = self._slow_step, self._swap_and_hurry  # type: ignore[method-assign]
        self.actor = self.service._actor
        self.sender = SendBuffers(models.manifest, takes_changes=self.full_every > 0)
        self.group: WeightGroup
        self.epoch = 0
        self._asked = 0

    def _slow_step(self) -> None:
        self.finish_group.wait(SLOW)
        self._step()

    async def _swap_and_hurry(self, *arguments: Any) -> None:
        await self._swap(*arguments)
        self.finish_group.set()

    def ask(self, message: Any) -> asyncio.Future[Any]:
        return self.actor.send(message, priority=Priority.CONTROL)

    async def join(self, manifest: Manifest | None = None) -> None:
        """A new epoch."""
        self.epoch += 1
        told = {"machines": machines_of(self.transport, 1, 2), "full_every": self.full_every}
        pending = open_rendezvous(unhosted(2, DEADLINE, epoch=self.epoch, **told), "127.0.0.1", name="trainer")
        joined = self.ask(JoinWeights(replace(pending.address, rank=1), manifest or self.models.manifest))
        self.group = await asyncio.wrap_future(in_thread("host", pending.connect))
        await joined

    def receive(self, step: int) -> asyncio.Future[Any]:
        return self.ask(ReceiveWeights(version(step), self.epoch))

    async def transfer(self, step: int) -> None:
        """As far as it is verified."""
        received = self.receive(step)
        self.models.gather(self.sender, step)
        await asyncio.wrap_future(self.sender.send(self.group, version(step), DEADLINE))
        await received

    async def commit(self, step: int) -> float:
        return (await self.ask(CommitWeights(version(step), self.epoch))).pause_seconds

    async def publish(self, step: int) -> float:
        await self.transfer(step)
        return await self.commit(step)

    def publish_later(self, step: int) -> asyncio.Future[float]:
        return asyncio.ensure_future(self.publish(step))

    async def break_off(self, step: int, buckets: int) -> None:
        """Send the first so many buckets, then leave; the coordinator tells the rollout."""
        received = self.receive(step)
        self.models.gather(self.sender, step)

        def send() -> None:
            self.group.announce(version(step))
            link = self.group.way(0, 0)
            for index, buffer in enumerate(self.sender.buffers[:buckets]):
                link.describe(self.group.tags.tag(index, self.group.tags.digest(buffer), version(step)), None)
                link.send(index, buffer)(soon())

        await asyncio.wrap_future(in_thread("send", send))
        self.group.abort()
        with pytest.raises(SluiceError):
            await received
        await self.ask(AbortWeights(version(step), self.epoch))

    def generate(self, count: int = 1, n: int = 1, limit: int = 200) -> list[asyncio.Future[GeneratedGroup]]:
        self._asked += count
        return [self.actor.send(request(number, n=n, limit=limit)) for number in range(self._asked - count, self._asked)]

    async def busy(self) -> list[asyncio.Future[GeneratedGroup]]:
        """All slots taken, until the next swap or `hurry`, and as much again waiting."""
        self.finish_group.clear()
        groups = self.generate(2 * SLOTS)
        steps = self.engine.stats().decode_steps
        await until(lambda: self.engine.stats().decode_steps - steps >= 3)
        return groups

    async def check(self, step: int) -> None:
        """What it generates has the log-probabilities that the model of that version gives it."""
        (sample,) = samples(await self.generate(limit=20)[0])
        assert {PolicyVersion.unpack(int(each)).step for each in sample.versions} == {step}
        expected = from_scratch(self.models.weights[step], request(0).prompt, sample)
        assert_close(sample.logprobs, expected, terms=forward_terms(256), scale=LOGITS)

    def holder(self, tensor: torch.Tensor) -> Any:
        """The set of the receiver's weights in which `tensor` lies, or None."""
        for each in self.service.weights._sets:
            if any(0 <= tensor.data_ptr() - arena.data_ptr() < arena.nbytes for arena in each._arenas):
                return each
        return None


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[None]:
    async with running(site.actor):
        try:
            yield
        finally:
            if site.epoch:
                site.group.abort()
            await site.service.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    before = threading.active_count()
    yield
    assert settles(lambda: [threading.active_count()], [before + 8])  # asyncio's own, which serve the whole process


def run(models: Models, test: Callable[[Site], Coroutine[Any, Any, None]], **weight_sync: Any) -> None:
    async def within() -> None:
        site = Site(models, **weight_sync)
        async with serving(site):
            await asyncio.wait_for(test(site), DEADLINE)

    asyncio.run(within())


def test_a_version_is_published_while_samples_are_generated(models: Models) -> None:
    """The other modes, encodings and transports: test_weight_sync_pairs.py."""

    async def test(site: Site) -> None:
        await site.join()
        groups = await site.busy()
        assert 0 < await site.publish(1) < DEADLINE
        assert site.service.version == version(1)
        assert [versions(await group)[0] for group in groups] == [[0, 1]] * SLOTS + [[1]] * SLOTS
        for group in groups:
            (sample,) = samples(await group)
            after = sample.versions == version(1).pack()
            expected = from_scratch(models.weights[1], request(0).prompt, sample)
            assert_close(sample.logprobs[after], expected[after], terms=forward_terms(256), scale=LOGITS)
        await site.check(1)

    run(models, test, in_flight="recompute")


def test_another_dtype_is_received_into_one_set_of_buckets(models: Models) -> None:
    specs = tuple(replace(spec, dtype="bfloat16") for spec in models.manifest.tensors)
    manifest = replace(models.manifest, tensors=specs)

    async def test(site: Site) -> None:
        site.sender = SendBuffers(manifest)
        await site.join(manifest)
        for step in (1, 2, 3):
            await site.publish(step)
            expected = models.weights[step].get_input_embeddings().weight.bfloat16().float()
            assert torch.equal(site.engine._decoder.weights.embedding, expected)
        assert len(site.service.weights._sets) == 1

    run(models, test)


def test_the_engine_generates_from_buckets_that_take_turns_and_outlive_epochs_resends_and_aborts(models: Models) -> None:
    async def test(site: Site) -> None:
        await site.join()
        sets = []
        for step in (1, 2, 3):
            await site.publish(step)
            sets.append(site.holder(site.engine._decoder.weights.embedding))
            assert sets[-1] is site.service.weights._adopted
            await site.check(step)
        assert sets[0] is not sets[1] and sets[0] is sets[2]
        inside = sets[-1]
        await site.join()
        assert await site.publish(3) == 0.0  # for a newcomer
        assert await site.publish(3) == 0.0
        assert site.service.weights.swaps == 3
        await site.check(3)
        await site.transfer(4)  # staged, and withdrawn
        await site.ask(AbortWeights(version(4), site.epoch))
        await site.join()
        await site.break_off(4, 3)
        await site.check(3)
        await site.join()
        await site.publish(4)
        await site.check(4)
        outside = site.holder(site.engine._decoder.weights.embedding)
        assert inside is not None and outside is not None and inside is not outside

    run(models, test)


def test_weights_that_do_not_fit_fail_the_reception_and_not_the_rollout(models: Models) -> None:
    async def test(site: Site) -> None:
        specs = tuple(replace(spec, name=spec.name.replace("q_proj", "queries")) for spec in models.manifest.tensors)
        await site.join(replace(models.manifest, tensors=specs))
        groups = await site.busy()
        with pytest.raises(InvalidMessage):
            await site.transfer(1)
        await site.ask(AbortWeights(version(1), site.epoch))
        site.finish_group.set()
        assert [versions(await group)[0] for group in groups] == [[0]] * len(groups)
        await site.join()
        await site.publish(2)
        await site.check(2)

    run(models, test)


# ---------------------------------------------------------------------------------------------- memory in turns


def test_a_version_comes_while_there_is_no_cache(models: Models) -> None:
    async def test(site: Site) -> None:
        await site.join()
        for step in (1, 2):
            await site.ask(SetLevel(Level.ASLEEP))
            assert site.service.state == "asleep"
            waiting = site.actor.send(request(step))
            await site.ask(SetLevel(Level.WEIGHTS))
            await site.publish(step)
            assert (site.service.state, site.service.version) == ("asleep", version(step))
            assert site.engine._cache.data.untyped_storage().nbytes() == 0
            await site.ask(SetLevel(Level.AWAKE))
            assert site.service.state == "ready"
            group = await waiting
            assert (group.oldest, group.newest) == (version(step), version(step))

    run(models, test)


def test_what_is_under_way_is_given_up_for_a_sleep_or_goes_on_after_one_that_keeps_it(models: Models) -> None:
    async def test(site: Site) -> None:
        async def asked(number: int) -> asyncio.Future[GeneratedGroup]:
            made = site.actor.send(request(number, limit=240))
            await until(lambda: site.engine.stats().running)  # it has to be in the middle of it, where it is for long
            return made

        await site.join()
        first = await asked(1)
        await site.ask(SetLevel(Level.ASLEEP, keeps=True))
        assert site.engine.stats().running and not site.service.busy
        await site.ask(SetLevel(Level.AWAKE))
        assert (await first).group_id == 1
        again = await asked(2)
        await site.ask(SetLevel(Level.ASLEEP, keeps=True))
        await site.ask(SetLevel(Level.ASLEEP))  # as of a coordinator that takes over
        with pytest.raises(Cancelled, match="put to sleep"):
            await again
        await site.ask(SetLevel(Level.AWAKE))
        given_up = await asked(3)
        await site.ask(SetLevel(Level.ASLEEP))
        with pytest.raises(Cancelled, match="put to sleep"):
            await given_up
        assert site.engine.stats().running == 0
        await site.ask(SetLevel(Level.AWAKE))
        await site.actor.send(request(4))

    run(models, test)
