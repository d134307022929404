"""vLLM's own OpenAI server over an engine that answers from the script: for `sluice bench gateway`, in vLLM's environment.

Requests are parsed, rendered, tokenized and answered by vLLM's own classes, as `vllm serve` sets them up; there is no engine
behind them: no scheduler, no message to one, and no text that is put together token by token.
`python -m benchmarks.gateway_vllm` takes its settings from standard input, prints where it serves, and ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import msgspec
import uvloop

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

from starlette.responses import JSONResponse
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.gateway_trial import HOST, REPLIES, ServerLag, TrialSettings, taking, tokens_of, until_told
from runtime.process import os_process

TASKS = ("generate",)


class _Scripted(EngineClient):  # type: ignore[misc]
    is_running, is_stopped, errored, dead_error = True, False, False, RuntimeError("never")

    def __init__(self, settings: TrialSettings, arguments: Any):
        self.vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        tokenizer = self.renderer.get_tokenizer()
        self._replies = [(tokenizer.decode(ids, skip_special_tokens=True), ids.tolist()) for ids in tokens_of(settings.model)]
        self._settings, self._random = settings, Random(settings.seed)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._settings.reply:
            await asyncio.sleep(taking(self._settings.reply, self._random))
        text, ids = self._replies[self._random.randrange(REPLIES)]
        output = CompletionOutput(0, text, ids, None, None, finish_reason="stop")
        yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [output], finished=True)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        return False


_Scripted.__abstractmethods__ = frozenset()  # of an engine, whom nobody asks for them


async def serve(settings: TrialSettings) -> None:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [
            *("--model", settings.model, "--served-model-name", "policy", "--max-model-len", str(settings.context)),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-uvicorn-access-log"),
            *("--disable-log-stats", "--dtype", "float32", "--uvicorn-log-level", "error"),
        ]
    )
    engine, lag = _Scripted(settings, arguments), ServerLag()
    app = build_app(arguments, TASKS, engine.model_config)

    async def lags(_: Any) -> JSONResponse:
        return JSONResponse(lag.told())

    app.add_route("/lags", lags)
    await init_app_state(engine, app.state, arguments, TASKS)
    listening = socket.create_server((HOST, 0), backlog=settings.episodes)
    backlog = settings.episodes
    work = (serve_http(app, sock=listening, log_level="error", access_log=False, backlog=backlog), lag.run(), until_told())
    serving = [asyncio.ensure_future(each) for each in work]
    print(f"http://{HOST}:{listening.getsockname()[1]}", flush=True)
    await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)  # what vLLM leaves behind is nobody's


if __name__ == "__main__":
    os_process.die_with_parent()
    os_process.raise_descriptor_limit()
    uvloop.run(serve(msgspec.json.decode(sys.stdin.readline(), type=TrialSettings)))
