"""The page's HTTP side: who may ask, which run a request means, and what has changed. Only reads, and keeps nothing."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from launcher.page.samples import SampleFilter, SampleReader
from launcher.page.views import PLAIN, STATIC, THIS, Mark, RunView, changed, marks, of_files
from runtime import run_files, timeouts
from runtime.errors import SluiceError, UserError
from runtime.process import network
from runtime.process.http_server import Handler, HttpServer, bounded, let_in
from runtime.process.os_process import ended_as_by_ctrl_c

LOCAL = ("127.0.0.1", "::1", "localhost")
COOKIE = "sluice-page"
CONNECTIONS, BACKLOG = 256, 32
FOLLOWERS = 64  # pages that get events
LARGEST = 2**53  # in a query; floats do not represent every larger integer
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Server": "sluice",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Pages:
    """The runs of a folder: the folder itself, or the folders directly in it."""

    def __init__(self, root: Path):
        """Open the folder. Raises UserError if neither it nor a folder in it holds a run."""
        self.root = root
        self._views: dict[str, tuple[Mark | None, RunView, SampleReader]] = {}
        if not self.names():
            raise UserError(f"page: {root}: neither a run's folder nor a folder of runs")

    def names(self) -> list[str]:
        """Return the runs' names; `THIS` for the folder itself."""
        if _is_run(self.root):
            return [THIS]
        if not self.root.is_dir():
            return []
        root = self.root.resolve()  # a link may lead to another run of this folder, not elsewhere
        return sorted(path.name for path in self.root.iterdir() if path.resolve().parent == root and _is_run(path))

    def of(self, name: str) -> tuple[RunView, SampleReader]:
        """Return a run's view and samples. Raises HTTPNotFound if the name is not one of `names`."""
        if name not in self.names():
            raise web.HTTPNotFound(text=f"no run {name!r} here")
        folder = self.root if name == THIS else self.root / name
        began = next(of_files([folder / run_files.CONFIG]), None)
        if name not in self._views or self._views[name][0] != began:  # a new run has replaced it
            self._views[name] = began, RunView(folder), SampleReader(folder)
        return self._views[name][1:]

    def list(self) -> list[dict[str, Any]]:
        found = []
        for name in self.names():
            try:
                run = self.of(name)[0]
                found.append({"id": name, **run.summary(), "waited": {} if name == THIS else run.waited()})
            except (SluiceError, OSError) as error:
                found.append({"id": name, "name": name, "state": str(error), "facts": [], "waited": {}})
        return found


def _is_run(folder: Path) -> bool:
    return (folder / run_files.CONFIG).is_file() or (folder / run_files.METRICS).is_file()


class PageGuard:
    """Admits requests with the token: in the address first, then in a cookie. Other users of this machine do not have it. On a
    loopback address the Host header must be the page's own, or a page of another site could read a run by DNS rebinding."""

    def __init__(self, host: str, token: str):
        self._token, self._names = token, {*LOCAL, host} if host in LOCAL else None

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        cookie = f"{COOKIE}-{request.url.port}"  # a cookie is valid for all ports of a host
        given = request.query.get("token", request.cookies.get(cookie, ""))
        if self._names is not None and (request.url.host or "") not in self._names:
            raise web.HTTPForbidden(text=f"this page is not {request.host}: open it as localhost\n")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            raise web.HTTPUnauthorized(text="this page wants the token that `sluice page` printed: ?token=…\n")
        let_in(request)
        if "token" in request.query and request.method == "GET":
            again = web.HTTPFound(request.url.without_query_params("token"))
            again.set_cookie(cookie, self._token, httponly=True, samesite="Strict")
            raise again
        return await handler(request)


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


