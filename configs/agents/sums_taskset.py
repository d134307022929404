"""A taskset of verifiers': additions, each with an answer that is looked for behind ####."""

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    smallest: int = 10
    largest: int = 49


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rpartition("#### ")[2] == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        numbers = range(self.config.smallest, self.config.largest + 1)
        for a in numbers:
            for b in numbers:
                yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["SumsTaskset"]
