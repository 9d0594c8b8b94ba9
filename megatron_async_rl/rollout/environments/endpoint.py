"""OpenAI-compatible endpoint of an engine: an existing agent becomes a rollout by its base URL.

    process of the agent --POST {base_url}/chat/completions--> Agents --> the engine, turn by turn
          +---------------------- its reward ------------------> the sample

A session is one sample, identified by its base URL. The first call's messages become the prompt.
A call that repeats all messages of a segment and adds some continues it: only the addition is
rendered, so token in, token out holds as for any sample (transcript.py). A repeated call, whose
caller hung up before the answer, receives the turn already sampled for it. Any other call (from an
agent that compacted its context, or started another) begins a new segment, up to
`rollout.environment.max_segments`.

Invariants:
- the server runs on the engine's event loop and listens only on the loopback address. The name of a
  session cannot be guessed, and is invalid once its agent has ended. At most STRANGERS connections
  have no session: a new connection closes the oldest;
- a session answers its calls one after the other, across all segments;
- an agent may compute for as long as its own time limit permits, whatever `watchdog.timeout_s` is:
  between its calls the run may be without progress;
- the run determines sampling (rollout.sampling): a call's temperature and similar keys are ignored.
  A call that needs several samples or constrains sampling is refused; a call may shorten its turn
  with `max_tokens` and `stop`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from aiohttp import web

from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments import UNREAD, UNREAD_CALLS, Message, Step
from megatron_async_rl.rollout.environments.completions import (
    MODEL,
    CallRefused,
    ChatCompletion,
    completion,
    read_call,
    same,
    write,
)
from megatron_async_rl.rollout.environments.episode import too_long
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.transcript import (
    EpisodeMessages,
    SampleTurn,
    Transcript,
    TranscriptSegment,
    Turn,
    TurnRequest,
)
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser
from megatron_async_rl.samples.types import Prompt

CLOSE_S = 0.5
"""Time limit for pending calls when the engine ends."""
LONGEST = 64 * 2**20
"""Maximum bytes of a request."""
STRANGERS = 512
"""Maximum connections without a session: each takes a file descriptor of the engine. Agents that
connect at the same moment count until their first call is read."""


class _Thread(TranscriptSegment):
    """A segment with the messages that it consists of."""

    def __init__(self, prompt: Prompt, tools: Any) -> None:
        super().__init__(prompt)
        self.tools = tools
        self.history: list[Message] = []
        self.unread = False
        """True while the last answer has not been delivered to the caller."""

    def repeated(self, messages: Sequence[Message]) -> int:
        """Return how many messages the segment and `messages` have in common at the start."""
        pairs = zip(self.history, messages, strict=False)
        known = [same(one) == same(other) for one, other in pairs]
        return (*known, False).index(False)

    def goes_on(self, messages: Sequence[Message], tools: Any) -> bool:
        return self.tools == tools and self.repeated(messages) == len(self.history) < len(messages)

    def asked_again(self, messages: Sequence[Message], tools: Any) -> bool:
        """True for a retry. The same call after a delivered answer requests another answer."""
        before = len(self.history) - 1
        return (
            self.unread
            and self.tools == tools
            and self.repeated(messages) == len(messages) == before
        )


class _Session:
    """One sample, and the calls of its agent."""

    def __init__(
        self,
        transcript: Transcript,
        sample: SampleTurn,
        max_tokens: int,
        environments: Environments,
    ) -> None:
        self.transcript, self._sample, self.max_tokens = transcript, sample, max_tokens
        self._environments = environments
        self.threads: list[_Thread] = []
        self.lock = asyncio.Lock()
        self.refusal = ""
        """Reason of the last refused call."""
        self.ended = False
        self._calls = 0
        self._own_work = ExitStack()
        """Holds `working_alone` while no call is pending."""

    def begin(self) -> None:
        """Start the agent's time limit."""
        self._until = asyncio.get_running_loop().time() + self._environments.settings.timeout_s
        self._work_alone()

    def end(self) -> None:
        self.ended = True
        self._own_work.close()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark the agent as waiting for the model."""
        self._own_work.close()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            # Concurrent calls: the agent is alone only after the last of them.
            if not self._calls and not self.ended:
                self._work_alone()

    def _work_alone(self) -> None:
        left_s = self._until - asyncio.get_running_loop().time()
        self._own_work.enter_context(self._environments.working_alone(left_s))

    async def sample(self, requested: TurnRequest) -> Turn:
        """Sample a turn. Raises CallRefused once the agent has ended."""
        turn = None if self.ended else await self._sample(requested)
        # The agent may have ended meanwhile; an abandoned turn must not enter its sample.
        if turn is None or self.ended:
            raise CallRefused("the session's agent has ended")
        return turn

    def explained(self, error: str) -> str:
        """Return the error, extended by the refusal that may have caused it."""
        known = not self.refusal or self.refusal in error
        return error if known else f"{error} (a call was refused: {self.refusal})"


class _Connections:
    """Factory of aiohttp's connections that limits connections without a session."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._strangers: dict[web.RequestHandler, None] = {}
        """Oldest first. Closed connections stay until newer ones displace them."""

    def __call__(self) -> web.RequestHandler:
        while len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest)
            # Agents of the run name their session at once; only strangers stay here.
            oldest.force_close()
        connection = self._server()
        self._strangers[connection] = None
        return connection

    def admit(self, connection: web.RequestHandler) -> None:
        self._strangers.pop(connection, None)