class PageRoutes:
    """Answers requests. Each view is made in a thread, so that a slow view delays no other."""

    def __init__(self, pages: Pages):
        self._pages, self._followers = pages, 0

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "page.html"
        files = {each.name: each for each in STATIC.iterdir()}
        if name not in files:
            raise web.HTTPNotFound(text="no such file\n")
        text = files[name].read_text(encoding="utf-8")
        return web.Response(text=text, content_type=_TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache"})

    async def runs(self, _: web.Request) -> web.Response:
        return await _answer(self._pages.list)

    async def view(self, request: web.Request) -> web.Response:
        run, samples = await asyncio.to_thread(self._pages.of, request.match_info["run"])
        query = request.query
        views: dict[str, Callable[[], Any]] = {
            **{name: getattr(run, name) for name in PLAIN},
            "metric": lambda: run.metric(query.get("name", "")),
            "why": lambda: run.why(_given(query, "from", int), _given(query, "to", int)),
            "lanes": lambda: run.lanes(
                _given(query, "start", float), _given(query, "end", float), min(4000, _given(query, "pixels", int) or 1200)
            ),
            "configuration": lambda: run.configuration(self._pages.of(query["other"])[0] if query.get("other") else None),
            "what-if": run.what_if,
            "samples": lambda: samples.index(_filter(query)),
            "rows": lambda: samples.rows(
                [_number("groups", each, int) for each in query.get("groups", "").split(",") if each][:200]
            ),
            "group": lambda: samples.group(_given(query, "id", int, 0)),
        }
        name = request.match_info["view"]
        if name not in views:
            raise web.HTTPNotFound(text=f"no view {name!r}\n")
        return await _answer(views[name])

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send which of the run's files have changed, until the browser closes the connection."""
        if self._followers >= FOLLOWERS:
            raise web.HTTPServiceUnavailable(text=f"{FOLLOWERS} pages follow runs already\n")
        self._followers += 1
        try:
            return await self._follow(request)
        finally:
            self._followers -= 1

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        # Files are read in threads: a slow disk must not stop the answers to other requests.
        folder = (await asyncio.to_thread(self._pages.of, request.match_info["run"]))[0].folder
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        before = await asyncio.to_thread(marks, folder)
        await answer.prepare(request)
        with suppress(ConnectionResetError):  # a write raises it once the browser has gone
            while True:
                await asyncio.sleep(timeouts.PAGE_FOLLOW)
                after = await asyncio.to_thread(marks, folder)
                found, before = changed(before, after), after
                # An empty comment while nothing changes: only a write notices that the browser has gone.
                await answer.write(b"data: " + msgspec.json.encode(found) + b"\n\n" if found else b":\n\n")
        return answer


async def _answer(work: Callable[[], Any]) -> web.Response:
    try:
        made = await asyncio.to_thread(work)
    except (SluiceError, OSError) as error:
        return web.json_response({"error": str(error)}, status=404)
    except ValueError as error:  # a fault of the request
        return web.json_response({"error": str(error)}, status=400)
    return web.Response(body=await asyncio.to_thread(msgspec.json.encode, made), content_type="application/json")


def _number(name: str, text: str, kind: type[int | float]) -> Any:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (kind is int and abs(value) > LARGEST):
        raise web.HTTPBadRequest(text=f"{name}: {text[:40]!r} is not a number, or is too large\n")
    return kind(value)


def _given(query: Any, name: str, kind: type[int | float], otherwise: Any = None) -> Any:
    return _number(name, query[name], kind) if query.get(name) else otherwise


def _filter(query: Any) -> SampleFilter:
    def bounds(name: str) -> tuple[Any, Any]:
        return _given(query, f"{name}-from", float, -math.inf), _given(query, f"{name}-to", float, math.inf)

    return SampleFilter(
        states=tuple(filter(None, query.get("states", "").split(","))),
        steps=bounds("step"),
        reward=bounds("reward"),
        tokens=bounds("tokens"),
        **{name: query.get(name, "") for name in ("source", "replica", "text")},
        after=_given(query, "after", int, -1),
    )


def application(pages: Pages, guard: PageGuard) -> web.Application:
    made = web.Application(middlewares=[bounded, guard.check])
    made.on_response_prepare.append(_sign)
    routes = PageRoutes(pages)
    made.router.add_get("/", routes.file)
    made.router.add_get("/static/{name}", routes.file)
    made.router.add_get("/api/runs", routes.runs)
    made.router.add_get("/api/run/{run}/events", routes.events)
    made.router.add_get("/api/run/{run}/{view}", routes.view)
    return made


def run(options: argparse.Namespace) -> None:
    with ended_as_by_ctrl_c():
        asyncio.run(serve(options.folder, options.host, options.port, lambda address: print(address, flush=True)))


async def serve(root: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled; call `ready` with the address. Raises UserError for a port in use, or a folder without a run."""
    token = secrets.token_urlsafe(24)
    server = HttpServer(application(Pages(root), PageGuard(host, token)), CONNECTIONS, timeouts.PAGE_GRACE)
    try:
        listener = network.listener(host, port, BACKLOG)
    except OSError as error:
        raise UserError(f"--port: {host}:{port}: {(error.strerror or str(error)).lower()}") from None
    try:
        ready(f"{await server.open(listener)}/?token={token}")
        await asyncio.Event().wait()
    finally:
        await server.close()