class Agents:
    """The endpoint of one engine, on one event loop. Call `start` first."""

    def __init__(
        self, environments: Environments, tokenizer: Tokenizer, parser: ToolParser
    ) -> None:
        """Raises DataError if the chat template does not permit a second turn."""
        self._environments = environments
        self._parser = parser
        self._tokenizer = tokenizer
        self._follow = EpisodeMessages(tokenizer)
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._connections: _Connections | None = None
        self._listener: asyncio.Server | None = None
        self._url = ""

    async def start(self) -> None:
        # Bounded: an agent may run code of the model, which could exhaust the engine's memory.
        app = web.Application(client_max_size=LONGEST)
        app.router.add_post("/session/{name}/v1/chat/completions", self._complete)
        app.router.add_get("/session/{name}/v1/models", self._models)
        app.router.add_get("/session/{name}/v1/models/{model}", self._models)
        app.router.add_route("*", "/session/{name}/{path:.*}", self._elsewhere)
        app.router.add_route("*", "/{path:.*}", self._elsewhere)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = _Connections(self._runner.server)
        loop = asyncio.get_running_loop()
        # Port 0: the system chooses a free port, so engines on one machine cannot collide.
        self._listener = await loop.create_server(self._connections, "127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def play(self, transcript: Transcript, sample: SampleTurn, max_tokens: int) -> str | None:
        """Run the agent, whose calls fill `transcript`. Return the reason if it failed."""
        session = _Session(transcript, sample, max_tokens, self._environments)
        # Unguessable: sampled code on this machine must not write into another sample.
        name, process = secrets.token_urlsafe(16), None
        try:
            process = await self._environments.open()
            self._sessions[name] = session
            session.begin()
            reward = await process.run(transcript.requested, f"{self._url}/session/{name}/v1")
        except EnvironmentFailed as error:
            # Not a failure: agents often raise when the context is full, and the sample is usable.
            if transcript.truncated and transcript.turns:
                return None
            return session.explained(str(error))
        finally:
            # Before the process is closed, so that late calls find no session.
            self._sessions.pop(name, None)
            session.end()
            if process is not None:
                await process.close()
        if not transcript.turns:
            return session.explained("the agent ended without a turn of the model")
        # The reward of the whole run belongs to its last turn.
        transcript.segments[-1].take_step(Step(reward=reward, done=True))
        return None

    def _session(self, request: web.Request) -> _Session:
        """Return the session that the URL names. Raises CallRefused."""
        session = self._sessions.get(request.match_info.get("name", ""))
        if session is None:
            raise CallRefused("no such session, or its agent has ended", status=404)
        if self._connections is not None:
            self._connections.admit(request.protocol)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_async_rl"}
        try:
            self._session(request)
        except CallRefused as error:
            return error.response
        if "model" in request.match_info:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _elsewhere(self, request: web.Request) -> web.Response:
        """Answer 404 to requests for any other path."""
        error = CallRefused(
            f"{request.method} {request.path}: the endpoint has only POST BASE_URL/chat/completions"
            " and GET BASE_URL/models; the BASE_URL of an agent ends with /v1",
            status=404,
        )
        session = self._sessions.get(request.match_info.get("name", ""))
        if session is not None:
            session.refusal = str(error)
        return error.response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session: _Session | None = None
        try:
            session = self._session(request)
            requested = read_call(await _body(request), self._parser)
            with session.call():
                # Each turn changes the segments that the next call is matched against.
                async with session.lock:
                    thread = await self._answered(session, requested)
                    decode = self._tokenizer.decode if requested.logprobs else None
                    turn, message = thread.turns[-1], thread.history[-1]
                    answer = completion(turn, message, len(thread.ids), decode)
                    # Until the answer is written: a retry of this call must get the same turn.
                    thread.unread = True
            response = await write(request, answer, requested)
            thread.unread = False
            return response
        except CallRefused as error:
            if session is not None:
                session.refusal = str(error)
            return error.response
        except ConnectionError:  # the caller hung up; the turn stays unread for its retry
            return web.Response(status=400)

    async def _answered(self, session: _Session, requested: ChatCompletion) -> _Thread:
        """Return the segment whose last turn answers the call. Raises CallRefused, before anything
        is sampled."""
        messages, tools = requested.messages, requested.tools
        transcript, limit = session.transcript, self._environments.settings.max_turns
        for one in session.threads:
            if one.asked_again(messages, tools):
                return one
        thread = next((one for one in session.threads if one.goes_on(messages, tools)), None)
        content: list[int] = []
        if thread is not None:
            new = [dict(one) for one in messages[len(thread.history) :]]
            sampled = thread.turns[-1].tokens.response_ids.tolist()
            # Before tokenizing: a huge message would block the event loop.
            if too_long(new, transcript.room(thread, session.max_tokens)):
                raise self._full(session)
            content = _rendered(self._follow.between, sampled, new)
            step = Step(observation=new)
        else:
            thread, step = self._begun(session, messages, tools), None
        room = transcript.room(thread, session.max_tokens) - len(content)
        if room < 1 or len(transcript.turns) == limit:
            raise self._full(session, turns=room >= 1)
        if step is not None:
            # After the checks: a call that is refused, perhaps repeatedly, adds no text.
            thread.take_step(step)
        maximum = min(room, requested.maximum or room)
        turn = await transcript.extend(thread, content, session.sample, maximum, requested.stop)
        # Assigned, not only set: the agent may continue with a shorter history after a full one.
        transcript.truncated = turn.reason == "length" and maximum == room
        # The sampled tokens may go past a stop string; the agent reads the text before it.
        text = min(
            (turn.text.partition(stop)[0] for stop in requested.stop), key=len, default=turn.text
        )
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if requested.reads_calls:
            message = self._parser.message(turn.tokens.response_ids.tolist(), text, tools)
        unread = message.pop(UNREAD, None)  # the agent reads plain text, as from any server
        if tools and requested.reads_calls:
            transcript.measured.update({UNREAD_CALLS: float(unread is not None)})
        # Only now: a call that was refused or aborted leaves no segment.
        if thread not in session.threads:
            session.threads.append(thread)
        thread.history = [*messages, message]
        return thread

    def _full(self, session: _Session, *, turns: bool = False) -> CallRefused:
        """Return the refusal of a full sample. `turns`: its turns are used up, not its tokens."""
        session.transcript.truncated = True
        key = (
            f"rollout.environment.max_turns: {self._environments.settings.max_turns}"
            if turns
            else f"rollout.sampling.max_tokens: {session.max_tokens}"
        )
        # OpenAI's code: agents react to it by ending or compacting their context.
        code = "context_length_exceeded"
        return CallRefused(f"{code}: the sample is at its limit, {key}", code=code)

    def _begun(self, session: _Session, messages: Sequence[Message], tools: Any) -> _Thread:
        """Begin a segment. Raises CallRefused if the sample has reached the limit on segments."""
        maximum = self._environments.settings.max_segments
        if len(session.threads) == maximum:
            nearest = max(session.threads, key=lambda one: one.repeated(messages))
            where = nearest.repeated(messages)
            what = (
                "its tools differ from those of the call before"
                if where == len(nearest.history) < len(messages)
                else f"messages[{where}] differs, or nothing follows"
            )
            raise CallRefused(
                f"the call does not repeat the earlier messages and append others: {what}. It would"
                f" begin segment {maximum + 1} of the sample; rollout.environment.max_segments:"
                f" {maximum}"
            )
        requested = session.transcript.requested
        if too_long(messages, len(requested.token_ids) + session.max_tokens):
            raise self._full(session)
        text = _rendered(self._tokenizer.render_chat, messages, answer=True, tools=tools)
        ids = tuple(_rendered(self._tokenizer.encode_rendered, text))
        return _Thread(
            Prompt(id=requested.id, text=text, token_ids=ids, fields=requested.fields), tools
        )


async def _body(request: web.Request) -> Any:
    """Return the JSON body. Raises CallRefused."""
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the call is not a JSON object: {error}") from None
    except web.HTTPRequestEntityTooLarge:
        raise CallRefused(f"the call has more than {LONGEST // 2**20} MiB", status=413) from None


def _rendered[Result](render: Callable[..., Result], *messages: Any, **options: Any) -> Result:
    """Render messages. Raises CallRefused for any exception: a template is a program, and an agent
    can send it anything."""
    try:
        return render(*messages, **options)
    except Exception as error:
        raise CallRefused(f"the messages cannot be rendered: {error}") from error
